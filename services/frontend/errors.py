"""From errors to HTTP: the one table of statuses, and the one shape of an error body.

Every error is ``{"error": "<cause and mend>"}`` with the status of its class; sub-classes inherit.
"""

from __future__ import annotations

import orjson

from hps.errors import (
    BadRequest,
    DeadlineExceeded,
    DenseModelError,
    Forbidden,
    HpsError,
    NotFound,
    TierError,
    TierTimeout,
    Unauthenticated,
    Unavailable,
    Unsupported,
)


class TooLarge(BadRequest):
    """The body or the number of keys is beyond the server's limits. ``unread``: part of the body has
    not been received yet."""

    def __init__(self, message: str, *, unread: bool = False) -> None:
        super().__init__(message)
        self.unread = unread


class TooSlow(BadRequest):
    """The request's body did not come in time."""


class UnknownEncoding(BadRequest):
    """A ``Content-Encoding`` that is not spoken here."""


STATUS: dict[type[HpsError], int] = {
    BadRequest: 400,
    Unauthenticated: 401,
    Forbidden: 403,
    NotFound: 404,
    TooSlow: 408,
    TooLarge: 413,
    UnknownEncoding: 415,
    Unsupported: 501,
    Unavailable: 503,
    TierError: 503,
    DeadlineExceeded: 504,
    TierTimeout: 504,
    DenseModelError: 500,
    HpsError: 500,
}

# What a client needs beside the status to act on it.
_HEADERS: dict[int, list[tuple[bytes, bytes]]] = {
    401: [(b"www-authenticate", b'Bearer realm="hps"')],
    415: [(b"accept-encoding", b"gzip, deflate")],
    503: [(b"retry-after", b"1")],
}


def http_status(error: HpsError) -> int:
    """The status of the nearest class in ``STATUS``."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return 500


def error_body(message: str) -> bytes:
    """``{"error": message}``; characters that are no text (lone surrogates) are replaced."""
    try:
        return orjson.dumps({"error": message})
    except orjson.JSONEncodeError:
        return orjson.dumps({"error": message.encode("utf-8", "replace").decode()})


def error_headers(status: int, body: bytes) -> list[tuple[bytes, bytes]]:
    """Response headers of an error; a list of its own, to be added to."""
    return [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *_HEADERS.get(status, ()),
    ]
