"""What becomes of a request that failed: the one table of statuses, and what its client is told."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

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
from services.frontend.logs import fields, log

_SHOWN = 80


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


# Sub-classes inherit.
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


def http_status(error: HpsError) -> int:
    """HTTP's status for the nearest class in ``STATUS``."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return 500


def told(error: BaseException, request_id: str) -> HpsError:
    """What the client is told of ``error``: what somebody raised on purpose as it is, of anything else only
    where the log has it. Faults of our own are logged."""
    if isinstance(error, asyncio.CancelledError):  # the drain is over
        return Unavailable("the server has shut down before it could answer; ask another replica")
    if isinstance(error, HpsError):
        if http_status(error) == 500:
            log.error("request failed %s", fields(id=request_id, error=str(error)))
        return error
    known_as = request_id or secrets.token_hex(8)
    log.error("internal error %s", fields(id=known_as), exc_info=error)
    return HpsError(f"internal error; the server's log has it under id {known_as}")


def shown(value: Any) -> str:
    """A value of the request for a message: JSON, cut to a readable length."""
    try:
        text = orjson.dumps(value).decode()
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
