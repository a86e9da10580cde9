"""Errors of requests: their statuses in the protocols, and their form for the client."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, NamedTuple

import orjson

from hps.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    DenseModelError,
    Forbidden,
    HpsError,
    ModelError,
    NotFound,
    TierError,
    TierTimeout,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from services.frontend.logs import fields, log
from services.frontend.path_redaction import redact_error

_SHOWN = 80


class RequestTooLarge(BadRequest):
    """The body or the number of keys exceeds the server's limits.

    ``unread``: a part of the body has not been received yet."""

    def __init__(self, message: str, *, unread: bool = False) -> None:
        super().__init__(message)
        self.unread = unread


class RequestBodyTimeout(BadRequest):
    """The request's body did not arrive in time."""


class UnknownEncoding(BadRequest):
    """Unsupported ``Content-Encoding``."""


class Overloaded(Unavailable):
    """The server is overloaded and rejects the request, because of ``cause``, a sentence without a full stop.

    ``reason`` is the metric's label."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(f"overloaded: {cause}; retry later, or ask another replica")
        self.reason = reason


class TooManyRequests(HpsError):
    """The client exceeds its limit of concurrent requests or of requests per second.

    ``reason`` is the metric's label."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class RequestCancelled(HpsError):
    """The client has cancelled the request or disconnected."""


class ErrorStatus(NamedTuple):
    """Status of an error type: HTTP's number, gRPC's name of a code."""

    http: int
    grpc: str


# Subclasses have the status of their base class.
STATUS: dict[type[HpsError], ErrorStatus] = {
    BadRequest: ErrorStatus(400, "INVALID_ARGUMENT"),
    Unauthenticated: ErrorStatus(401, "UNAUTHENTICATED"),
    Forbidden: ErrorStatus(403, "PERMISSION_DENIED"),
    NotFound: ErrorStatus(404, "NOT_FOUND"),
    RequestCancelled: ErrorStatus(499, "CANCELLED"),
    # The loaded files can't be served.
    ModelError: ErrorStatus(409, "FAILED_PRECONDITION"),
    ConfigError: ErrorStatus(409, "FAILED_PRECONDITION"),
    RequestBodyTimeout: ErrorStatus(408, "INVALID_ARGUMENT"),
    RequestTooLarge: ErrorStatus(413, "INVALID_ARGUMENT"),
    UnknownEncoding: ErrorStatus(415, "INVALID_ARGUMENT"),
    TooManyRequests: ErrorStatus(429, "RESOURCE_EXHAUSTED"),
    Unsupported: ErrorStatus(501, "UNIMPLEMENTED"),
    Unavailable: ErrorStatus(503, "UNAVAILABLE"),
    TierError: ErrorStatus(503, "UNAVAILABLE"),
    DeadlineExceeded: ErrorStatus(504, "DEADLINE_EXCEEDED"),
    TierTimeout: ErrorStatus(504, "DEADLINE_EXCEEDED"),
    DenseModelError: ErrorStatus(500, "INTERNAL"),
    HpsError: ErrorStatus(500, "INTERNAL"),
}


def status_of(error: HpsError) -> ErrorStatus:
    """The status of the nearest class in ``STATUS``."""
    kind = type(error)
    found = _OF_KIND.get(kind)
    if found is None:
        found = next((STATUS[base] for base in kind.__mro__ if base in STATUS), STATUS[HpsError])
        _OF_KIND[kind] = found
    return found


_OF_KIND: dict[type[HpsError], ErrorStatus] = {}


def http_status(error: HpsError) -> int:
    """HTTP status of ``error``."""
    return status_of(error).http


# Retry-After: seconds until an overloaded server has probably emptied its queue, or has started.
RETRY_AFTER_S = 1
# By HTTP status.
RETRIED = (429, 503)


def is_retryable(error: HpsError) -> bool:
    """True if the same request may succeed when it is sent again."""
    return http_status(error) in RETRIED


# Label of the metric of requests rejected before they were decoded, by HTTP status.
REFUSED = {401: "unauthenticated", 403: "forbidden", 413: "too_large", 503: "unavailable"}


# Errors that only mean too many requests.
REFUSALS = (Overloaded, TooManyRequests)


def rejection_reason(error: BaseException) -> str | None:
    """Reason why a request that ends with ``error`` was rejected before it was decoded; else None."""
    if isinstance(error, REFUSALS):
        return error.reason
    return REFUSED.get(http_status(error)) if isinstance(error, HpsError) else None


def client_error(error: BaseException, request_id: str) -> HpsError:
    """Convert ``error`` for the client, without paths of the server.

    Errors that hps raises on purpose are passed on. Any other is logged, and the client gets only the id of
    the log entry."""
    if isinstance(error, asyncio.CancelledError):  # the drain timed out
        return Unavailable("the server has shut down before it could answer; ask another replica")
    if isinstance(error, HpsError):
        if http_status(error) == 500:
            log.error("request failed %s", fields(request_id=request_id, error=str(error)))
        return redact_error(error)
    error_id = request_id or secrets.token_hex(8)
    log.error("internal error %s", fields(request_id=error_id), exc_info=error)
    return HpsError(f"internal error; the server's log has it under id {error_id}")


def short_value(value: Any) -> str:
    """A value of the request as JSON, truncated, for a message."""
    try:
        text = orjson.dumps(value).decode()
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
