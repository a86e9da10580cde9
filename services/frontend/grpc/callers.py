"""Who calls, by gRPC's metadata."""

from __future__ import annotations

import grpc

from hps.config.auth import Role
from services.frontend.auth import Guard


def check(guard: Guard, context: grpc.ServicerContext, role: Role) -> str:
    """Who the caller is, "" when that was not asked. Raises ``Unauthenticated`` or ``Forbidden`` unless the
    caller may do what needs ``role``."""
    if not guard.enabled:
        return ""
    return guard.check(
        {
            name.encode(): value.encode("latin-1", "replace")
            for name, value in context.invocation_metadata()
            if isinstance(value, str)
        },
        role,
    )


def address_of(context: grpc.ServicerContext) -> str:
    """Where the caller is, without its port: all of its connections are one client's."""
    peer: str = context.peer()
    return peer.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0]
