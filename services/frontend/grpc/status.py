"""How a call ends that cannot be answered: its status, and when to ask again."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from hps.errors import HpsError
from services.frontend.errors import RETRY_AFTER_S, is_retryable, status_of

Trailers = tuple[tuple[str, str], ...] | None

# gRFC A6: what a client that repeats calls waits for.
_PUSHBACK = (("grpc-retry-pushback-ms", str(RETRY_AFTER_S * 1000)),)


class CallStatus(NamedTuple):
    """How calls end that fail with one kind of error: the status and its number, and what says when such a
    call may be repeated."""

    code: grpc.StatusCode
    number: int
    trailers: Trailers


def call_status(error: HpsError) -> CallStatus:
    """How a call ends that fails with ``error``."""
    kind = type(error)
    found = _OF_KIND.get(kind)
    if found is None:
        code = grpc.StatusCode[status_of(error).grpc]
        found = CallStatus(code, code.value[0], _PUSHBACK if is_retryable(error) else None)
        _OF_KIND[kind] = found
    return found


_OF_KIND: dict[type[HpsError], CallStatus] = {}


def abort(error: HpsError, context: grpc.ServicerContext) -> None:
    """End a call on the thread it has: raises what grpc knows by."""
    code, _, trailers = call_status(error)
    if trailers is not None:
        context.set_trailing_metadata(trailers)
    context.abort(code, str(error))
