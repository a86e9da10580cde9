"""One HTTP request and its answer: begun without a task, answered in one write."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.frontend.http.asgi import WHOLE
from services.frontend.http.response import HttpReply


class HttpConnection(Protocol):
    """The connection of a request, `services.frontend.http.protocol.connection.HttpProtocol`."""

    flow: Any
    loop: Any
    tasks: Any
    transport: Any

    def write_reply(self, reply: HttpReply, *, keep_alive: bool) -> None: ...

    def run(self, cycle: Any, app: Any) -> None: ...

    def when_gone(self, give_up: Callable[[], None]) -> None: ...


async def resume_coroutine(running: Any, waits_for: Any) -> None:
    """Run the rest of a coroutine that was begun outside a task and waits for ``waits_for``."""
    await _rest(running, waits_for)  # from Python 3.12 on, a task takes no generator


@types.coroutine
def _rest(running: Any, waits_for: Any) -> Generator[Any, Any, None]:
    while True:
        try:
            yield waits_for
        except BaseException as error:  # cancelled: passed on to the coroutine
            step = partial(running.throw, error)
        else:
            step = partial(running.send, None)
        try:
            waits_for = step()
        except StopIteration:
            return


class HttpCycle(RequestResponseCycle):
    """uvicorn's cycle with a fast path for a whole answer.

    It takes one write to the socket instead of two, without the search for invalid characters, which our
    headers do not have.
    """

    protocol: HttpConnection

    async def send(self, message: Any) -> None:
        if message["type"] != WHOLE:
            await super().send(message)
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.transport.is_closing():  # uvicorn notifies only the last request of a pipeline
            self.disconnected = True
        if not self.disconnected:
            self.finish(message["reply"])

    def finish(self, reply: HttpReply) -> None:
        """Send the whole answer."""
        self.response_started = True
        self.waiting_for_100_continue = False
        self.protocol.write_reply(reply, keep_alive=self.keep_alive)
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
