"""A native load generator for REST and gRPC with fresh keys in each request, compiled on first use.

Each caller has a connection and sends its next request when the last one is answered. Before each request
the generator overwrites the keys and numbers that ``Template.patches`` names. If there are enough cores, its
threads poll without sleeping, because a sleeping client adds its wake-up to each latency.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.grpc_load import call_head
from benchmarks.peers.environments import ROOT, PeerMissing
from benchmarks.peers.process import free_ports

HERE = Path(__file__).parent
SOURCES = (HERE / "connection.hpp", HERE / "load.cpp")


@dataclass(frozen=True)
class Patch:
    """Bytes of a message that differ in each request, from ``offset``: ``count`` INT64 keys below ``limit``
    (at most 2^32); with ``limit`` 0 FP32 numbers: the keys of patch number ``source``, else in [-1, 1).

    Keys are uniform, or with ``skew`` the limit times the product of so many further uniform numbers: with 3,
    97 % of them are below 0.3 of the limit."""

    offset: int
    count: int
    limit: int = 0
    source: int = -1
    skew: int = 0


@dataclass(frozen=True)
class Template:
    """A request. ``protocol``: ``http`` (``message`` has head and body), ``grpc`` (``message`` has the prefix
    of 5 bytes; ``method`` is the path) or ``raw`` (a bare answer of ``answer_bytes`` bytes).
    An answer is wrong unless its last ``zeros`` bytes are zero."""

    protocol: str
    message: bytes
    patches: Sequence[Patch] = ()
    method: str = ""
    answer_bytes: int = 0
    zeros: int = 0


@dataclass(frozen=True)
class Callers:
    """``count`` callers for ``seconds`` after ``warm_up`` seconds, on ``cores`` (one thread each; empty: one
    thread that is not pinned). ``samples``: requests and answers to keep, per thread. ``reconnect``: open
    closed connections again instead of doing without them."""

    count: int
    seconds: float
    warm_up: float = 0.0
    cores: Sequence[int] = ()
    spin: bool = False
    samples: int = 0
    reconnect: bool = False
    seed: int = 1


@dataclass(frozen=True)
class LoadSummary:
    """``failures``: answers by status (HTTP's, gRPC's) other than OK; ``broken``: connections that closed or
    were not answered; ``wrong``: OK answers that do not end with the expected zeros. Latencies are of OK
    answers, in ms; ``samples`` are pairs of request and answer."""

    requests: int
    seconds: float
    per_second: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    answer_bytes: float
    broken: int
    wrong: int
    client_cpu_s: float
    threads: int
    error: str
    failures: dict[str, int]
    samples: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def errors(self) -> int:
        return self.broken + self.wrong + sum(self.failures.values())


def build() -> Path:
    """The program, compiled if it is missing. Raises PeerMissing."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise PeerMissing("no C++ compiler: apt-get install g++")
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in SOURCES)).hexdigest()[:16]
    program = ROOT / "native_load" / f"load-{digest}"
    if program.exists():
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        made = Path(folder, "load")
        command = [compiler, "-O3", "-std=c++17", "-pthread", str(SOURCES[-1]), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PeerMissing(f"the load generator does not build: {done.stderr[:2000]}")
        made.rename(program)
    return program


def run_load(address: str, template: Template, callers: Callers) -> LoadSummary:
    """Send requests to ``address``, an IPv4 address and a port. Raises RuntimeError if that is impossible."""
    host, _, port = address.rpartition(":")
    with tempfile.TemporaryDirectory() as folder:
        message, head, samples = (Path(folder, name) for name in ("message", "head", "samples"))
        message.write_bytes(template.message)
        head.write_bytes(call_head(template.method, address) if template.method else b"")
        options = {
            "protocol": template.protocol,
            "host": host,
            "port": port,
            "message": message,
            "head": head,
            "patches": ",".join(
                f"{p.offset}:{p.count}:{p.limit}:{p.source}:{p.skew}" for p in template.patches
            ),
            "answer_bytes": template.answer_bytes,
            "zeros": template.zeros,
            "callers": callers.count,
            "threads": 1,
            "cores": ",".join(map(str, callers.cores)),
            "seconds": callers.seconds,
            "warm_up": callers.warm_up,
            "seed": callers.seed,
            "spin": int(callers.spin),
            "reconnect": int(callers.reconnect),
            "samples": callers.samples,
            "samples_file": samples if callers.samples else "",
        }
        command = [str(build()), "run", *(f"{name}={value}" for name, value in options.items())]
        limit_s = callers.seconds + callers.warm_up + 60
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        kept = _read_samples(samples) if callers.samples else []
        return LoadSummary(**json.loads(done.stdout), samples=kept)


def _read_samples(path: Path) -> list[tuple[bytes, bytes]]:
    data, parts, at = path.read_bytes(), [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        parts.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return list(zip(parts[::2], parts[1::2], strict=True))


@contextmanager
def sink(request_bytes: int, answer_bytes: int, cores: Sequence[int]) -> Iterator[str]:
    """The address of a bare peer that reads ``request_bytes`` and answers with ``answer_bytes``; it has a
    thread per core of ``cores``."""
    port = free_ports(1)[0]
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
    sizes = (port, request_bytes, answer_bytes, max(1, len(cores)))
    child = subprocess.Popen([*pinned, str(build()), "sink", *map(str, sizes)])
    try:
        time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()
