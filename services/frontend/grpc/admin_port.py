"""The admin port over gRPC: ``hps.v1.Admin`` and, where there are rows, ``hps.v1.Updates``."""

from __future__ import annotations

from hps.config.server_settings import GrpcAdminSettings, ServerSettings
from hps.v1 import admin_pb2 as pb
from services.frontend.auth import Authorizer
from services.frontend.grpc.admin import AdminService
from services.frontend.grpc.listener import GrpcPort
from services.frontend.grpc.unary_services import UnaryService, handlers_of
from services.frontend.grpc.updates import UpdatesService
from services.frontend.state import FrontendState


class AdminPort(GrpcPort):
    """Listens from the start; ``serve`` answers until ``stop``."""

    def __init__(
        self,
        at: GrpcAdminSettings,
        state: FrontendState,
        settings: ServerSettings,
        guard: Authorizer,
    ) -> None:
        """``ConfigError`` when it cannot listen."""
        super().__init__("server.grpc.admin", at, state, settings, guard)
        services: dict[str, UnaryService] = {"Admin": AdminService(state)}
        if settings.role != "frontend":
            services["Updates"] = UpdatesService(state)
        found = pb.DESCRIPTOR.services_by_name
        self._listen(
            {
                found[name].full_name: handlers_of(found[name], behaviors, guard)
                for name, behaviors in services.items()
            }
        )
