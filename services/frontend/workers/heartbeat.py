"""Heartbeat of a worker: requests over its servers' code paths, and the time without answers.

A worker that answers on its control channel may still be stuck: other threads run while its event loop
hangs. So the node's process sends requests that the worker's servers answer: over HTTP on a private
connection, over gRPC at a Unix socket in a private folder."""

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

# Timeout after which the worker counts as late.
WAIT_S = 1.0
# An unimplemented method; the thread that accepts every call rejects it.
_METHOD = "/hps.Heartbeat/Beat"
_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: heartbeat\r\n\r\n"


class HeartbeatTransport(Protocol):
    """Heartbeats over one protocol. Not thread-safe."""

    name: str

    def beat(self, wait_s: float) -> bool:
        """Send a request unless one is unanswered; return True if it is answered within ``wait_s``."""
        ...

    def close(self) -> None: ...


class HttpHeartbeat:
    """HTTP requests to the event loop, the parser and the application of the data port."""

    name = "http"

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received: bytes | None = None  # bytes of the answer; None: no request is in flight

    def beat(self, wait_s: float) -> bool:
        try:
            self._connection.settimeout(max(wait_s, 1e-3))
            if self._received is None:
                self._connection.sendall(_REQUEST)
                self._received = b""
            while not self._received.endswith(b"}"):  # ends every answer, and occurs in no head
                piece = self._connection.recv(4096)
                if not piece:
                    return False
                self._received += piece
        except OSError:
            return False
        self._received = None
        return True

    def close(self) -> None:
        self._connection.close()


class GrpcHeartbeat:
    """Calls that gRPC's server rejects, on the thread that begins every call."""

    name = "grpc"

    def __init__(self, path: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{path}")
        self._beat = self._channel.unary_unary(_METHOD)
        self._call: grpc.Future | None = None

    def beat(self, wait_s: float) -> bool:
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
    """The heartbeat of process ``pid``. One thread calls `check` periodically."""

    def __init__(self, pid: int, transports: Sequence[HeartbeatTransport]) -> None:
        self.unanswered: Sequence[str] = ()
        """The protocols over which it has not answered; empty: it has answered."""
        self.unanswered_s = 0.0
        """Seconds since it last answered on all."""
        self.stuck_s = 0.0
        """Seconds of them in which it could have run: see `_RunnableTime`."""
        self._transports = transports
        self._runnable = _RunnableTime(pid)
        self._checked = time.monotonic()

    def check(self, most_s: float = math.inf) -> None:
        """Send heartbeats over all protocols, and wait for the answers up to ``WAIT_S``.

        At most ``most_s`` have passed since the last check, unless this process was stopped meanwhile."""
        until = time.monotonic() + WAIT_S
        late = [
            transport.name
            for transport in self._transports
            if not transport.beat(until - time.monotonic())
        ]
        now = time.monotonic()
        passed_s, self._checked = now - self._checked, now
        self.unanswered = late
        if not late:
            self.unanswered_s = self.stuck_s = 0.0
            return
        self.unanswered_s += passed_s
        self.stuck_s += self._runnable.in_last(min(passed_s, most_s))

    def close(self) -> None:
        for transport in self._transports:
            transport.close()


class _RunnableTime:
    """Measures the time in which a process could have run.

    That is no time while a debugger stops it, and only its CPU time while it waits for a core, so that
    neither a debugger nor a busy machine makes it look stuck."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._cpu_s = 0.0

    def in_last(self, passed_s: float) -> float:
        """Runnable time in the last ``passed_s``."""
        try:
            if _TRACED.search((self._folder / "status").read_bytes()):
                return 0.0
            (_, cpu_s), before_s = _state_and_cpu_s(self._folder), self._cpu_s
            self._cpu_s = cpu_s
            tasks = (self._folder / "task").iterdir()
            waits = any(_state_and_cpu_s(each)[0] == b"R" for each in tasks)
        except OSError:  # it has ended, or the system has no /proc
            return passed_s
        return min(passed_s, cpu_s - before_s) if waits else passed_s


_TRACED = re.compile(rb"^TracerPid:\t[1-9]", re.MULTILINE)
_STAT = re.compile(rb".*\) (?P<state>\S)(?: \S+){10} (?P<user>\d+) (?P<system>\d+) ", re.DOTALL)


def _state_and_cpu_s(folder: Path) -> tuple[bytes, float]:
    """State and CPU time of the process or thread with this folder in ``/proc``."""
    stat = _STAT.match((folder / "stat").read_bytes())
    assert stat is not None
    return stat["state"], (int(stat["user"]) + int(stat["system"])) / os.sysconf("SC_CLK_TCK")
