"""Services that are plain objects: a method for each unary call, by its name in the ``.proto``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import grpc
from google.protobuf.message_factory import GetMessageClass

from hps.config.auth import Role
from services.frontend.auth import Authorizer
from services.frontend.grpc.service import require_role


class UnaryService(Protocol):
    """With a method for each call. ``roles``, by call: who may make it."""

    roles: Mapping[str, Role]


def handlers_of(
    descriptor: Any, service: UnaryService, guard: Authorizer
) -> dict[str, grpc.RpcMethodHandler]:
    """Handlers for the calls of ``service``, whose ``descriptor`` has their messages."""
    return {
        name: grpc.unary_unary_rpc_method_handler(
            require_role(guard, role, getattr(service, name)),
            GetMessageClass(descriptor.methods_by_name[name].input_type).FromString,
            GetMessageClass(descriptor.methods_by_name[name].output_type).SerializeToString,
        )
        for name, role in service.roles.items()
    }
