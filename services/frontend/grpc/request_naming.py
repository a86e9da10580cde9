"""Request ID and trace context of a call, from its message and its metadata."""

from __future__ import annotations

from typing import NamedTuple

from hps.tracing import RequestContext, traceparent_of, tracestate_of
from services.frontend.grpc.request import GrpcInferenceRequest
from services.frontend.grpc.responders import CallContext
from services.frontend.request_observer import RequestObserver

_NAMES = frozenset({"x-request-id", "traceparent", "tracestate"})


class CallIdentity(NamedTuple):
    """Request ID (the message's, else the metadata's) and W3C trace context."""

    request_id: str
    traceparent: str = ""
    tracestate: str = ""


def call_identity(request_id: str, context: CallContext) -> CallIdentity:
    metadata = {name: str(value) for name, value in context.invocation_metadata() if name in _NAMES}
    if not metadata:
        return CallIdentity(request_id)
    parent = traceparent_of(metadata.get("traceparent", ""))
    state = tracestate_of(metadata.get("tracestate", "")) if parent else ""
    return CallIdentity(request_id or metadata.get("x-request-id", "")[:128], parent, state)


def identify(
    call: GrpcInferenceRequest,
    model: str,
    context: CallContext,
    started: int,
    observer: RequestObserver,
) -> RequestContext | None:
    """Set the request's ID and context; the context is None if the request has no ID and is not observed.

    The response carries the ID, from the message or the metadata.
    """
    is_named = call.id or not _NAMES.isdisjoint(dict(context.invocation_metadata()))
    if not is_named and not observer.watches:
        return None
    identity = call_identity(call.id, context)
    call.id = identity.request_id
    call.origin = request_context(identity, model, started, observer)
    return call.origin


def request_context(
    identity: CallIdentity, model: str, started: int, observer: RequestObserver
) -> RequestContext | None:
    """Return the request's context; None if it has no ID and is not observed."""
    if any(identity) or observer.watches:
        return observer.begin(model, started, *identity)
    return None
