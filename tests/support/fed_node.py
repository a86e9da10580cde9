"""A node in a process of its own that can be killed: ``python -m tests.support.fed_node JSON``.

It asks for rows all the time and checks each; what is wrong is appended to a file that outlives it. Other
commands come by its input, a line each: see `main`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import hps
from hps.types import Source
from tests.support.update_stream import UpdateStream

MODEL, TABLE = "streamed", "items"
_ASKED = 256


class FedNode:
    """One node by its ``settings``, started and killed again and again, in a ``folder`` for its files."""

    def __init__(self, folder: Path, settings: dict[str, Any], stream: UpdateStream) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.faults, self.log, self._answers = (
            folder / name for name in ("faults.txt", "log.txt", "answers.npz")
        )
        self._given = json.dumps(
            {"settings": settings, "stream": asdict(stream), "faults": str(self.faults)}
        )
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns at once, before it serves."""
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fed_node", self._given],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def kill(self) -> None:
        """``kill -9``."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def ask(self, command: str) -> Any:
        """The answer of the node; waits until it serves."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(command + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"the node ended:\n{self.log.read_text()[-3000:]}"
        return json.loads(line)

    def answers(self, keys: int) -> tuple[np.ndarray, np.ndarray]:
        """Vectors (keys, dim) and sources (keys,), as served for the keys from 0 on."""
        self.ask(f"answers {keys} {self._answers}")
        with np.load(self._answers) as found:
            return found["vectors"], found["sources"]

    def close(self) -> None:
        """Have it end in order."""
        if self._process is not None:
            self._process.communicate(timeout=120)
            self._process = None


def _look(node: hps.Node, stream: UpdateStream, faults: Path, ended: threading.Event) -> None:
    random = np.random.default_rng()
    while not ended.is_set():
        keys = np.unique(random.integers(0, stream.keys, _ASKED))
        try:
            stream.numbers(keys, node.lookup(MODEL, {TABLE: keys}).vectors[TABLE])
        except Exception as error:  # whatever a lookup says must be explained
            with faults.open("a") as file:
                file.write(f"{type(error).__name__}: {error}\n")
        time.sleep(0.005)


def _applied(node: hps.Node, topic: str, partitions: int) -> dict[str, list[int]]:
    """Per group and partition, the offset that every store has applied; -1 if unknown."""
    applied = {}
    for stream in node.streams._readers.streams:
        ingestor = stream.ingestor
        readings = [(each.store, t) for each in ingestor._stores for t in stream.readers(topic)]
        applied[stream.group] = [
            min((_offset(store.applied(t, topic, i)) for store, t in readings), default=-1)
            for i in range(partitions)
        ]
    return applied


def _offset(applied: int | None) -> int:
    return -1 if applied is None else applied


def main() -> None:
    given = json.loads(sys.argv[1])
    stream, ended = UpdateStream(**given["stream"]), threading.Event()
    with hps.open(given["settings"]) as node:
        looker = threading.Thread(
            target=_look, args=(node, stream, Path(given["faults"]), ended), daemon=True
        )
        looker.start()
        for line in sys.stdin:
            match line.split():
                case ["applied", topic, partitions]:
                    answer: Any = _applied(node, topic, int(partitions))
                case ["answers", keys, file]:
                    found = node.lookup(MODEL, {TABLE: np.arange(int(keys))}, want_source=True)
                    sources = found.sources[TABLE]
                    np.savez(file, vectors=found.vectors[TABLE], sources=sources)
                    answer = int(np.count_nonzero(sources == Source.CPU))
                case ["status"]:
                    answer = node.streams.status()
                case other:
                    raise ValueError(f"{other} is no command")
            print(json.dumps(answer), flush=True)
        ended.set()
        looker.join()


if __name__ == "__main__":
    main()
