"""gRPC services as plain objects: a method per unary call, by its name in the ``.proto``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import grpc
from google.protobuf.message_factory import GetMessageClass

from hps.config.auth import Role
from services.frontend.auth import Authorizer
from services.frontend.grpc.service import require_role


class UnaryService(Protocol):
    """An object with a method per call. ``roles``: the role that each call needs."""

    roles: Mapping[str, Role]


def handlers_of(
    descriptor: Any, service: UnaryService, guard: Authorizer
) -> dict[str, grpc.RpcMethodHandler]:
    """Return handlers for the calls of ``service``; its ``descriptor`` has their message types."""
    return {
        name: grpc.unary_unary_rpc_method_handler(
            require_role(guard, role, getattr(service, name)),
            GetMessageClass(descriptor.methods_by_name[name].input_type).FromString,
            GetMessageClass(descriptor.methods_by_name[name].output_type).SerializeToString,
        )
        for name, role in service.roles.items()
    }
