"""HTTP errors: ``{"error": "<cause and remedy>"}`` with the status of the error's class."""

from __future__ import annotations

import orjson

from services.frontend.errors import RETRIED, RETRY_AFTER_S

# Headers by status that a client needs to act on the error.
_HEADERS: dict[int, list[tuple[bytes, bytes]]] = {
    401: [(b"www-authenticate", b'Bearer realm="hps"')],
    415: [(b"accept-encoding", b"gzip, deflate")],
    **{status: [(b"retry-after", b"%d" % RETRY_AFTER_S)] for status in RETRIED},
}


def error_body(message: str) -> bytes:
    """``{"error": message}``; characters that are no text (lone surrogates) are replaced."""
    try:
        return orjson.dumps({"error": message})
    except orjson.JSONEncodeError:
        return orjson.dumps({"error": message.encode("utf-8", "replace").decode()})


def error_headers(status: int, body: bytes) -> list[tuple[bytes, bytes]]:
    """Return the response headers of an error, as a new list that callers may extend."""
    return [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *_HEADERS.get(status, ()),
    ]
