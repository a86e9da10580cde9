"""How a call ends that cannot be answered: its status, and when to ask again."""

from __future__ import annotations

import grpc

from hps.errors import HpsError
from services.frontend.errors import RETRY_AFTER_S, is_retried, status_of

Trailers = tuple[tuple[str, str], ...] | None

# gRFC A6: what a client that repeats calls waits for.
_PUSHBACK = (("grpc-retry-pushback-ms", str(RETRY_AFTER_S * 1000)),)


def code_of(error: HpsError) -> grpc.StatusCode:
    """The status that ``error`` has in gRPC."""
    return grpc.StatusCode[status_of(error).grpc]


def trailers_of(error: HpsError) -> Trailers:
    """Where the call may be repeated, when."""
    return _PUSHBACK if is_retried(error) else None


def abort(error: HpsError, context: grpc.ServicerContext) -> None:
    """End a call on the thread it has: raises what grpc knows by."""
    if (trailers := trailers_of(error)) is not None:
        context.set_trailing_metadata(trailers)
    context.abort(code_of(error), str(error))
