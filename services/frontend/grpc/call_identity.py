"""Authentication and client identity of a gRPC call, from its metadata and certificate."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any
from urllib.parse import unquote

from hps.config.auth import Role
from hps.errors import HpsError
from services.frontend.admission.client_limits import ClientLimits
from services.frontend.auth import Authorizer
from services.frontend.certificates import caller_names
from services.frontend.grpc.responders import CallContext, UnaryResponder

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


class CountedResponder:
    """A responder that counts the request against its client's limits until it is answered."""

    def __init__(self, reply: UnaryResponder, clients: ClientLimits, caller: str) -> None:
        """``caller`` is the client's name, "" if only its address is known. Raises ``TooManyRequests``."""
        self.context = reply.context
        self.caller = reply.caller
        self._reply = reply
        self._clients = clients
        self._client = caller or address_of(reply.context)
        self._has_left = False
        clients.enter(self._client)

    def answer(self, message: bytes) -> None:
        self._leave(None)
        self._reply.answer(message)

    def fail(self, error: HpsError) -> None:
        self._leave(error)
        self._reply.fail(error)

    def _leave(self, error: HpsError | None) -> None:
        """Leave the limits, the first time only: an answer that cannot be sent is followed by a failure."""
        if not self._has_left:
            self._has_left = True
            self._clients.leave(self._client, error)

    def waits_for(self, future: Future[Any]) -> None:
        self._reply.waits_for(future)

    def run(self, work: Callable[[], None], size: int) -> None:
        self._reply.run(work, size)
