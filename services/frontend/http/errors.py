"""The one shape of an error over HTTP: ``{"error": "<cause and mend>"}`` with the status of its class."""

from __future__ import annotations

import orjson

from services.frontend.errors import RETRIED, RETRY_AFTER_S

# What a client needs beside the status to act on it.
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
    """Response headers of an error; a list of its own, to be added to."""
    return [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *_HEADERS.get(status, ()),
    ]
