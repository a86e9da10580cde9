"""What the head of an inference request says; kept for the next one that begins with the same bytes."""

from __future__ import annotations

import re

from services.frontend.body import accepted_coding
from services.frontend.state import Entry

# Under these headers a body is more than the Content-Length bytes behind the head, or a request more
# than a request.
_SPECIAL = frozenset({b"content-encoding", b"expect", b"transfer-encoding", b"upgrade"})
# These differ from one request to the next: such a head does not come again.
_UNIQUE = frozenset({b"x-request-id", b"traceparent"})
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Head:
    """Whom a request asks, and what its headers want of the answer.

    ``coding`` is the content coding the client takes, None for none. ``plain``: nothing depends on the
    headers but for what the model is told.
    """

    __slots__ = ("coding", "entry", "headers", "plain", "request_id")

    def __init__(self, entry: Entry | None, headers: dict[bytes, bytes]) -> None:
        self.entry = entry
        self.headers = headers
        accept = headers.get(b"accept-encoding")
        self.coding = None if accept is None else accepted_coding(accept)
        self.request_id = request_id(headers)
        self.plain = self.coding is None and not self.request_id

    @property
    def body_size(self) -> int | None:
        """The bytes behind the head; None when the headers leave that open or ask for more care, or
        when this head will hardly come again."""
        names = self.headers.keys()
        length = self.headers.get(b"content-length")
        if length is None or names & _SPECIAL or names & _UNIQUE:
            return None
        return int(length)


def request_id(headers: dict[bytes, bytes]) -> str:
    """``X-Request-ID`` if it is one that may be repeated in a header and a log line, else ""."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else ""
