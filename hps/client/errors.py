"""Failures as ``HpsError``: of the connection, and of the server's replies."""

from __future__ import annotations

import json

from hps.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    HpsError,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

_ERRORS: dict[int, type[HpsError]] = {
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    405: Unsupported,
    413: BadRequest,
    501: Unsupported,
    503: Unavailable,
    504: DeadlineExceeded,
}


class Unreachable(Unavailable):
    """Nobody answered at the address."""


def replied(status: str | None, message: str | None) -> HpsError:
    kind = _ERRORS.get(int(status), HpsError) if status and status.isdigit() else HpsError
    return kind(message or f"the server answered {status}")


def said(text: bytes) -> str:
    """The message of an error reply, or nothing when it has another form."""
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


def unreachable(base: str, error: Exception, timeout_s: float) -> Unreachable:
    """Why nobody answered at ``base``, and what to do."""
    if isinstance(error, ConnectionRefusedError):
        return Unreachable(
            f"nothing listens at {base}; start a server (hps serve --config FILE) or give the "
            "address that it printed when it started"
        )
    if isinstance(error, TimeoutError):
        return Unreachable(
            f"{base} did not answer within {timeout_s:g} s; is it overloaded or stopped?"
        )
    return Unreachable(f"{base} cannot be reached: {error}")
