"""HTTP/1.1 parsing of one connection, with bounded heads and pipeline; no tunnels, no upgrades."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.frontend.http.connection_bounds import MAX_HEAD_BYTES
from services.frontend.http.protocol.connection_lifetime import ConnectionLifetime

FIELD_BYTES = 32
"""Cost of a field besides its text, as HTTP/2 counts (RFC 9113, 6.5.2); part of `MAX_HEAD_BYTES`."""
MAX_PIPELINED = 16
"""Requests queued per connection, after the one being answered, before reading pauses."""
SLICE_BYTES = 4 << 10
"""Bytes parsed between two checks of `MAX_PIPELINED`: requests in them may exceed it."""


class HeadTooLarge(Exception):
    """A request's head or trailers have more than `MAX_HEAD_BYTES`."""


class PipelineFlow(FlowControl):
    """Flow control that reads nothing while parsed requests wait (``is_full``), even if the current request
    resumes reading."""

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class HttpParsing(ConnectionLifetime):
    """A connection that feeds httptools' parser and rejects invalid input, after the answers to the requests
    before it.

    The cost of parsing is bounded by the bytes received: each head is parsed at most twice (the second time
    without its offer of another protocol), has a bound in bytes and fields, and bytes after a rejected one
    are not parsed. A client that sends requests faster than they are answered waits: `MAX_PIPELINED` of them
    are queued, and later bytes are parsed when these have been answered.
    """

    flow: PipelineFlow
    _refusal: tuple[int, str] | None = None
    """Status and message of the connection's last answer; nothing more is read."""
    _deferred: tuple[RequestResponseCycle, Any] | None = None
    """The request begun by the bytes being parsed; it starts once all of them are parsed."""
    # Of the request being read: its target and fields so far, and bytes since the parser reported progress.
    _head_size, _pending = 0, 0
    _found = False
    """True if the last feed completed a head or a request, or contained bytes of a body."""
    _body_read = 0
    """Bytes received of the body of the request being read."""
    _unparsed = b""
    """Bytes received after a full pipeline."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn narrows it
        super().connection_made(transport)
        self.flow = PipelineFlow(transport)

    def _parse(self, data: bytes) -> None:
        """Feed the parser until the pipeline is full.

        The parser stops after each head that offers another protocol. The rest gets shorter with every feed,
        so the loop ends.
        """
        left = memoryview(data)
        self._found = False
        try:
            while left and self._refusal is None:
                if len(self.pipeline) >= MAX_PIPELINED:
                    self._unparsed += left
                    self.flow.is_full = True
                    self.flow.pause_reading()
                    break
                size = len(left) if len(left) <= SLICE_BYTES else self._slice_size()
                left = left[min(size, len(left)) - len(self._feed(left[:size])) :]
            self._pending = 0 if self._found else self._pending + len(data)
            if self._pending > MAX_HEAD_BYTES:
                raise HeadTooLarge
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, HeadTooLarge) as error:
            if isinstance(error.__context__ or error, HeadTooLarge):
                self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")
            else:
                self._refuse(400, "Invalid HTTP request received.")

    def _slice_size(self) -> int:
        """Return the number of bytes to feed next: the rest of a body of known length, or a slice."""
        if self._reads == "body":
            for name, value in self.headers:
                if name == b"content-length":
                    return max(int(value) - self._body_read, SLICE_BYTES)
        return SLICE_BYTES

    def _feed(self, data: memoryview) -> memoryview | bytes:
        """Feed the parser; return the bytes it has not read.

        It stops at a request that offers another protocol (``Upgrade: h2c``, as Java's client does by
        default) without reading its body. The head is then parsed again without the offer, once.
        """
        try:
            self.parser.feed_data(data)
            return b""
        except httptools.HttpParserUpgrade as upgrade:
            left = data[upgrade.args[0] :]
        if self.parser.get_method() == b"CONNECT":
            self._refuse(400, "CONNECT is not supported: this server is not a proxy")
            return b""
        head = self._without_upgrade()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(head)
        return left

    def _without_upgrade(self) -> bytes:
        """Return the head just read without its offer of another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % line for line in self.headers if line[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    # -- called by the parser ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._reads = "head"
        self._requests += 1
        self._head_size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._add_to_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._add_to_head(len(name) + len(value) + FIELD_BYTES)
        if self._reads == "head":  # else a trailer, which must not become a checked field
            super().on_header(name, value)

    def _add_to_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD_BYTES:
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        self._found = True
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        self._reads, self._body_read = "body", 0
        self._head_read()

    def _head_read(self) -> None:
        """Hook for subclasses: the head of a request was read."""

    def on_body(self, body: bytes) -> None:
        self._found = True
        self._body_read += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._reads, self._found = "nothing", True
        super().on_message_complete()

    # -- rejecting ---------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """Set the connection's last answer, sent after those to earlier requests.

        It replaces the answer to the request being read.
        """
        self._refusal = status, message
        if self._reads != "body":
            waits = not self._is_idle()
        elif waits := bool(self.pipeline) and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
        elif self.cycle.response_started:
            self.transport.close()
            return
        self._deferred = self._deferred if waits else None
        if not waits:
            self._send_refusal()

    def _send_refusal(self) -> None:
        """End the connection with the answer set by `_refuse`, if any."""
        if self._refusal is not None:
            self._end_with(*self._refusal)
