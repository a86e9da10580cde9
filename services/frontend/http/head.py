"""Parsed heads of inference requests.

A head is kept for further requests with the same bytes, apart from the lines that are unique to a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hps.tracing import RequestContext
from services.frontend.http.body import accepted_coding
from services.frontend.http.routes import HttpRoute
from services.frontend.inference import NO_IDENTITY, request_identity

# A head with one of these headers is not kept: the same bytes may mean something else next time.
_PASSING = frozenset({b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"})
# Headers that differ from request to request and do not affect parsing. A header that is continued on the
# next line does not count as one of them.
_OWN = frozenset({b"traceparent", b"tracestate", b"x-request-id"})
_OWN_LINE = re.compile(
    rb"\r\n((?i:traceparent|tracestate|x-request-id)):[ \t]*([\x21-\x7e][\x20-\x7e]*)?(?=\r\n(?![ \t]))"
)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestHead:
    """Route, headers, request ID and trace context of an inference request.

    ``coding`` is the content coding that the client accepts, or None. ``body_size``: the bytes after a head
    that is kept.
    """

    __slots__ = (
        "body_size",
        "coding",
        "headers",
        "identity",
        "route",
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
        """True if the requests in flight to the model have reached their limit."""
        return self.route is not None and self.route.entry.endpoint.is_saturated

    @property
    def is_cacheable(self) -> bool:
        """True if the same bytes are likely to be received again, with the same meaning."""
        return self.headers.keys().isdisjoint(_PASSING)

    def named(self, own: Mapping[bytes, bytes]) -> RequestHead:
        """Return a copy with the request ID and trace context in ``own``."""
        other = RequestHead.__new__(RequestHead)
        other.route = self.route
        other.headers = self.headers
        other.body_size = self.body_size
        other.coding = self.coding
        other._name(own)
        return other

    def _name(self, headers: Mapping[bytes, bytes]) -> None:
        if b"traceparent" in headers:
            parent, state = headers[b"traceparent"], headers.get(b"tracestate", b"")
            traced = parent.decode("latin-1"), state.decode("latin-1")
            self.identity = request_identity(request_id(headers), *traced)
        elif name := request_id(headers):
            self.identity = RequestContext(name)
        else:
            self.identity = NO_IDENTITY


def split_request_lines(text: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Split a head's bytes into the part that is repeated and the headers unique to one request."""
    pieces = _OWN_LINE.split(text)
    own = {
        name.lower(): (value or b"").rstrip()
        for name, value in zip(pieces[1::3], pieces[2::3], strict=True)
    }
    return b"".join(pieces[::3]), own


def shared_headers(headers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the headers without those unique to one request."""
    return {name: value for name, value in headers.items() if name not in _OWN}


def request_id(headers: Mapping[bytes, bytes]) -> str:
    """Return ``X-Request-ID``, or "" if it cannot be repeated in a header and a log line."""
    value = headers.get(b"x-request-id")
    return "" if value is None else printable_request_id(value.decode("latin-1"))


def printable_request_id(name: str) -> str:
    """Return ``name``, or "" if it cannot be written in a header and a log line."""
    return name if _REQUEST_ID.fullmatch(name) else ""
