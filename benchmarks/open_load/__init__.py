"""A native open-loop load generator for REST and gRPC, compiled on first use.

Requests of several kinds are sent at the times of a Poisson process, whether earlier ones are answered or
not. Each answer is recorded with the time at which its request was due, so that a script can sort answers
by what it did at that time, and a server that falls behind is charged for it. Answers are checked: of the
last ``count`` FP32 numbers, each ``stride``-th must be the same, for example a version that every row
carries."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.grpc_load import call_head
from benchmarks.native_load import Template
from benchmarks.peers.environments import ROOT, PeerMissing

HERE = Path(__file__).parent
SOURCES = (HERE / "load.cpp", HERE.parent / "native_load/connection.hpp")
RECORD = np.dtype(
    [
        *(("due", "<i8"), ("sent", "<i8"), ("end", "<i8"), ("value", "<f4")),
        *(("status", "<i2"), ("kind", "u1"), ("wrong", "u1")),
    ]
)
"""An answer: times in ns of `time.monotonic_ns`; the checked number; status, 200 for OK, 0 for a request that
was not answered because its connection ended or 1,000 others waited; the number of its kind; 1 if the checked
numbers differ, 2 if some are 0 and the others the same."""


@dataclass(frozen=True)
class Kind:
    """Requests of ``template``, ``share`` of all; ``count`` and ``stride`` of the numbers to check."""

    template: Template
    share: float = 1.0
    count: int = 0
    stride: int = 1


@dataclass
class Running:
    """A load in flight; after its end ``records`` (n,) of `RECORD`, in the order of the answers, and the
    first ``error`` of the server."""

    process: subprocess.Popen[str]
    records: NDArray[Any] = field(default_factory=lambda: np.empty(0, RECORD))
    error: str = ""


def build() -> Path:
    """The program, compiled if it is missing. Raises PeerMissing."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise PeerMissing("no C++ compiler: apt-get install g++")
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in SOURCES)).hexdigest()[:16]
    program = ROOT / "open_load" / f"load-{digest}"
    if program.exists():
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        made = Path(folder, "load")
        command = [compiler, "-O3", "-std=c++17", str(SOURCES[0]), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PeerMissing(f"the load generator does not build: {done.stderr[:2000]}")
        made.rename(program)
    return program


@contextmanager
def open_load(
    address: str,
    kinds: Sequence[Kind],
    rate: float,
    *,
    seconds: float = 3600.0,
    connections: int = 1,
    prefix: Sequence[str] = (),
    seed: int = 1,
    idle_s: float = 1.5,
) -> Iterator[Running]:
    """Send ``rate`` requests a second to ``address``, an IPv4 address and a port, until the block ends.

    ``rate`` 0: ``connections`` callers that send their next request when the last one is answered.
    ``idle_s``: a connection that was idle for longer is opened again; less than the server allows, and as
    much as possible, because new connections in a burst prolong it.
    ``prefix``: a command in front of the program, as of `taskset`. Raises RuntimeError if that failed."""
    host, _, port = address.rpartition(":")
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "host": host,
            "port": port,
            "rate": rate,
            "seconds": seconds,
            "connections": connections,
            "seed": seed,
            "idle": idle_s,
            "records": Path(folder, "records"),
            "kinds": len(kinds),
        }
        for i, kind in enumerate(kinds):
            options |= _options(kind, address, Path(folder, str(i)), i)
        command = [*prefix, str(build()), *(f"{name}={value}" for name, value in options.items())]
        running = Running(
            subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        try:
            yield running
            _, running.error = running.process.communicate(timeout=60)  # closes its input
            if running.process.returncode:
                raise RuntimeError(running.error.strip())
            running.records = np.fromfile(options["records"], RECORD)
        finally:
            running.process.kill()
            running.process.wait()


def _options(kind: Kind, address: str, folder: Path, number: int) -> dict[str, Any]:
    folder.mkdir()
    template = kind.template
    message, head = folder / "message", folder / "head"
    message.write_bytes(template.message)
    head.write_bytes(call_head(template.method, address) if template.method else b"")
    options = {
        "protocol": template.protocol,
        "message": message,
        "head": head,
        "patches": ",".join(
            f"{p.offset}:{p.count}:{p.limit}:{p.source}:{p.skew}" for p in template.patches
        ),
        "share": kind.share,
        "count": kind.count,
        "stride": kind.stride,
    }
    return {f"{number}.{name}": value for name, value in options.items()}
