"""What the head of an inference request says; kept for the next one that begins with the same bytes, but for
the lines that name the one request."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hps.tracing import traceparent_of, tracestate_of
from services.frontend.http.body import accepted_coding
from services.frontend.http.routes import HttpRoute

# With these headers, the same head does not mean the same again.
_PASSING = frozenset({b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"})
# Lines that differ from request to request and say nothing of how it is to be read. One that another line
# continues is none of them.
_OWN = frozenset({b"traceparent", b"tracestate", b"x-request-id"})
_OWN_LINE = re.compile(
    rb"\r\n((?i:traceparent|tracestate|x-request-id)):[ \t]*([\x21-\x7e][\x20-\x7e]*)?(?=\r\n(?![ \t]))"
)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestHead:
    """Whom a request asks, what its headers want of the answer, and what they call it.

    ``coding`` is the content coding the client takes, None for none. ``body_size``: bytes behind a head
    that is kept. ``is_named``: whether it has a request id or a trace.
    """

    __slots__ = (
        "body_size",
        "coding",
        "headers",
        "is_named",
        "request_id",
        "route",
        "traceparent",
        "tracestate",
    )

    def __init__(self, route: HttpRoute | None, headers: dict[bytes, bytes]) -> None:
        self.route = route
        self.headers = headers
        self.body_size = 0
        accept = headers.get(b"accept-encoding")
        self.coding = None if accept is None else accepted_coding(accept)
        self._name(headers)

    @property
    def is_crowded(self) -> bool:
        """Whether as many requests to its model are worked at as may be."""
        return self.route is not None and self.route.entry.endpoint.is_busy

    @property
    def comes_again(self) -> bool:
        """Whether the same bytes may be expected again, and mean the same then."""
        return self.headers.keys().isdisjoint(_PASSING)

    def named(self, own: Mapping[bytes, bytes]) -> RequestHead:
        """The same of a request with other lines of its own."""
        other = RequestHead.__new__(RequestHead)
        other.route = self.route
        other.headers = self.headers
        other.body_size = self.body_size
        other.coding = self.coding
        other._name(own)
        return other

    def _name(self, headers: Mapping[bytes, bytes]) -> None:
        self.request_id = request_id(headers)
        parent = headers.get(b"traceparent")
        self.traceparent = self.tracestate = ""
        if parent is not None and (known := traceparent_of(parent.decode("latin-1"))):
            self.traceparent = known
            self.tracestate = tracestate_of(headers.get(b"tracestate", b"").decode("latin-1"))
        self.is_named = bool(self.request_id or self.traceparent)


def split_request_lines(text: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """A head's bytes without the lines of the one request's own, and those lines."""
    pieces = _OWN_LINE.split(text)
    own = {
        name.lower(): (value or b"").rstrip()
        for name, value in zip(pieces[1::3], pieces[2::3], strict=True)
    }
    return b"".join(pieces[::3]), own


def shared_headers(headers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Headers but those of the one request."""
    return {name: value for name, value in headers.items() if name not in _OWN}


def request_id(headers: Mapping[bytes, bytes]) -> str:
    """``X-Request-ID`` if it is one that may be repeated in a header and a log line, else ""."""
    given = headers.get(b"x-request-id")
    return "" if given is None else printable_request_id(given.decode("latin-1"))


def printable_request_id(name: str) -> str:
    """``name`` if it may stand in a header and a log line, else ""."""
    return name if _REQUEST_ID.fullmatch(name) else ""
