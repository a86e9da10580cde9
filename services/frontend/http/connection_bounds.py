"""Bounds of an HTTP connection: the size of heads, idle and slow clients, the last error."""

from __future__ import annotations

import asyncio
import math
from http import HTTPStatus
from typing import NamedTuple

from services.frontend.http.errors import error_body, error_headers

MAX_HEAD_BYTES = 64 << 10
"""Bound of a request's target and header fields, with trailers."""
# The time after which an idle keep-alive connection is closed, or one whose client reads nothing of its
# answer. A connection whose request has begun but stalls is closed after one to two sweeps.
KEEP_ALIVE_S = 75
# When the server stops or rejects a connection, its client has this time to finish.
LINGER_S = 0.5
TOO_MANY_CONNECTIONS = 503, "too many connections; close some, or ask another replica"


def last_answer(status: int, message: str) -> bytes:
    """Return the bytes of an error after which the connection closes."""
    body = error_body(message)
    status_line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
    headers = [*error_headers(status, body), (b"connection", b"close")]
    return b"".join([status_line, *(b"%b: %b\r\n" % each for each in headers), b"\r\n", body])


class ConnectionActivity(NamedTuple):
    """The state of a connection at a sweep.

    ``arrivals``: how often bytes were received. ``arriving``: the number of the request that is arriving
    within a time limit, or whose discarded body is; 0: none. ``is_answering``: a request is being answered.
    ``is_idle``: a request was answered, or the connection waits for the next one.
    """

    arrivals: int
    arriving: int
    is_answering: bool
    is_idle: bool


class StallDetector:
    """Closes a connection that has stalled. It is called at each of the periodic sweeps."""

    __slots__ = ("_arriving", "_seen", "_silent_sweeps")

    def __init__(self) -> None:
        self._arriving = 0
        self._seen = -1, 0  # arrivals, and bytes that the client had not taken
        self._silent_sweeps = 0  # those at which these were the same

    def sweep(
        self, transport: asyncio.Transport, activity: ConnectionActivity, every_s: float
    ) -> None:
        """Close the connection if it has stalled. Called every ``every_s`` seconds.

        It has if no byte was received or sent for too long, or if the same request was already arriving at
        the last sweep.
        """
        arriving = activity.arriving
        if arriving and arriving == self._arriving and not transport.is_closing():
            transport.close()
            return
        self._arriving = arriving
        unsent = transport.get_write_buffer_size()
        seen = activity.arrivals, unsent
        if seen != self._seen or (activity.is_answering and not unsent):
            self._seen, self._silent_sweeps = seen, 0
            return
        self._silent_sweeps += 1
        has_time = unsent or activity.is_idle
        if self._silent_sweeps >= (math.ceil(KEEP_ALIVE_S / every_s) if has_time else 1):
            # ``close`` would wait until the client has taken all that was sent.
            (transport.abort if unsent else transport.close)()
