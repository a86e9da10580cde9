"""What a call is named, by its message and its metadata."""

from __future__ import annotations

from typing import NamedTuple

from hps.tracing import RequestContext, traceparent_of, tracestate_of
from services.frontend.grpc.request import GrpcInferenceRequest
from services.frontend.grpc.responders import CallContext
from services.frontend.request_observer import RequestObserver

_NAMES = frozenset({"x-request-id", "traceparent", "tracestate"})


class CallIdentity(NamedTuple):
    """``request_id`` is the message's, else the metadata's."""

    request_id: str
    traceparent: str = ""
    tracestate: str = ""


def named(request_id: str, context: CallContext) -> CallIdentity:
    given = {name: str(value) for name, value in context.invocation_metadata() if name in _NAMES}
    if not given:
        return CallIdentity(request_id)
    parent = traceparent_of(given.get("traceparent", ""))
    state = tracestate_of(given.get("tracestate", "")) if parent else ""
    return CallIdentity(request_id or given.get("x-request-id", "")[:128], parent, state)


def identify(
    call: GrpcInferenceRequest,
    model: str,
    context: CallContext,
    started: int,
    observer: RequestObserver,
) -> RequestContext | None:
    """On whose behalf ``call`` is, where anybody cares. Its answer carries the id that it came with, in
    whichever way."""
    is_named = call.id or not _NAMES.isdisjoint(dict(context.invocation_metadata()))
    if not is_named and not observer.watches:
        return None
    found = named(call.id, context)
    call.id = found.request_id
    call.origin = begun(found, model, started, observer)
    return call.origin


def begun(
    found: CallIdentity, model: str, started: int, observer: RequestObserver
) -> RequestContext | None:
    """The request that is named so, where anybody cares."""
    if any(found) or observer.watches:
        return observer.begin(model, started, *found)
    return None
