"""gRPC admin port: ``hps.v1.Admin`` and, if the process has rows, ``hps.v1.Updates``."""

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
    """The admin port. It listens from construction; ``serve`` answers until ``stop``."""

    def __init__(
        self,
        at: GrpcAdminSettings,
        state: FrontendState,
        settings: ServerSettings,
        guard: Authorizer,
    ) -> None:
        """Raises ``ConfigError`` if it cannot listen."""
        super().__init__("server.grpc.admin", at, state, settings, guard)
        services: dict[str, UnaryService] = {"Admin": AdminService(state)}
        if settings.role != "frontend":
            services["Updates"] = UpdatesService(state)
        descriptors = pb.DESCRIPTOR.services_by_name
        self._listen(
            {
                descriptors[name].full_name: handlers_of(descriptors[name], behaviors, guard)
                for name, behaviors in services.items()
            }
        )
