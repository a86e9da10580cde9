"""Caller, address, request ID and trace context of a gRPC call, from its metadata and certificate."""

from __future__ import annotations

from functools import partial
from urllib.parse import unquote

from hps.config.auth import Role
from hps.tracing import RequestContext
from services.frontend.auth import Authorizer
from services.frontend.certificates import caller_names
from services.frontend.grpc.responders import CallContext, UnaryResponder
from services.frontend.inference import NO_IDENTITY, request_identity

_NAMES = frozenset({"x-request-id", "traceparent", "tracestate"})
# Property names in grpc's auth context.
_COMMON, _ALTERNATIVE = "x509_common_name", "x509_subject_alternative_name"


def check(guard: Authorizer, context: CallContext, role: Role) -> str:
    """Return the caller's name, "" without authentication.

    Raises ``Unauthenticated`` or ``Forbidden`` unless the caller has ``role``.
    """
    if not guard.enabled:
        return ""
    return guard.check(
        {
            name.encode(): value.encode("latin-1", "replace")
            for name, value in context.invocation_metadata()
            if isinstance(value, str) and name != "origin"  # browsers of other sites send no gRPC
        },
        role,
        partial(certificate_names, context),
    )


def caller_of(reply: UnaryResponder, guard: Authorizer) -> str:
    """Return the name of a reading caller: the one checked just before the message was received, or `check`
    now."""
    if reply.caller is not None:
        return reply.caller
    return check(guard, reply.context, "read") if guard.enabled else ""


def certificate_names(context: CallContext) -> set[str]:
    """Return the names in the client's certificate, which TLS has verified; empty without one."""
    properties = context.auth_context()
    alternative, common = (
        [name.decode("utf-8", "replace") for name in properties.get(kind, ())]
        for kind in (_ALTERNATIVE, _COMMON)
    )
    return caller_names(alternative, common)


def address_of(context: CallContext) -> str:
    """Return the client's address without its port, in HTTP's form.

    All connections from one address count as one client.
    """
    peer = unquote(context.peer())  # grpc quotes IPv6's brackets
    address = peer.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0]
    return address.removeprefix("[").removesuffix("]")


def sent_identity(context: CallContext) -> RequestContext:
    """Return the request ID and the trace context in a call's metadata."""
    sent = {name: str(value) for name, value in context.invocation_metadata() if name in _NAMES}
    if not sent:
        return NO_IDENTITY
    parent, state = sent.get("traceparent", ""), sent.get("tracestate", "")
    return request_identity(sent.get("x-request-id", "")[:128], parent, state)


def metadata_value(context: CallContext, name: str) -> str | None:
    """Return a value of a call's metadata by its name in lower case, the last one; None without one."""
    found = None
    for key, value in context.invocation_metadata():
        if key == name and isinstance(value, str):
            found = value
    return found
