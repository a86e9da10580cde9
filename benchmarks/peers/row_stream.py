"""A separate process that sends rows at a steady rate: ``python -m benchmarks.peers.row_stream JSON``.

Every tick is one call of the producer. Its first row has one of `PROBES` keys, round robin, and its value is
the number of the tick, so that a reader knows which call sent it. The process ends with its input, and writes
the Unix times of all calls to a file.
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
    """A producer for the topic of a `RowStream`, which it creates if it is missing."""
    return Producer(brokers, model=model, partitions=PARTITIONS)


class RowStream:
    """The running process. ``rows_s`` rows a second of ``keys`` keys, the first of which are the probes."""

    def __init__(
        self, brokers: str, model: str, table: str, keys: int, dim: int, rows_s: int, file: Path
    ) -> None:
        options = {"brokers": brokers, "model": model, "table": table, "keys": keys, "dim": dim}
        self._file = file
        command = [sys.executable, "-m", "benchmarks.peers.row_stream",
                   json.dumps({**options, "rows": round(rows_s * TICK_S), "file": str(file)})]  # fmt: skip
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.pid = self._process.pid

    def end(self) -> NDArray[np.float64]:
        """End the process; returns the time of each call by tick, Unix time in seconds."""
        self._process.communicate(timeout=60)
        times: NDArray[np.float64] = np.load(self._file)
        return times

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _send(options: dict[str, Any], ended: threading.Event) -> list[float]:
    random = np.random.default_rng(1)
    rows = options["rows"]
    drawn = random.integers(PROBES, options["keys"], 1 << 20)
    vectors = random.random((rows, options["dim"]), np.float32)
    times = []
    begun = time.monotonic()
    with stream_producer(options["brokers"], options["model"]) as producer:
        while not ended.is_set():
            tick = len(times)
            start = tick * rows % (len(drawn) - rows)
            keys = drawn[start : start + rows].copy()
            keys[0] = tick % PROBES
            vectors[0] = tick
            times.append(time.time())
            producer.send(options["table"], keys, vectors)
            time.sleep(max(0.0, begun + (tick + 1) * TICK_S - time.monotonic()))
    return times


def main() -> None:
    options, ended = json.loads(sys.argv[1]), threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    np.save(options["file"], _send(options, ended))


if __name__ == "__main__":
    main()
