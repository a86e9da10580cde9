"""Lookups at a steady rate that record when updates become visible.

They run on threads of this process, or of one that is attached to the node:
``python -m benchmarks.peers.fresh_lookups JSON``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hps
from benchmarks.measure import zipf_keys
from benchmarks.peers.row_stream import PROBES
from hps.node.served_models import OpenModels
from services.frontend.workers.scheduler_slice import request_short_slices

LOOKUPS_S, KEYS = 200, 1_024
_THREADS = 4


class TickTimes:
    """Time at which a polling reader first saw each tick. Not thread-safe."""

    def __init__(self) -> None:
        self._last = np.full(PROBES, -1.0)
        self.times: dict[int, float] = {}

    def note(self, values: NDArray[Any]) -> None:
        """Record ``values (PROBES,)``: the ticks that are served for the probes now."""
        now = time.time()
        for i in np.flatnonzero(values > self._last).tolist():
            first = int(self._last[i]) + PROBES if self._last[i] >= 0 else int(values[i])
            for tick in range(first, int(values[i]) + 1, PROBES):
                self.times[tick] = now
            self._last[i] = values[i]


class Lookups:
    """200 lookups a second on a few threads. ``took``: seconds of each, in the present stretch."""

    def __init__(self, node: OpenModels, model: str, table: str, rows: int, seed: int) -> None:
        self._node, self._model, self._table = node, model, table
        drawn = zipf_keys(np.random.default_rng(seed), rows - PROBES, (512, KEYS - PROBES)) + PROBES
        self._keys = [np.concatenate([np.arange(PROBES), each]) for each in drawn]
        self.seen, self.took, self._ended = TickTimes(), [0.0], False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"lookups-{i}", daemon=True)
            for i in range(_THREADS)
        ]
        for each in self._threads:
            each.start()

    def _run(self, number: int) -> None:
        due = time.monotonic() + number / LOOKUPS_S
        while not self._ended:
            found = self._node.lookup(
                self._model, {self._table: self._keys[number % len(self._keys)]}
            )
            self.took.append(time.monotonic() - due)
            with self._lock:
                self.seen.note(found.vectors[self._table][:PROBES, 0])
            number += _THREADS
            due += _THREADS / LOOKUPS_S
            time.sleep(max(0.0, due - time.monotonic()))

    def stretch(self, seconds: float) -> list[float]:
        """Times of the lookups of the next ``seconds``."""
        self.took = []
        time.sleep(seconds)
        return list(self.took)

    def end(self) -> None:
        self._ended = True
        for each in self._threads:
            each.join()


class AttachedLookups:
    """`Lookups` of a process that is attached to the node of ``settings``."""

    def __init__(
        self, settings: dict[str, Any], model: str, table: str, rows: int, seed: int
    ) -> None:
        arguments = json.dumps([settings, model, table, rows, seed])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.fresh_lookups", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self._process.pid
        self._read_line()

    def stretch(self, seconds: float) -> list[float]:
        """As `Lookups.stretch`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n".encode())
        self._process.stdin.flush()
        took: list[float] = self._read_line()
        return took

    def end(self) -> dict[int, float]:
        """End the process; returns when each tick was first seen, Unix time in seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        times = {int(tick): at for tick, at in self._read_line().items()}
        self._process.wait(60)
        return times

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read_line(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def main() -> None:
    request_short_slices()  # as workers do
    settings, *arguments = json.loads(sys.argv[1])
    with hps.attach(settings) as node:
        lookups = Lookups(node, *arguments)
        print("true", flush=True)
        for seconds in sys.stdin:
            print(json.dumps(lookups.stretch(float(seconds))), flush=True)
        lookups.end()
        print(json.dumps(lookups.seen.times), flush=True)


if __name__ == "__main__":
    main()
