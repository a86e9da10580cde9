"""RocksDB's batched read and its updates from C++, built at run time against Debian's librocksdb."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import IO, Self

from benchmarks.peers.environments import HERE, ROOT, PeerMissing

MULTIGET, UPDATES = HERE / "rocksdb_multiget.cpp", HERE / "rocksdb_updates.cpp"


def build(source: Path = MULTIGET) -> Path:
    """The program of ``source``, compiled if it is missing. Raises PeerMissing."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise PeerMissing("no C++ compiler: apt-get install g++")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    program = ROOT / "rocksdb" / f"{source.stem.removeprefix('rocksdb_')}-{digest}"
    if program.exists():
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    part = program.with_suffix(".part")
    command = [compiler, "-O2", "-std=c++17", str(source), "-lrocksdb", "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "")
        raise PeerMissing(f"the C++ peer does not build: {first}; apt-get install librocksdb-dev")
    part.rename(program)
    return program


class Program:
    """A program on an open database, until the ``with`` block ends; `run` may be called repeatedly."""

    def __init__(self, source: Path, *arguments: object) -> None:
        command = [build(source), *arguments]
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._output.readline() != "ready\n":
            _, errors = self._process.communicate()
            raise PeerMissing(f"the C++ peer cannot open the database: {errors.strip()}")

    @property
    def _output(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def run(self, file: Path, batch: int) -> tuple[int, float, float]:
        """Process the keys in ``file``; returns keys found or written, CPU seconds, seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{file} {batch}\n")
        self._process.stdin.flush()
        found, cpu, wall = self._output.readline().split()
        return int(found), float(cpu), float(wall)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.communicate()


class MultiGet(Program):
    """Reads the rows of files of sorted stored keys."""

    def __init__(self, folder: Path, family: str, value_bytes: int, *, mmap: bool) -> None:
        super().__init__(MULTIGET, folder, family, value_bytes, int(mmap))


class Updates(Program):
    """Applies updates from files of stored keys and values."""

    def __init__(self, folder: Path, family: str, value_bytes: int) -> None:
        super().__init__(UPDATES, folder, family, value_bytes)
