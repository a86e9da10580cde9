"""RocksDB's batched read from C++, built at run time against the distribution's librocksdb."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import IO

from benchmarks.peers.environments import HERE, ROOT, PeerMissing

SOURCE = HERE / "rocksdb_multiget.cpp"


def build() -> Path:
    """The program, compiled when it is not yet. Raises PeerMissing."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise PeerMissing("no C++ compiler: apt-get install g++")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    program = ROOT / "rocksdb" / f"multiget-{digest}"
    if program.exists():
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    part = program.with_suffix(".part")
    command = [compiler, "-O2", "-std=c++17", str(SOURCE), "-lrocksdb", "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "")
        raise PeerMissing(f"the C++ peer does not build: {first}; apt-get install librocksdb-dev")
    part.rename(program)
    return program


class MultiGet:
    """One open database. `run` may be called again and again; ends with ``with``."""

    def __init__(self, folder: Path, family: str, value_bytes: int, *, mmap: bool) -> None:
        command = [build(), folder, family, value_bytes, int(mmap)]
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._output.readline() != "ready\n":
            _, said = self._process.communicate()
            raise PeerMissing(f"the C++ peer cannot open the database: {said.strip()}")

    @property
    def _output(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def run(self, keys: Path, batch: int) -> tuple[int, float, float]:
        """Keys found, CPU seconds, seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{keys} {batch}\n")
        self._process.stdin.flush()
        found, cpu, wall = self._output.readline().split()
        return int(found), float(cpu), float(wall)

    def __enter__(self) -> MultiGet:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.communicate()
