"""One HTTP/1.1 connection: uvicorn's protocol, with bounds of our own and a short way for inference."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from services.frontend.errors import REFUSALS
from services.frontend.http.asgi import EXTENSIONS, GONE, Application
from services.frontend.http.cycle import Cycle, go_on
from services.frontend.http.errors import error_body, error_headers
from services.frontend.http.head import Head
from services.frontend.http.infer import HEAD_BYTES
from services.frontend.http.peer import PEER, Peer
from services.frontend.http.response import Reply
from services.frontend.http.waiting import Waiting
from services.frontend.open_files import Connections

# An idle keep-alive connection is closed after this time, and one whose client reads nothing of its
# answer; a connection on which a request has begun but does not go on, after one to two sweeps.
KEEP_ALIVE_S = 75
# An idle connection of a server that stops is closed after this time: a request may be on its way.
LINGER_S = 0.5
MAX_HEAD_BYTES = 64 << 10
# Up to this size, an answer is joined for the socket more quickly than it is handed over in pieces.
_COPIED_BYTES = 16 << 10


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a bound on the size of a head, our error shape for what is no HTTP, no
    timer and no task for a request that can be answered at once.

    An inference request that came whole begins where its last byte was read, without a turn of the
    event loop; most end there. One that has to wait goes on as a task. When its head is one that was
    read before, the parser does not see it at all.
    """

    app: Application
    peer: Peer
    _reads: Literal["nothing", "head", "body"] = "nothing"
    _receiving = False
    _begun: tuple[RequestResponseCycle, Any] | None = None
    _head_bytes = 0
    _ended = False
    _last = False
    _give_up: Callable[[], None] | None = None
    # Lines that each answer has, and the headers they were made of.
    _opening = b""
    _dated: Any = None
    # Arrivals; how many there were at the last sweep, what the client had not taken then, and the sweeps
    # since without a change of either.
    _heard, _swept, _unsent, _silent = 0, -1, 0, 0
    # Answers beyond this size are handed over in pieces.
    _copied_bytes: float = _COPIED_BYTES
    # What came when the connection was last between two requests, and how much since, with that.
    _start, _came = b"", 0
    _first: RequestResponseCycle | None = None
    """The request that began then; ``_is_known``: its head was."""
    _is_known = False
    # Bytes that are still to come of a body that nobody reads.
    _unwanted = 0
    # Requests that began; the one that was still coming at the last sweep.
    _requests, _coming = 0, 0
    of_port: Connections | None = None
    """Those of the port, whose own class says so."""
    _entered = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = Peer(self.client, transport)
        if self.scheme == "https":  # which takes pieces for bytes
            self._copied_bytes = math.inf
        if self.of_port is not None:
            self._entered = self.of_port.enter(self.peer.host)
            if not self._entered:
                self._refuse(503, "too many connections; close some, or ask another replica")
                self.loop.call_later(LINGER_S, transport.abort)

    # -- reading -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._heard += 1
        if self._unwanted and not (data := self._drop(data)):
            return
        goes_on = self._reads == "body"
        if self._reads == "nothing":
            self._is_known = False
            if self._is_idle() and not self._last and self._take_known(data):
                return
            self._start, self._came, self._first = data[:HEAD_BYTES], 0, None
        self._came += len(data)
        self._receiving, self._ended = True, False
        self._parse(data)
        while self._begun is not None:  # answering one may begin the next of a pipeline
            (cycle, app), self._begun = self._begun, None
            if cycle.more_body or not self._answer_parsed(cycle):
                super()._start_asgi_task(cycle, app)
        self._receiving = False
        if self._reads == "nothing":
            if goes_on and not self._is_known:
                self._learn()
            self._start, self._first = b"", None  # which hold on to the request
        if self._reads == "head" and not self._ended:  # else most of it is the request before
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")
        elif self._head_bytes:
            self._head_bytes = 0

    def _take_known(self, data: bytes) -> bool:
        """Answer a request with a head that was read before; False: the parser must see it."""
        head, came = self.app.known(data)
        self._is_known = head is not None
        if head is None or came > head.body_size:
            return False
        if head.is_crowded and not self.flow.write_paused:
            reply = self.app.refusal(head, self.peer)
            if reply is not None:
                self.write_reply(reply, keep_alive=True)
                self.server_state.total_requests += 1
                self._unwanted = head.body_size - came
                if self._unwanted:
                    self._reads = "body"
                    self._requests += 1
                return True
        return came == head.body_size and self._answer(head, data[len(data) - came :])

    def _learn(self) -> None:
        """Have the head known of a request that came in pieces, the last of them just now, if all that came
        is this request: another's head must not be taken for its own."""
        size = self._start.find(b"\r\n\r\n") + 4
        first, body_size = self._first, self._came - size
        if first is None or first is not self.cycle or not first.keep_alive:
            return
        if (b"content-length", b"%d" % body_size) in first.scope["headers"]:
            self.app.read(first.scope, body_size, self._start[:size])

    def _drop(self, data: bytes) -> bytes:
        """``data`` without what it has of a body that nobody reads."""
        size = min(len(data), self._unwanted)
        self._unwanted -= size
        if not self._unwanted:
            self._reads = "nothing"
        return data[size:]

    def _parse(self, data: bytes) -> None:
        """Feed the parser. It stops at a request that asks for another protocol (``Upgrade: h2c``, as
        Java's client does by default) and leaves out its body: that one is read again without."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError:
                self._refuse(400, "Invalid HTTP request received.")
                return

    def _without_upgrade(self) -> bytes:
        """The head that was just read."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % line for line in self.headers if line[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _is_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        self._reads = "head"
        self._requests += 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_upgrade():
            return
        self._reads = "body"
        super().on_headers_complete()
        if type(self.cycle) is RequestResponseCycle:
            self._adopt(self.cycle)
        if self._first is None:
            self._first = self.cycle
        if self._begun is not None and self._begun[0] is self.cycle:
            self._refuse_early(self.cycle)

    def on_message_complete(self) -> None:
        if self._is_upgrade():
            return
        self._reads, self._ended = "nothing", True
        super().on_message_complete()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse_early(self, cycle: RequestResponseCycle) -> None:
        """Answer a request there is no room for when its head is there; its body is dropped as it comes. Not
        where the answer is the connection's last: the client would lose it."""
        if cycle.keep_alive and isinstance(cycle, Cycle) and not self.flow.write_paused:
            reply = self.app.early_refusal(cycle.scope)
            if reply is not None:
                self._begun = None
                cycle.finish(reply)

    # -- answering ---------------------------------------------------------------------------------

    def _answer_parsed(self, cycle: RequestResponseCycle) -> bool:
        """Answer an inference request that is all there; False: the application must. Only bytes that are
        this request, from its first to its last, may teach what its head says."""
        size = self._came - len(cycle.body)
        is_alone = cycle.keep_alive and self._start.find(b"\r\n\r\n") + 4 == size
        head = self.app.read(cycle.scope, len(cycle.body), self._start[:size] if is_alone else b"")
        return head is not None and self._answer(head, bytes(cycle.body), cycle)

    def _answer(self, head: Head, body: bytes, cycle: RequestResponseCycle | None = None) -> bool:
        """Answer an inference request or begin to; False when it has a fault, which the ordinary way
        tells. ``cycle`` is uvicorn's if the parser has seen the request."""
        try:
            inference = self.app.begin(head, body, self.peer)
        except Exception as error:
            if self.flow.write_paused or not isinstance(error, REFUSALS):
                return False
            reply: Reply | None = self.app.refuse(head, error)
        else:
            reply = None if self.flow.write_paused else inference.at_once()
        if reply is None:
            if cycle is None:
                cycle = self.cycle = self._new_cycle()
            if isinstance(cycle, Cycle) and not inference.future.done():
                Waiting(self, cycle, inference)
            else:
                self.run(cycle, inference)
        elif isinstance(cycle, Cycle):
            cycle.finish(reply)
        else:
            self.write_reply(reply, keep_alive=True)
            self.server_state.total_requests += 1
        return True

    def write_reply(self, reply: Reply, *, keep_alive: bool) -> None:
        """Send an answer, in one write to the socket."""
        headers = self.server_state.default_headers  # another list whenever the date has changed
        if headers is not self._dated:
            lines = [b"%b: %b\r\n" % header for header in headers]
            self._opening, self._dated = b"".join(lines), headers
        end = b"\r\n" if keep_alive else b"connection: close\r\n\r\n"
        text, *arrays = reply.pieces
        head = (STATUS_LINE[reply.status], self._opening, reply.lines, end, text)
        if reply.size < self._copied_bytes:
            self.transport.write(b"".join((*head, *arrays)))
        else:
            self.transport.writelines((b"".join(head), *arrays))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._receiving:
            self._begun = cycle, app  # its body may still come with these bytes
        else:
            super()._start_asgi_task(cycle, app)

    def run(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Answer at once what can be, and the rest as a task."""
        running = cycle.run_asgi(app)
        try:
            waits_for = running.send(None)
        except StopIteration:
            return
        task = self.loop.create_task(go_on(running, waits_for))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _new_cycle(self) -> RequestResponseCycle:
        """For a request whose head and body are known already."""
        cycle = RequestResponseCycle(
            scope={"type": "http", "method": "POST", "headers": []},  # type: ignore[typeddict-item] # all that is asked for
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=self.on_response_complete,
        )
        cycle.more_body = False
        self._adopt(cycle)
        return cycle

    def _adopt(self, cycle: RequestResponseCycle) -> None:
        cycle.__class__ = Cycle  # its task has not begun yet
        cycle.protocol = self  # type: ignore[attr-defined] # a Cycle now
        cycle.scope["extensions"] = EXTENSIONS
        cycle.scope[GONE] = self.when_gone  # type: ignore[literal-required] # ours
        cycle.scope[PEER] = self.peer  # type: ignore[literal-required] # ours
        if self._last:
            cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """uvicorn's, without a timer for the connection when it is idle: sweeps see to that."""
        self.server_state.total_requests += 1
        self._give_up = None
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._entered and self.of_port is not None:
            self.of_port.leave(self.peer.host)
        if self._give_up is not None:
            self._give_up()

    def when_gone(self, give_up: Callable[[], None]) -> None:
        """Have ``give_up`` called when the client hangs up before the request at hand is answered."""
        self._give_up = give_up
        if self.transport.is_closing():
            give_up()

    # -- ending ------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """The server stops: the next answer is the connection's last, and says so."""
        self.leave()
        if self._is_idle():
            self.loop.call_later(LINGER_S, self._hang_up)

    def leave(self) -> None:
        """The next answer is the connection's last, whenever it comes."""
        self._last = True
        if not self._is_idle():
            self.cycle.keep_alive = False

    def _hang_up(self) -> None:
        if self._is_idle():
            self.transport.close()
            if self.scheme == "https":
                self.loop.call_later(LINGER_S, self._break_off)

    def _break_off(self) -> None:
        """TLS waits for the client to say goodbye, which one that is idle does not."""
        if not self.transport.get_write_buffer_size():
            self.transport.abort()

    def sweep(self, every_s: float) -> None:
        """Called every so many seconds: hang up when nothing has come or gone for too long, and when a head,
        or a body that nobody waits for, has been coming since the last time."""
        coming = self._requests if self._is_coming() else 0
        if coming and coming == self._coming and not self.transport.is_closing():
            self.transport.close()
            return
        self._coming = coming
        now = self._heard, self.transport.get_write_buffer_size()
        unsent = now[1]
        if now != (self._swept, self._unsent) or (self._is_answering() and not unsent):
            (self._swept, self._unsent), self._silent = now, 0
            return
        self._silent += 1
        waits_for_request = self._reads == "nothing" and self._heard
        if self._silent >= (
            math.ceil(KEEP_ALIVE_S / every_s) if waits_for_request or unsent else 1
        ):
            # What is closed would wait until the client has taken all that was sent.
            (self.transport.abort if unsent else self.transport.close)()

    def _is_coming(self) -> bool:
        """A head behind a request that is being answered may take its time, one behind an answer that is not
        taken may not."""
        if self._is_idle():
            return self._reads != "nothing"
        return self._reads == "head" and self.transport.get_write_buffer_size() > 0

    def _is_answering(self) -> bool:
        if self.pipeline:  # ``cycle`` is a later request's, which is not read on until then
            return True
        cycle = self.cycle
        return not self._is_idle() and (cycle.response_started or not cycle.more_body)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what the parser could not read, unless an answer is on its way already; hang up."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = error_body(message)
            lines = [STATUS_LINE[status]]
            for name, value in [*error_headers(status, body), (b"connection", b"close")]:
                lines += (name, b": ", value, b"\r\n")
            self.transport.write(b"".join([*lines, b"\r\n", body]))
        self.transport.close()
