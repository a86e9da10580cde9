"""SchedulerClient: sends requests to the batch scheduler, in this process or in the node's."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import DeadlineExceeded, DenseModelError, Unavailable
from hps.types import PredictResult

log = logging.getLogger(__name__)
_WAIT_MS = 1_000


class Status(IntEnum):
    """How a request ended: ``RequestStatus`` of hps/native/include/hps/request_channel.hpp."""

    DONE = 1
    REPLIED = 2
    EXPIRED = 3
    FAILED = 4
    UNAVAILABLE = 5


@dataclass(frozen=True, slots=True)
class SchedulerAnswer:
    """The answer to a request: its outputs' columns, or with ``status`` REPLIED an encoded reply.

    ``direct``: the samples whose rows all were on the device. ``launched_ns``, ``ended_ns``:
    ``time.monotonic_ns`` of its first batch's launch and of its end."""

    status: Status
    data: NDArray[np.uint8]
    direct: int
    launched_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class ChannelFiles:
    """File descriptors of a channel: its memory, the scheduler's eventfd, and the client's."""

    memory: int
    wake: int
    woken: int

    def close(self) -> None:
        for each in (self.memory, self.wake, self.woken):
            os.close(each)


Finish = Callable[[SchedulerAnswer], PredictResult]
PreparedMessages = Callable[[bytes, int, "float | None", Finish], "Future[PredictResult]"]
"""Sends the request in a message, which begins at a position of it."""


class SchedulerClient:
    """A channel's client, with the thread that completes its requests. Thread-safe.

    ``files`` become the client's, which are closed when nothing refers to it any more. ``close`` is called
    when the client is closed."""

    def __init__(self, files: ChannelFiles, close: Callable[[], None] = lambda: None) -> None:
        from hps.native.scheduler import ChannelClient

        self._on_close = close
        self._channel = ChannelClient(files.memory, files.wake, files.woken)
        self.capacity: int = self._channel.capacity
        """The most bytes of one request and its answer."""
        self._waiting: dict[int, tuple[Future[PredictResult], Finish]] = {}
        self._tickets = count(1)
        self._closed = ""
        self._woken = files.woken
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(
            target=self._receive, name="hps-scheduler-answers", daemon=True
        )
        self._thread.start()

    def complete_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Complete requests on the thread of ``loop``, this one, instead of one of its own.

        This saves a change of threads per request; nothing on that thread may wait for a result."""
        self._loop = loop
        self._channel.interrupt()
        self._thread.join()
        loop.add_reader(self._woken, self._drain)
        self._drain()

    def submit(
        self,
        model: int,
        batch: int,
        columns: Sequence[NDArray[Any]],
        out_bytes: tuple[int, int],
        deadline: float | None,
        finish: Finish,
    ) -> Future[PredictResult]:
        """Send a request of ``batch`` samples; 0: of one encoded request, for the slow path.

        ``out_bytes``: those of the outputs' columns, and the most of an encoded reply. ``finish`` makes the
        result of the answer, on the thread that completes requests. Raises ``Unavailable`` if too many
        requests are in flight, or the scheduler's process has ended."""
        ticket, future = self._begin(finish)
        sent = not self._closed and self._channel.submit(
            ticket, model, batch, _deadline_ns(deadline), columns, *out_bytes
        )
        return self._sent(ticket, future, sent)

    def prepare(
        self,
        model: int,
        batch: int,
        layout: Sequence[tuple[int, int, int]],
        out_bytes: tuple[int, int],
    ) -> PreparedMessages:
        """Prepare ``submit`` for messages that have the columns at the same places.

        ``layout``: each column's offset, bytes, and a number to be added to its keys."""
        from hps.native.scheduler import MessageLayout

        places, channel = MessageLayout(layout), self._channel

        def submit(
            message: bytes, start: int, deadline: float | None, finish: Finish
        ) -> Future[PredictResult]:
            ticket, future = self._begin(finish)
            sent = not self._closed and channel.submit_message(
                ticket, model, batch, _deadline_ns(deadline), message, start, places, *out_bytes
            )
            return self._sent(ticket, future, sent)

        return submit

    def _begin(self, finish: Finish) -> tuple[int, Future[PredictResult]]:
        future: Future[PredictResult] = Future()
        ticket = next(self._tickets)
        self._waiting[ticket] = future, finish
        return ticket, future

    def _sent(
        self, ticket: int, future: Future[PredictResult], sent: bool
    ) -> Future[PredictResult]:
        if sent and not self._closed:
            return future
        if self._waiting.pop(ticket, None) is None and sent:
            return future  # answered, or failed by `fail`
        raise Unavailable(
            self._closed or "too many predictions are in flight to the GPU; retry later"
        )

    @property
    def is_busy(self) -> bool:
        """True while a request of this client is in flight."""
        return bool(self._waiting)

    @property
    def has_failed(self) -> bool:
        """True after `fail` or `close`."""
        return bool(self._closed)

    def fail(self, reason: str) -> None:
        """Fail all requests, and those to come, with ``Unavailable(reason)``."""
        self._closed = self._closed or reason
        for ticket in list(self._waiting):
            if waiting := self._waiting.pop(ticket, None):
                future, _ = waiting
                if future.set_running_or_notify_cancel():
                    future.set_exception(Unavailable(reason))

    def close(self) -> None:
        """Fail what is in flight and free the channel. Idempotent."""
        self.fail("the server is stopping")
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._loop.remove_reader, self._woken)
        self._channel.interrupt()
        self._thread.join()
        self._on_close()

    def _receive(self) -> None:
        while not self._closed and self._loop is None:
            self._complete(_WAIT_MS)

    def _drain(self) -> None:
        """Complete what was answered, until nothing is left. On the event loop."""
        self._complete(0)
        while not self._channel.sleep():
            self._complete(0)

    def _complete(self, wait_ms: int) -> None:
        """Complete the requests that were answered; wait for the first up to ``wait_ms``."""
        for ticket, status, data, direct, launched_ns, ended_ns in self._channel.receive(wait_ms):
            future, finish = self._waiting.pop(ticket, (None, None))
            if finish is None or future is None or not future.set_running_or_notify_cancel():
                continue
            answer = SchedulerAnswer(Status(status), data, direct, launched_ns, ended_ns)
            _complete(future, finish, answer)


def _deadline_ns(deadline: float | None) -> int:
    return 0 if deadline is None else max(1, int(deadline * 1e9))


def _complete(future: Future[PredictResult], finish: Finish, answer: SchedulerAnswer) -> None:
    try:
        result = finish(answer) if answer.status in _ANSWERED else None
        if result is None:
            raise _failure(answer)
    except Exception as error:  # any error must reach the caller
        future.set_exception(error)
    else:
        future.set_result(result)


_ANSWERED = (Status.DONE, Status.REPLIED)


def _failure(answer: SchedulerAnswer) -> Exception:
    if answer.status == Status.EXPIRED:
        return DeadlineExceeded("deadline exceeded before the prediction could run on the GPU")
    if answer.status == Status.FAILED:
        reason = answer.data.tobytes().decode(errors="replace")
        return DenseModelError(f"the prediction failed on the GPU: {reason}")
    return Unavailable("the model is being closed, or the server is stopping")
