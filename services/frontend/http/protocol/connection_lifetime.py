"""Lifetime of an HTTP connection: idle and slow clients, server shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.frontend.connection_limit import ConnectionLimit
from services.frontend.http.connection_bounds import (
    LINGER_S,
    TOO_MANY_CONNECTIONS,
    ConnectionActivity,
    StallDetector,
    last_answer,
)
from services.frontend.http.peer import ConnectionPeer


class ConnectionLifetime(HttpToolsProtocol):
    """A connection that periodic sweeps close, in place of uvicorn's timers.

    The subclass that parses sets ``_reads``, and counts ``_arrivals`` (arrivals) and ``_requests`` (begun).
    """

    peer: ConnectionPeer
    of_port: ConnectionLimit | None = None
    """The connections of the port; set in a subclass per port."""
    _reads: Literal["nothing", "head", "body"] = "nothing"
    _arrivals, _requests = 0, 0
    _last = False
    """True if the connection closes after the next answer."""
    _entered = False
    _give_up: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn narrows it
        super().connection_made(transport)
        self.peer = ConnectionPeer(self.client, transport)
        self._stalls = StallDetector()
        if self.of_port is not None:
            self._entered = self.of_port.enter(self.peer.host)
            if not self._entered:
                self._end_with(*TOO_MANY_CONNECTIONS)
                self.loop.call_later(LINGER_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._entered and self.of_port is not None:
            self.of_port.leave(self.peer.host)
        if self._give_up is not None:
            self._give_up()

    def when_gone(self, give_up: Callable[[], None]) -> None:
        """Call ``give_up`` if the client disconnects before the current request is answered."""
        self._give_up = give_up
        if self.transport.is_closing():
            give_up()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def shutdown(self) -> None:
        """Make the next answer the connection's last, as the server stops; close an idle connection."""
        self.end_keep_alive()
        if self._is_idle():
            self.loop.call_later(LINGER_S, self._close_idle)

    def end_keep_alive(self) -> None:
        """Make the next answer the connection's last."""
        self._last = True
        if not self._is_idle():
            self.cycle.keep_alive = False

    def _close_idle(self) -> None:
        if self._is_idle():
            self.transport.close()
            if self.scheme == "https":
                self.loop.call_later(LINGER_S, self._abort_idle)

    def _abort_idle(self) -> None:
        """Abort an idle TLS connection, whose client does not complete the TLS shutdown."""
        if not self.transport.get_write_buffer_size():
            self.transport.abort()

    def sweep(self, every_s: float) -> None:
        """Close the connection if it has stalled. Called every ``every_s`` seconds.

        The same head, or body that no request waits for, must not be arriving at two sweeps.
        """
        activity = ConnectionActivity(
            arrivals=self._arrivals,
            arriving=self._requests if self._is_coming() else 0,
            is_answering=self._is_answering(),
            is_idle=self._reads == "nothing" and self._arrivals > 0,
        )
        self._stalls.sweep(self.transport, activity, every_s)

    def _is_coming(self) -> bool:
        """Return True if a request is arriving within a time limit.

        A head that follows a request being answered has no limit; one that follows an answer not taken has
        one.
        """
        if self._is_idle():
            return self._reads != "nothing"
        return self._reads == "head" and self.transport.get_write_buffer_size() > 0

    def _is_answering(self) -> bool:
        if self.pipeline:  # ``cycle`` is a later request, read no further until its turn
            return True
        cycle = self.cycle
        return not self._is_idle() and (cycle.response_started or not cycle.more_body)

    def _end_with(self, status: int, message: str) -> None:
        """Send an error as the connection's last answer and close it."""
        self.transport.write(last_answer(status, message))
        self.transport.close()
