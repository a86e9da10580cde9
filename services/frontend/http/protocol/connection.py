"""One HTTP/1.1 connection: uvicorn's protocol with bounds, and a fast path for inference."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from services.frontend.errors import REFUSALS, Overloaded
from services.frontend.http.application import PortApplication
from services.frontend.http.arriving_request import ArrivingRequest
from services.frontend.http.asgi import EXTENSIONS, GONE
from services.frontend.http.head import RequestHead
from services.frontend.http.inference import HttpInference
from services.frontend.http.inference_app import HEAD_BYTES
from services.frontend.http.peer import PEER
from services.frontend.http.protocol.cycle import HttpCycle, resume_coroutine
from services.frontend.http.protocol.parsing import HttpParsing
from services.frontend.http.protocol.pending_inference import PendingInference
from services.frontend.http.response import HttpReply

# Joining a smaller answer for the socket is faster than writing its pieces.
_COPIED_BYTES = 16 << 10
# A body that takes longer to arrive is passed to the parser. Checked by one timer of a connection.
_COLLECTED_S = 0.1


class HttpProtocol(HttpParsing):
    """HTTP/1.1 with bounds, errors in JSON, no timer per request, and a fast path for inference.

    An inference request whose head is cached bypasses the parser and ASGI: it begins when its last byte is
    read, and most are answered there. uvicorn passes every other request to the application.
    """

    app: PortApplication
    _receiving = False
    # Header lines common to all answers, and the header list they were made from.
    _common_lines = b""
    _common_headers: Any = None
    # Answers of this size or more are written in pieces.
    _copied_bytes: float = _COPIED_BYTES
    # The first bytes received when no request was being read, and the number of bytes received from there on.
    _first_bytes, _received_bytes = b"", 0
    _first_cycle: RequestResponseCycle | None = None
    """The first request in these bytes; ``_is_known``: its head was cached."""
    _is_known = False
    # Bytes still to arrive of a body that is discarded.
    _discard_left = 0
    # The request with a cached head whose body is arriving. A timer runs while ``_is_timed``.
    _arriving: ArrivingRequest | None = None
    _is_timed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn narrows it
        super().connection_made(transport)
        if self.scheme == "https":  # its transport joins the pieces
            self._copied_bytes = math.inf

    # -- reading -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._arrivals += 1
        if self._refusal is not None:
            return
        if self.flow.is_full:  # received before the transport paused
            self._unparsed += data
            return
        if self._discard_left and not (data := self._drop(data)):
            return
        if self._arriving is not None and not (data := self._collect(self._arriving, data)):
            return
        if self._reads == "nothing":
            self._is_known = False
            if self._is_idle() and not self._last and self._take_known(data):
                return
            self._first_bytes, self._received_bytes, self._first_cycle = data[:HEAD_BYTES], 0, None
        self._parse_received(data)

    def _parse_received(self, data: bytes) -> None:
        """Parse ``data``, then start or learn the request that it completes."""
        self._received_bytes += len(data)
        self._receiving = True
        self._parse(data)
        self._receiving = False
        if self._deferred is not None:
            (cycle, app), self._deferred = self._deferred, None
            super()._start_asgi_task(cycle, app)
        if self._reads == "nothing":
            if not self._is_known:
                self._learn()
            self._first_bytes, self._first_cycle = b"", None  # they refer to the request

    def _take_known(self, data: bytes) -> bool:
        """Answer a request whose head is cached; False: the parser must read it."""
        head, came = self.app.known(data)
        self._is_known = head is not None
        if head is None or came > head.body_size:
            return False
        if head.is_crowded and not self.flow.write_paused:
            reply = self.app.refusal(head, self.peer)
            if reply is not None:
                self.write_reply(reply, keep_alive=True)
                self.server_state.total_requests += 1
                self._discard_left = head.body_size - came
                if self._discard_left:
                    self._reads = "body"
                    self._requests += 1
                return True
        begins = len(data) - came
        if came < head.body_size:
            return not head.is_crowded and self._expect(head, data, begins)
        return self._answer(head, partial(self.app.begin, head, data[begins:], self.peer))

    def _learn(self) -> None:
        """Cache the head of the request just read, if all bytes received are this request.

        Otherwise another request's head could be taken for its head.
        """
        size = self._first_bytes.find(b"\r\n\r\n") + 4
        first, body_size = self._first_cycle, self._received_bytes - size
        if first is None or first is not self.cycle or not first.keep_alive:
            return
        if (b"content-length", b"%d" % body_size) in first.scope["headers"]:
            self.app.learn(first.scope, body_size, self._first_bytes[:size])

    # -- a body in pieces --------------------------------------------------------------------------

    def _expect(self, head: RequestHead, data: bytes, begins: int) -> bool:
        """Collect the body that begins in ``data``, after a cached head; False: the parser must read it."""
        arriving = self.app.expect(head, data[:begins], self.peer)
        if arriving is None:
            return False
        self._arriving = arriving
        self._reads = "body"
        self._requests += 1
        self._time_body()
        if begins < len(data):
            self._add(arriving, memoryview(data)[begins:])
        return True

    def _collect(self, arriving: ArrivingRequest, data: bytes) -> bytes:
        """Add ``data`` to the request that is arriving; return the bytes after it.

        A complete request is answered or begun. If it has a fault, or the byte budget is used up, the parser
        gets all its bytes."""
        size = arriving.missing
        if len(data) < size:
            self._add(arriving, data)
            return b""
        self._arriving, self._reads = None, "nothing"
        last, rest = (data, b"") if len(data) == size else (data[:size], data[size:])
        if self._answer(arriving.head, partial(arriving.begin, last)):
            return rest
        self._arriving = arriving
        self._hand_over(rest)
        return b""

    def _add(self, arriving: ArrivingRequest, piece: bytes | memoryview) -> None:
        try:
            arriving.add(piece)
        except Overloaded:
            self._hand_over()

    def _hand_over(self, rest: bytes = b"") -> None:
        """Pass the request that is arriving to the parser, and the bytes after it."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            data = arriving.give_back()
            self._reads, self._received_bytes, self._first_bytes = "nothing", 0, b""
            self._parse_received(data + rest if rest else data)

    def _time_body(self) -> None:
        """Start the only timer of the connection, which ends the collection of a body that is slow."""
        if not self._is_timed:
            self._is_timed = True
            self.loop.call_later(_COLLECTED_S, self._check_body, self._requests)

    def _check_body(self, request: int) -> None:
        """Pass a slow request to the parser: the application limits the time of bodies."""
        self._is_timed = False
        if self._arriving is not None:
            if request == self._requests:
                self._hand_over()
            else:
                self._time_body()

    def end_keep_alive(self) -> None:
        """Make the next answer the connection's last. A request that is arriving is not dropped."""
        super().end_keep_alive()
        self._hand_over()

    def connection_lost(self, exc: Exception | None) -> None:
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.leave()
        super().connection_lost(exc)

    def _drop(self, data: bytes) -> bytes:
        """Return ``data`` without the part that belongs to a discarded body."""
        size = min(len(data), self._discard_left)
        self._discard_left -= size
        if not self._discard_left:
            self._reads = "nothing"
        return data[size:]

    def _head_read(self) -> None:
        if type(self.cycle) is RequestResponseCycle:
            self._adopt(self.cycle)
        if self._first_cycle is None:
            self._first_cycle = self.cycle
        if self._deferred is not None and self._deferred[0] is self.cycle:
            self._refuse_early(self.cycle)

    def _refuse_early(self, cycle: RequestResponseCycle) -> None:
        """Reject a request in an overload once its head is read; its body is discarded as it arrives.

        Not if the answer is the connection's last: the client would lose it.
        """
        if cycle.keep_alive and isinstance(cycle, HttpCycle) and not self.flow.write_paused:
            reply = self.app.early_refusal(cycle.scope)
            if reply is not None:
                self._deferred = None
                cycle.finish(reply)

    # -- answering ---------------------------------------------------------------------------------

    def _answer(self, head: RequestHead, begin: Callable[[], HttpInference]) -> bool:
        """Answer or begin an inference request; False: it has a fault, which the application reports."""
        try:
            inference = begin()
        except Exception as error:
            if self.flow.write_paused or not isinstance(error, REFUSALS):
                return False
            reply: HttpReply | None = self.app.refuse(head, error)
        else:
            reply = None if self.flow.write_paused else inference.ready_reply()
        if reply is not None:
            self.write_reply(reply, keep_alive=True)
            self.server_state.total_requests += 1
            return True
        cycle = self.cycle = self._new_cycle()
        if inference.future.done():
            self.run(cycle, inference)
        else:
            PendingInference(self, cycle, inference)
        return True

    def write_reply(self, reply: HttpReply, *, keep_alive: bool) -> None:
        """Send an answer, in one write to the socket."""
        headers = self.server_state.default_headers  # another list when the date has changed
        if headers is not self._common_headers:
            lines = [b"%b: %b\r\n" % header for header in headers]
            self._common_lines, self._common_headers = b"".join(lines), headers
        end = b"\r\n" if keep_alive else b"connection: close\r\n\r\n"
        text, *arrays = reply.pieces
        head = (STATUS_LINE[reply.status], self._common_lines, reply.lines, end, text)
        if reply.size < self._copied_bytes:
            self.transport.write(b"".join((*head, *arrays)))
        else:
            self.transport.writelines((b"".join(head), *arrays))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._receiving:
            self._deferred = cycle, app  # these bytes may contain its body
        else:
            super()._start_asgi_task(cycle, app)

    def run(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Run ``app`` up to its first wait now, and the rest as a task."""
        running = cycle.run_asgi(app)
        try:
            waits_for = running.send(None)
        except StopIteration:
            return
        task = self.loop.create_task(resume_coroutine(running, waits_for))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _new_cycle(self) -> Any:
        """Create the cycle of a request whose head and body were read on the fast path."""
        cycle = RequestResponseCycle(
            scope={"type": "http", "method": "POST", "headers": []},  # type: ignore[typeddict-item] # the keys read
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
        cycle.__class__ = HttpCycle  # its task has not begun yet
        cycle.protocol = self  # type: ignore[attr-defined] # a Cycle now
        cycle.scope["extensions"] = EXTENSIONS
        cycle.scope[GONE] = self.when_gone  # type: ignore[literal-required] # ours
        cycle.scope[PEER] = self.peer  # type: ignore[literal-required] # ours
        if self._last:
            cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """Continue after an answer. uvicorn's method without its idle timer, which sweeps replace."""
        self.server_state.total_requests += 1
        self._give_up = None
        if self.transport.is_closing():
            return
        if len(self.pipeline) <= 1:  # the next request may be incomplete
            self._continue_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._send_refusal()

    def _continue_reading(self) -> None:
        if self.flow.is_full:
            self.loop.call_soon(self._parse_rest)
        else:
            self.flow.resume_reading()

    def _parse_rest(self) -> None:
        """Parse what was received after a full pipeline."""
        if not self.flow.is_full or self.transport.is_closing():
            return
        data, self._unparsed, self.flow.is_full = self._unparsed, b"", False
        self.data_received(data)
        if not self.pipeline:
            self.flow.resume_reading()
