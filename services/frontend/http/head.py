"""Parsed heads of inference requests.

A head is kept for further requests with the same bytes, apart from the lines that are unique to a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hps.tracing import RequestContext
from services.frontend.http.body import accepted_coding
from services.frontend.http.routes import HttpRoute
from services.frontend.inference import NO_IDENTITY, request_identity

# A head with one of these headers is not kept: the same bytes may mean something else next time.
_PASSING = frozenset({b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"})
# Headers that differ from request to request and do not affect parsing. A header that is continued on the
# next line does not count as one of them.
_OWN = frozenset({b"traceparent", b"tracestate", b"x-request-id"})
_OWN_LINE = rb"\r\n((?i:%b)):[ \t]*([\x21-\x7e][\x20-\x7e]*)?(?=\r\n(?![ \t]))"
# Headers of traffic rules that affect parsing or authentication, which need them in each head.
_NEEDED = frozenset({b"x-api-key", b"x-forwarded-for"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestHead:
    """Route, headers, request ID and trace context of an inference request.

    ``coding`` is the content coding that the client accepts, or None. ``body_size``: the bytes after a head
    that is kept. ``own``: headers that only this request has, if the others are from a head that was kept.
    """

    __slots__ = (
        "body_size",
        "coding",
        "headers",
        "identity",
        "own",
        "route",
    )

    def __init__(self, route: HttpRoute | None, headers: dict[bytes, bytes]) -> None:
        self.route = route
        self.headers = headers
        self.own: Mapping[bytes, bytes] = {}
        self.body_size = 0
        accept = headers.get(b"accept-encoding")
        self.coding = None if accept is None else accepted_coding(accept)
        self._name(headers)

    @property
    def is_crowded(self) -> bool:
        """True if the requests in flight to the model have reached their limit.

        False where a traffic rule has yet to choose the version."""
        route = self.route
        return route is not None and route.split is None and route.entry.endpoint.is_saturated

    def chosen_route(self) -> HttpRoute:
        """Return the route; of one that is divided, the choice, unless that needs the body."""
        route = self.route
        assert route is not None
        if route.split is None or route.split.needs_body:
            return route
        chosen: HttpRoute = route.split.choose(self.header, None)
        return chosen

    def header(self, name: str) -> str | None:
        """Return a header's value by its name in lower case."""
        key = name.encode()
        value = self.own.get(key)
        if value is None:
            value = self.headers.get(key)
        return None if value is None else value.decode("latin-1")

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
        other.own = own
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


class HeadLines:
    """Splits heads into the part that requests repeat and the headers unique to one request.

    ``names``: headers that may differ from request to request, in addition to IDs; names in lower case."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        further = {name.encode() for name in names}
        # Others may affect the answer; heads that differ in them are kept separately.
        further = {name for name in further if name.startswith(b"x-")} - _NEEDED
        every = b"|".join(re.escape(name) for name in sorted(_OWN | further))
        self._line = re.compile(_OWN_LINE % every)

    def split(self, text: bytes) -> tuple[bytes, dict[bytes, bytes]]:
        """Split a head's bytes into the part that is repeated and the headers unique to one request."""
        pieces = self._line.split(text)
        own = {
            name.lower(): (value or b"").rstrip()
            for name, value in zip(pieces[1::3], pieces[2::3], strict=True)
        }
        return b"".join(pieces[::3]), own


def shared_headers(
    headers: Mapping[bytes, bytes], own: Mapping[bytes, bytes]
) -> dict[bytes, bytes]:
    """Return the headers without those unique to one request, which are IDs and ``own``."""
    return {n: value for n, value in headers.items() if n not in _OWN and n not in own}


def request_id(headers: Mapping[bytes, bytes]) -> str:
    """Return ``X-Request-ID``, or "" if it cannot be repeated in a header and a log line."""
    value = headers.get(b"x-request-id")
    return "" if value is None else printable_request_id(value.decode("latin-1"))


def printable_request_id(name: str) -> str:
    """Return ``name``, or "" if it cannot be written in a header and a log line."""
    return name if _REQUEST_ID.fullmatch(name) else ""
