"""Control channel between the node's process and one worker: a pair of sockets.

The supervisor sends queries, the worker answers. Each end notices when the other one closes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hps.tiers.node import frames
from hps.tiers.node.frames import FrameKind
from services.frontend.logs import log

QueryHandler = Callable[..., Any]


class ControlChannelSupervisor:
    """The supervisor's end. Thread-safe. An invalid frame closes the channel."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._last_number = 0

    def send_first(self, payload: bytes) -> None:
        """Send the first message, before any query. Raises OSError."""
        frames.send(self._end, FrameKind.HELLO, [payload])

    def receive_first(self) -> Any:
        """Wait for the worker's first message. Raises OSError if the worker has ended."""
        return self._received()[1]

    def query(self, name: str, timeout_s: float | None, *arguments: Any) -> Any:
        """Query the worker. Raises OSError if it has ended or timed out."""
        with self._lock:
            self._end.settimeout(timeout_s)
            sent = self.notify(name, *arguments)
            while True:
                number, answer = self._received()
                if number == sent:  # other numbers answer notifications: drop them
                    return answer

    def notify(self, name: str, *arguments: Any) -> int:
        """Send a query without waiting; return its number. Raises OSError if the worker has ended."""
        with self._send_lock:
            self._last_number += 1
            frames.send(
                self._end, FrameKind.ASK, frames.as_json([self._last_number, name, arguments])
            )
            return self._last_number

    def close(self) -> None:
        self._end.close()

    def _received(self) -> Any:
        try:
            return _received(self._end)
        except frames.BadFrame as error:
            self._end.shutdown(socket.SHUT_RDWR)  # the worker notices, ends, and is replaced
            raise ConnectionError(str(error)) from None


class ControlChannelWorker:
    """The worker's end; its thread answers queries. Calls ``on_closed`` when the channel fails or closes."""

    def __init__(self, end: socket.socket, on_closed: Callable[[], None]) -> None:
        self._end = end
        self._on_closed = on_closed

    def receive(self) -> bytearray:
        """Wait for the supervisor's first message. Raises OSError."""
        _, size = frames.receive_head(self._end)
        return frames.receive_payload(self._end, size)

    def start(self, handlers: Mapping[str, QueryHandler]) -> None:
        """Start answering queries."""
        work = threading.Thread(target=self._run, args=(handlers,), name="hps-worker", daemon=True)
        work.start()

    def send_first(self, message: str) -> None:
        """Send the first message, before any query. Lost if the node's process has ended."""
        with suppress(OSError):
            frames.send(self._end, FrameKind.OK, frames.as_json([0, message]))

    def _run(self, handlers: Mapping[str, QueryHandler]) -> None:
        try:
            while True:
                number, name, arguments = _received(self._end)
                frames.send(
                    self._end, FrameKind.OK, frames.as_json([number, handlers[name](*arguments)])
                )
        except OSError:
            pass  # the node's process has ended
        except Exception:
            log.exception("failed to answer the node's process")
        finally:
            self._on_closed()


def _received(end: socket.socket) -> Any:
    _, size = frames.receive_head(end)
    return frames.read_json(frames.receive_payload(end, size))
