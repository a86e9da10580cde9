"""Server processes for benchmarks and tests: start, wait until ready, pin to a core, stop."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import psutil

# Sets the affinity before the program starts, so that all of its threads inherit it.
_PINNED = "import os, sys; os.sched_setaffinity(0, {%d}); os.execvp(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class Server:
    """A running server: its base URL without scheme, the process, and the file of its output."""

    address: str
    process: psutil.Process
    log: Path

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def cpu_seconds(self) -> float:
        """User and system time of the process and its live children since they started."""
        family = [self.process, *self.process.children(recursive=True)]
        times = [each.cpu_times() for each in family]
        return float(sum(time.user + time.system for time in times))


# Below the ephemeral ports, so that no outgoing connection takes the port of a server that is about to start
# or restart. A node of a Redis cluster has a second port, 10,000 above, which is below them too. The order is
# random, so that two runs at a time rarely collide.
_PORTS = cycle(random.SystemRandom().sample(range(12_000, 22_000), 10_000))


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback interface that are free at the moment; none is returned twice."""
    found: list[int] = []
    while len(found) < count:
        port = next(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def cores() -> tuple[int | None, int | None]:
    """One core for the server and another for the client; (None, None) on a one-core machine."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return (available[0], available[-1]) if len(available) > 1 else (None, None)


@contextmanager
def serving(
    command: Sequence[str],
    port: int,
    *,
    ready_path: str,
    env: Mapping[str, str] | None = None,
    core: int | None = None,
    timeout_s: float = 120.0,
) -> Iterator[Server]:
    """Run ``command`` until the block ends; entered once ``GET ready_path`` answers 200.

    Raises RuntimeError with the end of the server's output when it exits or is not ready in time.
    """
    if core is not None:
        command = [sys.executable, "-c", _PINNED % core, *command]
    with tempfile.NamedTemporaryFile("w", suffix=".log", delete=False) as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
    server = Server(f"127.0.0.1:{port}", psutil.Process(child.pid), Path(log.name))
    try:
        _wait(server, child, ready_path, timeout_s)
        yield server
    finally:
        _stop(child)
        server.log.unlink(missing_ok=True)


def _wait(server: Server, child: subprocess.Popen[bytes], path: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and child.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{server.address}{path}", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    state = "exited" if child.poll() is not None else f"is not ready after {timeout_s:.0f} s"
    raise RuntimeError(f"{child.args!r} {state}:\n{server.log.read_text(errors='replace')[-4000:]}")


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Stop the server and its child processes, by SIGTERM first."""
    try:
        family = [*psutil.Process(child.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(15)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for each in family:
        if each.is_running():
            each.kill()
