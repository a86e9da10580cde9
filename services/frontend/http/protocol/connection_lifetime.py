"""How long an HTTP connection lasts: until its client is gone, silent for too long, or the server stops."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.frontend.connection_limit import ConnectionLimit
from services.frontend.http.errors import error_body, error_headers
from services.frontend.http.peer import ConnectionPeer

# An idle keep-alive connection is closed after this time, and one whose client reads nothing of its
# answer; a connection on which a request has begun but does not go on, after one to two sweeps.
KEEP_ALIVE_S = 75
# An idle connection of a server that stops is closed after this time: a request may be on its way.
LINGER_S = 0.5


class ConnectionLifetime(HttpToolsProtocol):
    """A connection that is swept now and then in place of uvicorn's timers, and ends in order. Who reads
    it says what is being read, and counts arrivals and the requests that began."""

    peer: ConnectionPeer
    of_port: ConnectionLimit | None = None
    """Those of the port, whose own class says so."""
    _reads: Literal["nothing", "head", "body"] = "nothing"
    _heard, _requests = 0, 0
    _last = False
    """Whether the next answer is its last."""
    _entered = False
    _give_up: Callable[[], None] | None = None
    # At the last sweep: the arrivals, what the client had not taken, and the request that was still coming.
    _swept, _unsent, _coming = -1, 0, 0
    # Sweeps since without a change of the former two.
    _silent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvicorn narrows it so, too
        super().connection_made(transport)
        self.peer = ConnectionPeer(self.client, transport)
        if self.of_port is not None:
            self._entered = self.of_port.enter(self.peer.host)
            if not self._entered:
                self._end_with(503, "too many connections; close some, or ask another replica")
                self.loop.call_later(LINGER_S, transport.abort)

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

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

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

    def _end_with(self, status: int, message: str) -> None:
        """Send an error as the connection's last answer and close it."""
        body = error_body(message)
        lines = [STATUS_LINE[status]]
        for name, value in [*error_headers(status, body), (b"connection", b"close")]:
            lines += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join([*lines, b"\r\n", body]))
        self.transport.close()
