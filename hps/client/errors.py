"""Convert connection errors and servers' error replies to ``HpsError``."""

from __future__ import annotations

import http.client
import json
import math
import ssl
import time

from hps.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    HpsError,
    ModelError,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

_BY_STATUS: dict[int | str, type[HpsError]] = {
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    405: Unsupported,
    409: ModelError,
    413: BadRequest,
    429: Unavailable,
    501: Unsupported,
    503: Unavailable,
    504: DeadlineExceeded,
    "INVALID_ARGUMENT": BadRequest,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": Forbidden,
    "NOT_FOUND": NotFound,
    "FAILED_PRECONDITION": ModelError,
    "UNIMPLEMENTED": Unsupported,
    "RESOURCE_EXHAUSTED": Unavailable,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
}
# gRPC's own texts for an unreachable server; servers send other ones.
_NEVER_ARRIVED = ("failed to connect", "Socket closed", "Connection reset", "recvmsg")
_LATE = "did not answer in time; is it overloaded or stopped?"
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


class ServerUnreachable(Unavailable):
    """No server answered at the address, or the connection broke before the answer ended."""


class RetryLater(Unavailable):
    """The server asks for a retry after ``after_s`` seconds."""

    def __init__(self, message: str, after_s: float) -> None:
        super().__init__(message)
        self.after_s = after_s


def retry_after_s(error: HpsError) -> float:
    """Seconds until the server accepts a retry; 0 if unknown."""
    return error.after_s if isinstance(error, RetryLater) else 0.0


def http_error(status: int, body: bytes, retry_after: str | None, base: str) -> HpsError:
    """Convert an HTTP error reply of ``base``.

    ``retry_after``: the header's value; dates are ignored."""
    try:
        message = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        message = f"{base} answered {status}"
    return _error(status, message, retry_after, 1)


def grpc_error(base: str, code: str, message: str, pushback_ms: str | None = None) -> HpsError:
    """Convert a gRPC call's error status; ``pushback_ms`` is its ``grpc-retry-pushback-ms``."""
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in message:
        return BadRequest(message)
    if code == "DEADLINE_EXCEEDED" and "Deadline Exceeded" in message:  # gRPC's own text
        return DeadlineExceeded(f"{base} {_LATE}")
    if code == "UNAVAILABLE" and any(sign in message for sign in _NEVER_ARRIVED):
        return ServerUnreachable(f"{base} cannot be reached: {message}")
    if code == "CANCELLED":  # the client cancels no call: the server is stopping
        return ServerUnreachable(f"{base} shut down before it answered")
    if (
        pushback_ms is not None
        and not pushback_ms.isdigit()
        and _BY_STATUS.get(code) is Unavailable
    ):
        return RetryLater(message, math.inf)  # gRFC A6: the client must not retry
    return _error(code, message, pushback_ms, 1e-3)


def _error(status: int | str, message: str, later: str | None, unit_s: float) -> HpsError:
    kind = _BY_STATUS.get(status, HpsError)
    if kind is Unavailable and later is not None and later.strip().isdigit():
        return RetryLater(message, int(later) * unit_s)
    return kind(message)


def unreachable_error(base: str, error: Exception) -> HpsError:
    """Convert a connection error: why no server answered at ``base``, and the remedy."""
    if isinstance(error, ConnectionRefusedError):
        return ServerUnreachable(
            f"nothing listens at {base}; start a server (hps serve --config FILE) or give the "
            "address that it printed when it started"
        )
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(f"{base} {_LATE}")
    if isinstance(error, ssl.SSLCertVerificationError):
        return HpsError(
            f"the certificate of {base} is not trusted ({error.verify_message}); give the file of "
            "its root as tls=Tls(ca_file=…)"
        )
    if isinstance(error, http.client.IncompleteRead):
        return ServerUnreachable(f"{base} closed the connection in the middle of its answer")
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return HpsError(f"{base} does not use TLS; write {base.replace('s:', ':', 1)}")
    hint = ""
    if isinstance(error, ConnectionResetError) or "isconnected" in type(error).__name__:
        asked = "require a client certificate" if base.startswith("https") else "speak https"
        hint = f"; does it {asked}?"
    return ServerUnreachable(f"{base} cannot be reached: {error or type(error).__name__}{hint}")


def left_s(until: float) -> float:
    """Seconds left until the instant ``until``. Raises DeadlineExceeded if it has passed."""
    left = until - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("no answer before the request's deadline")
    return left
