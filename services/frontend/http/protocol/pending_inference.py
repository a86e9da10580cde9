"""An inference request in flight, answered when its future is done or its deadline has passed."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from hps.errors import DeadlineExceeded
from services.frontend.http.inference import TOO_LATE, HttpInference
from services.frontend.http.protocol.cycle import HttpConnection, HttpCycle


class PendingInference:
    """Stands in for a task, which would cost as much as the rest of the request.

    It is one of the connection's tasks, so the server can cancel it. All methods but `_done` run on the event
    loop.
    """

    __slots__ = ("_cycle", "_inference", "_protocol", "_tasks", "_timer")

    def __init__(
        self, protocol: HttpConnection, cycle: HttpCycle, inference: HttpInference
    ) -> None:
        self._protocol, self._cycle, self._inference = protocol, cycle, inference
        self._tasks = protocol.tasks  # the server only cancels them
        self._tasks.add(self)
        self._timer = protocol.loop.call_at(inference.deadline, self._time_out)
        protocol.when_gone(inference.give_up)
        inference.future.add_done_callback(self._done)

    def _done(self, _: Future[Any]) -> None:
        """Resume on the event loop. Called on any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._protocol.loop.call_soon_threadsafe(self._resume)

    def _time_out(self) -> None:
        self._inference.fail(DeadlineExceeded(TOO_LATE))
        self._resume()

    def cancel(self, msg: object = None) -> None:
        """Fail the request, as the drain is over. A task's signature."""
        self._inference.fail(asyncio.CancelledError())
        self._protocol.loop.call_soon(self._resume)

    def _resume(self) -> None:
        protocol, cycle = self._protocol, self._cycle
        if self not in self._tasks:
            return
        self._timer.cancel()
        self._tasks.discard(self)
        can_send = not (protocol.flow.write_paused or protocol.transport.is_closing())
        reply = self._inference.ready_reply() if can_send else None
        if reply is None:  # the application reports the error
            protocol.run(cycle, self._inference)
        else:
            cycle.finish(reply)
