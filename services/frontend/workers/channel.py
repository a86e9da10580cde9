"""Between the node's process and one worker: a pair of sockets. The node's side asks, the worker's answers;
when either ends, the other one knows."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hps.tiers.node import frames
from hps.tiers.node.frames import FrameKind
from services.frontend.logs import log

Answer = Callable[..., Any]


class ControlChannelSupervisor:
    """The node's side; any thread may ask. What is no frame ends the channel."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._asked = 0

    def send(self, payload: bytes) -> None:
        """What the worker receives before it is asked anything. Raises OSError."""
        frames.send(self._end, FrameKind.HELLO, [payload])

    def told(self) -> Any:
        """What the worker tells before it is asked anything, however long that takes. Raises OSError: it has
        ended."""
        return self._received()[1]

    def ask(self, what: str, timeout_s: float | None, *given: Any) -> Any:
        """What the worker answers. Raises OSError: it has ended, or took too long."""
        with self._lock:
            self._end.settimeout(timeout_s)
            asked = self.tell(what, *given)
            while True:
                number, answer = self._received()
                if number == asked:  # no caller waits for the answers to others
                    return answer

    def tell(self, what: str, *given: Any) -> int:
        """Ask without waiting for the answer; the question's number. Raises OSError: it has ended."""
        with self._sending:
            self._asked += 1
            frames.send(self._end, FrameKind.ASK, frames.as_json([self._asked, what, given]))
            return self._asked

    def close(self) -> None:
        self._end.close()

    def _received(self) -> Any:
        try:
            return _received(self._end)
        except frames.BadFrame as error:
            self._end.shutdown(socket.SHUT_RDWR)  # the worker notices, ends, and is replaced
            raise ConnectionError(str(error)) from None


class ControlChannelWorker:
    """The worker's side: answers on a thread of its own until the node's process has ended, or nothing more
    can be answered, then calls ``alone``."""

    def __init__(self, end: socket.socket, alone: Callable[[], None]) -> None:
        self._end = end
        self._alone = alone

    def receive(self) -> bytearray:
        """What the node's side sent first. Raises OSError."""
        _, size = frames.receive_head(self._end)
        return frames.receive_payload(self._end, size)

    def start(self, answers: Mapping[str, Answer]) -> None:
        """Answer from now on."""
        work = threading.Thread(target=self._run, args=(answers,), name="hps-worker", daemon=True)
        work.start()

    def tell(self, what: str) -> None:
        """Before anything is asked. Nobody hears it when the node's process has ended."""
        with suppress(OSError):
            frames.send(self._end, FrameKind.OK, frames.as_json([0, what]))

    def _run(self, answers: Mapping[str, Answer]) -> None:
        try:
            while True:
                number, what, given = _received(self._end)
                frames.send(
                    self._end, FrameKind.OK, frames.as_json([number, answers[what](*given)])
                )
        except OSError:
            pass  # it has ended
        except Exception:
            log.exception("the node's process can't be answered any more")
        finally:
            self._alone()


def _received(end: socket.socket) -> Any:
    _, size = frames.receive_head(end)
    return frames.read_json(frames.receive_payload(end, size))
