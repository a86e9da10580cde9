"""How a call ends that cannot be answered: its status, and when to ask again."""

from __future__ import annotations

import grpc

from hps.errors import HpsError
from services.frontend.errors import RETRY_AFTER_S, is_retried, status_of

# gRFC A6: what a client that repeats calls waits for.
_PUSHBACK = "grpc-retry-pushback-ms", str(RETRY_AFTER_S * 1000)


def code_of(error: HpsError, context: grpc.ServicerContext) -> grpc.StatusCode:
    """The status that ``error`` has in gRPC. Where the call may be repeated, its trailers say when."""
    if is_retried(error):
        context.set_trailing_metadata((_PUSHBACK,))
    return grpc.StatusCode[status_of(error).grpc]


def abort(error: HpsError, context: grpc.ServicerContext) -> None:
    """End a call on the thread it has: raises what grpc knows by."""
    context.abort(code_of(error, context), str(error))
