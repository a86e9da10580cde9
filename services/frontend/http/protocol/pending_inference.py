"""An inference request that others still work at: gone on with when they are done, or its time is up."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from hps.errors import DeadlineExceeded
from services.frontend.http.inference import TOO_LATE, HttpInference
from services.frontend.http.protocol.cycle import HttpConnection, HttpCycle


class PendingInference:
    """In place of a task, which would cost as much as the rest of the request. It is among the connection's
    tasks, for whoever ends those. On the event loop, but for `_done`."""

    __slots__ = ("_cycle", "_inference", "_protocol", "_tasks", "_timer")

    def __init__(
        self, protocol: HttpConnection, cycle: HttpCycle, inference: HttpInference
    ) -> None:
        self._protocol, self._cycle, self._inference = protocol, cycle, inference
        self._tasks = protocol.tasks  # others only cancel them
        self._tasks.add(self)
        self._timer = protocol.loop.call_at(inference.deadline, self._late)
        protocol.when_gone(inference.give_up)
        inference.future.add_done_callback(self._done)

    def _done(self, _: Future[Any]) -> None:
        """On whichever thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._protocol.loop.call_soon_threadsafe(self._go_on)

    def _late(self) -> None:
        self._inference.fail(DeadlineExceeded(TOO_LATE))
        self._go_on()

    def cancel(self, msg: object = None) -> None:
        """As a task's: the drain is over."""
        self._inference.fail(asyncio.CancelledError())
        self._protocol.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        protocol, cycle = self._protocol, self._cycle
        if self not in self._tasks:
            return
        self._timer.cancel()
        self._tasks.discard(self)
        can_send = not (protocol.flow.write_paused or protocol.transport.is_closing())
        reply = self._inference.at_once() if can_send else None
        if reply is None:  # the application says what is wrong
            protocol.run(cycle, self._inference)
        else:
            cycle.finish(reply)
