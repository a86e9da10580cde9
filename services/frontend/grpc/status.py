"""gRPC status of a failed call, with the time after which to retry."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from hps.errors import HpsError
from services.frontend.errors import RETRY_AFTER_S, is_retryable, status_of

Trailers = tuple[tuple[str, str], ...] | None

# gRFC A6: the pause before a client retries.
_PUSHBACK = (("grpc-retry-pushback-ms", str(RETRY_AFTER_S * 1000)),)


class CallStatus(NamedTuple):
    """Status, its number, and the trailers with the retry pause, for one type of error."""

    code: grpc.StatusCode
    number: int
    trailers: Trailers


def call_status(error: HpsError) -> CallStatus:
    """Return the status of a call that fails with ``error``."""
    kind = type(error)
    status = _OF_KIND.get(kind)
    if status is None:
        code = grpc.StatusCode[status_of(error).grpc]
        status = CallStatus(code, code.value[0], _PUSHBACK if is_retryable(error) else None)
        _OF_KIND[kind] = status
    return status


_OF_KIND: dict[type[HpsError], CallStatus] = {}


def abort(error: HpsError, context: grpc.ServicerContext) -> None:
    """End a call on its thread; raises grpc's exception."""
    code, _, trailers = call_status(error)
    if trailers is not None:
        context.set_trailing_metadata(trailers)
    context.abort(code, str(error))
