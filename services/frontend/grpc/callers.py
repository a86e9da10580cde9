"""Who calls, by gRPC's metadata."""

from __future__ import annotations

import grpc

from hps.config.auth import Role
from services.frontend.auth import Guard


def check(guard: Guard, context: grpc.ServicerContext, role: Role) -> None:
    """Raises ``Unauthenticated`` or ``Forbidden`` unless the caller may do what needs ``role``."""
    if guard.enabled:
        guard.check(
            {
                name.encode(): value.encode("latin-1", "replace")
                for name, value in context.invocation_metadata()
                if isinstance(value, str)
            },
            role,
        )
