"""An inference request in flight, answered when it has ended."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from services.frontend.http.inference import HttpInference
from services.frontend.http.protocol.cycle import HttpConnection, HttpCycle


class PendingInference:
    """Stands in for a task, which would cost as much as the rest of the request.

    It is one of the connection's tasks, so the server can cancel it. All methods but `_done` run on the event
    loop.
    """

    __slots__ = ("_cycle", "_http", "_is_added", "_protocol", "_tasks")

    def __init__(self, protocol: HttpConnection, cycle: HttpCycle, http: HttpInference) -> None:
        self._protocol, self._cycle, self._http = protocol, cycle, http
        self._tasks = protocol.tasks  # the server only cancels them
        self._tasks.add(self)
        protocol.when_gone(http.give_up)
        self._is_added = False
        http.port.state.pending.add(http.future, http.deadline, self._done)
        self._is_added = True

    def _done(self, outcome: Future[Any]) -> None:
        """Resume on the event loop. Called on any thread.

        Now if the result arrived there, which saves a turn of the loop; not while the connection is still
        reading the request, or its loss cancels it."""
        loop = self._protocol.loop
        if not is_running_on(loop):
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._resume, outcome)
        elif self._is_added and outcome is self._http.future:
            self._resume(outcome)
        else:
            loop.call_soon(self._resume, outcome)

    def cancel(self, msg: object = None) -> None:
        """Fail the request, as the drain is over. A task's signature."""
        self._http.abort(asyncio.CancelledError())
        self._protocol.loop.call_soon(self._resume, self._http.outcome)

    def _resume(self, outcome: Future[Any]) -> None:
        protocol, http = self._protocol, self._http
        if self not in self._tasks:
            return
        self._tasks.discard(self)
        if http.outcome is http.future:  # else it was aborted
            http.outcome = outcome
        can_send = not (protocol.flow.write_paused or protocol.transport.is_closing())
        reply = http.ready_reply() if can_send else None
        if reply is None:
            protocol.run(self._cycle, http)
        else:
            self._cycle.finish(reply)


def is_running_on(loop: asyncio.AbstractEventLoop) -> bool:
    """True on the thread of ``loop``, where nothing must wake it."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
