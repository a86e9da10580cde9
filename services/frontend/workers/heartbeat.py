"""Heartbeat of a worker: requests on the ways that its clients' take, and how long it has not answered them.

A worker whose channel answers may be stuck all the same: an event loop in an endless loop lets other threads
run. So the node's process sends requests that the worker's servers answer themselves: over HTTP on a
connection that only it has, over gRPC at a Unix socket in a private folder.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import grpc

# How long to wait for an answer before the worker counts as late.
WAIT_S = 1.0
# A method that no server has: refused by the thread that begins every call.
_METHOD = "/hps.Heartbeat/Beat"
_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: heartbeat\r\n\r\n"


class HeartbeatTransport(Protocol):
    """One way to the worker. Used by one thread."""

    name: str

    def answered(self, wait_s: float) -> bool:
        """Send a request, unless one is unanswered; whether it is answered within ``wait_s``."""
        ...

    def close(self) -> None: ...


class HttpHeartbeat:
    """Requests that the event loop, the parser and the application of the data port answer."""

    name = "http"

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._got: bytes | None = None  # of the answer; None: nothing was asked

    def answered(self, wait_s: float) -> bool:
        try:
            self._connection.settimeout(max(wait_s, 1e-3))
            if self._got is None:
                self._connection.sendall(_REQUEST)
                self._got = b""
            while not self._got.endswith(b"}"):  # as every answer does, and no part of its head
                piece = self._connection.recv(4096)
                if not piece:
                    return False
                self._got += piece
        except OSError:
            return False
        self._got = None
        return True

    def close(self) -> None:
        self._connection.close()


class GrpcHeartbeat:
    """Calls that gRPC's server refuses, on the thread that begins every call."""

    name = "grpc"

    def __init__(self, path: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{path}")
        self._beat = self._channel.unary_unary(_METHOD)
        self._call: grpc.Future | None = None

    def answered(self, wait_s: float) -> bool:
        if self._call is None:
            self._call = self._beat.future(b"", wait_for_ready=True)
        try:
            error = self._call.exception(wait_s)
        except grpc.FutureTimeoutError:
            return False
        self._call = None
        return bool(error.code() is not grpc.StatusCode.UNAVAILABLE)

    def close(self) -> None:
        self._channel.close()


class Heartbeat:
    """The heartbeat of process ``pid``. To be checked again and again by one thread."""

    def __init__(self, pid: int, ways: Sequence[HeartbeatTransport]) -> None:
        self.silent: Sequence[str] = ()
        """The ways on which it has not answered; empty: it has."""
        self.silent_s = 0.0
        """Seconds since it last answered on all."""
        self.stuck_s = 0.0
        """Seconds of them in which it could have worked: see `_RunnableTime`."""
        self._ways = ways
        self._opportunity = _RunnableTime(pid)
        self._checked = time.monotonic()

    def check(self, most_s: float = math.inf) -> None:
        """Ask on all ways, and wait for the answers up to ``WAIT_S``. No more than ``most_s`` have passed
        since the last check, unless this process was stopped meanwhile."""
        until = time.monotonic() + WAIT_S
        late = [way.name for way in self._ways if not way.answered(until - time.monotonic())]
        now = time.monotonic()
        passed_s, self._checked = now - self._checked, now
        self.silent = late
        if not late:
            self.silent_s = self.stuck_s = 0.0
            return
        self.silent_s += passed_s
        self.stuck_s += self._opportunity.since(min(passed_s, most_s))

    def close(self) -> None:
        for way in self._ways:
            way.close()


class _RunnableTime:
    """The time in which a process could have worked. None while a debugger holds it; while it waits for a
    core, its CPU time. So neither a busy machine nor a debugger makes it seem stuck."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._cpu_s = 0.0

    def since(self, passed_s: float) -> float:
        """Opportunity in the last ``passed_s``."""
        try:
            if _TRACED.search((self._folder / "status").read_bytes()):
                return 0.0
            cpu_s, before_s = _cpu_s(self._folder / "stat"), self._cpu_s
            self._cpu_s = cpu_s
            tasks = (self._folder / "task").iterdir()
            waits = any(_state(each / "stat") == b"R" for each in tasks)
        except OSError:  # it has ended; or there is no such folder on this system
            return passed_s
        return min(passed_s, cpu_s - before_s) if waits else passed_s


_TRACED = re.compile(rb"^TracerPid:\t[1-9]", re.MULTILINE)
_STAT = re.compile(rb".*\) (?P<state>\S)(?: \S+){10} (?P<user>\d+) (?P<system>\d+) ", re.DOTALL)


def _cpu_s(stat: Path) -> float:
    found = _STAT.match(stat.read_bytes())
    assert found is not None
    return (int(found["user"]) + int(found["system"])) / os.sysconf("SC_CLK_TCK")


def _state(stat: Path) -> bytes:
    found = _STAT.match(stat.read_bytes())
    assert found is not None
    return found["state"]
