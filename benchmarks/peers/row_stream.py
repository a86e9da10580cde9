"""Rows sent at a steady rate by a process of its own: ``python -m benchmarks.peers.row_stream JSON``.

Every tick is one call of the producer. Its first row is one of `PROBES` keys in turn, and its value is the
number of the tick, so that whoever sees it knows which call it came from. It ends with its input, and then
leaves the Unix times of all calls in a file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.updates.kafka.producer import Producer

PROBES = 64
PARTITIONS = 2
TICK_S = 0.01


def stream_producer(brokers: str, model: str) -> Producer:
    """One for the topic of a `RowStream`, which it makes where it is not there."""
    return Producer(brokers, model=model, partitions=PARTITIONS)


class RowStream:
    """A running one. ``rows_s`` rows a second of ``keys`` keys, the probes being the first of them."""

    def __init__(
        self, brokers: str, model: str, table: str, keys: int, dim: int, rows_s: int, file: Path
    ) -> None:
        given = {"brokers": brokers, "model": model, "table": table, "keys": keys, "dim": dim}
        self._file = file
        command = [sys.executable, "-m", "benchmarks.peers.row_stream",
                   json.dumps({**given, "rows": round(rows_s * TICK_S), "file": str(file)})]  # fmt: skip
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.pid = self._process.pid

    def end(self) -> NDArray[np.float64]:
        """When each call was made, by tick, Unix seconds."""
        self._process.communicate(timeout=60)
        times: NDArray[np.float64] = np.load(self._file)
        return times

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _send(given: dict[str, Any], ended: threading.Event) -> list[float]:
    random = np.random.default_rng(1)
    rows = given["rows"]
    drawn = random.integers(PROBES, given["keys"], 1 << 20)
    vectors = random.random((rows, given["dim"]), np.float32)
    times = []
    begun = time.monotonic()
    with stream_producer(given["brokers"], given["model"]) as producer:
        while not ended.is_set():
            tick = len(times)
            start = tick * rows % (len(drawn) - rows)
            keys = drawn[start : start + rows].copy()
            keys[0] = tick % PROBES
            vectors[0] = tick
            times.append(time.time())
            producer.send(given["table"], keys, vectors)
            time.sleep(max(0.0, begun + (tick + 1) * TICK_S - time.monotonic()))
    return times


def main() -> None:
    given, ended = json.loads(sys.argv[1]), threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    np.save(given["file"], _send(given, ended))


if __name__ == "__main__":
    main()
