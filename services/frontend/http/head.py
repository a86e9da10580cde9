"""What the head of an inference request says; kept for the next one that begins with the same bytes."""

from __future__ import annotations

import re

from services.frontend.http.body import accepted_coding
from services.frontend.http.routes import Route

# With these headers, the same head does not mean the same again; or it differs from request to request.
_PASSING = frozenset(
    {
        b"content-encoding",
        b"expect",
        b"traceparent",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
    }
)
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Head:
    """Whom a request asks, and what its headers want of the answer.

    ``coding`` is the content coding the client takes, None for none. ``body_size``: bytes behind a head
    that is kept.
    """

    __slots__ = ("body_size", "coding", "headers", "request_id", "route")

    def __init__(self, route: Route | None, headers: dict[bytes, bytes]) -> None:
        self.route = route
        self.headers = headers
        self.body_size = 0
        accept = headers.get(b"accept-encoding")
        self.coding = None if accept is None else accepted_coding(accept)
        self.request_id = request_id(headers)

    @property
    def comes_again(self) -> bool:
        """Whether the same bytes may be expected again, and mean the same then."""
        return self.headers.keys().isdisjoint(_PASSING)


def request_id(headers: dict[bytes, bytes]) -> str:
    """``X-Request-ID`` if it is one that may be repeated in a header and a log line, else ""."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else ""
