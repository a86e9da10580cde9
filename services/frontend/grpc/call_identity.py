"""Who calls, by gRPC's metadata."""

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

# What grpc calls them.
_COMMON, _ALTERNATIVE = "x509_common_name", "x509_subject_alternative_name"


def check(guard: Authorizer, context: CallContext, role: Role) -> str:
    """Who the caller is, "" when that was not asked. Raises ``Unauthenticated`` or ``Forbidden`` unless the
    caller may do what needs ``role``."""
    if not guard.enabled:
        return ""
    return guard.check(
        {
            name.encode(): value.encode("latin-1", "replace")
            for name, value in context.invocation_metadata()
            if isinstance(value, str) and name != "origin"  # pages of other sites send no gRPC
        },
        role,
        partial(certificate_names, context),
    )


def caller_of(reply: UnaryResponder, guard: Authorizer) -> str:
    """Who asks to read: as was found just before the message was received, else as `check` finds
    now."""
    if reply.caller is not None:
        return reply.caller
    return check(guard, reply.context, "read") if guard.enabled else ""


def certificate_names(context: CallContext) -> set[str]:
    """What the caller's certificate names, if it has shown one; it was verified then."""
    told = context.auth_context()
    alternative, common = (
        [name.decode("utf-8", "replace") for name in told.get(kind, ())]
        for kind in (_ALTERNATIVE, _COMMON)
    )
    return caller_names(alternative, common)


def address_of(context: CallContext) -> str:
    """Where the caller is, as HTTP would have it and without its port: all of its connections are one
    client's."""
    peer = unquote(context.peer())  # grpc quotes IPv6's brackets
    address = peer.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0]
    return address.removeprefix("[").removesuffix("]")


class CountedResponder:
    """``reply`` to a client whose requests are counted until they are answered. Raises ``TooManyRequests``
    when there are too many of them."""

    def __init__(self, reply: UnaryResponder, clients: ClientLimits, caller: str) -> None:
        """``caller``: who that is, "" when only its address is known."""
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
        """Once: an answer that can't be sent is told as a failure."""
        if not self._has_left:
            self._has_left = True
            self._clients.leave(self._client, error)

    def waits_for(self, future: Future[Any]) -> None:
        self._reply.waits_for(future)

    def go_on(self, work: Callable[[], None], size: int) -> None:
        self._reply.go_on(work, size)
