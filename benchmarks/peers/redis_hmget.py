"""Peers that read rows for keys on their standard input; the C program is compiled when needed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SOURCE = Path(__file__).with_suffix(".c")


class ProgramUnavailable(RuntimeError):
    """The program cannot be built or started; the message names what is missing."""


def build(folder: Path) -> Path:
    """Compile it into ``folder``. Raises ProgramUnavailable."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise ProgramUnavailable("no C compiler")
    program = folder / "redis_hmget"
    command = [compiler, "-O3", "-o", str(program), str(SOURCE), "-lhiredis"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        first = (
            done.stderr.strip().splitlines()[0] if done.stderr.strip() else "it does not compile"
        )
        raise ProgramUnavailable(f"{first} (Debian: libhiredis-dev)")
    return program


class Peer:
    """A running program. Not thread-safe."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def read(self, keys: NDArray[np.int64]) -> tuple[float, int]:
        """Seconds from keys to rows, and the rows' `checksum`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(np.uint64(len(keys)).tobytes() + keys.tobytes())
        self._process.stdin.flush()
        line = self._process.stdout.readline().split()
        if len(line) != 2:
            raise RuntimeError("the peer ended")
        return float(line[0]), int(line[1])


@contextmanager
def running(command: Sequence[str], first_line: bytes = b"") -> Iterator[Peer]:
    """Run the program until the block ends; entered when it has printed ``first_line``."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if first_line and process.stdout.readline() != first_line:
            raise ProgramUnavailable(f"{command[1]} did not start")
        yield Peer(process)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def checksum(rows: NDArray[np.float32]) -> int:
    """Checksum of rows ``(n, dim)``, as the peers compute it."""
    total = 0
    for first in np.ascontiguousarray(rows[:, 0]).view(np.uint32).tolist():
        total = (total * 31 + first) & (2**64 - 1)
    return total
