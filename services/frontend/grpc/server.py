"""gRPC data port: the Open Inference Protocol, and lookups for other nodes.

Inference begins on the event loop (`http2/`); other short calls run on a few threads. A stream keeps a thread
while it is open.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from tritonclient.grpc.service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

from hps.config.server_settings import GrpcSettings, ServerSettings
from services.frontend.auth import Authorizer
from services.frontend.grpc.inference_service import GrpcInferenceService
from services.frontend.grpc.listener import GrpcPort, HandlerCollector, Handlers
from services.frontend.grpc.lookup import SERVICE as LOOKUP
from services.frontend.grpc.lookup import LookupService, lookup_handlers
from services.frontend.grpc.method_handlers import BidiStreamHandler, UnaryHandler
from services.frontend.grpc.service import SERVICE, InferenceService
from services.frontend.grpc.stream_limit import STREAMS
from services.frontend.state import FrontendState

_STREAMS = STREAMS + 8  # spare threads to reject more streams


class GrpcServer(GrpcPort):
    """The data port. It listens from construction; ``serve`` answers until ``stop``."""

    def __init__(
        self,
        at: GrpcSettings,
        state: FrontendState,
        settings: ServerSettings,
        guard: Authorizer,
        *,
        one_of_many: bool = False,
        also_at: Path | None = None,
    ) -> None:
        """``one_of_many``: other processes listen on the port too. ``also_at``: a Unix socket in a private
        folder, in plain text. Raises ``ConfigError`` if it cannot listen."""
        super().__init__("server.grpc", at, state, settings, guard, one_of_many=one_of_many)
        services: dict[str, Handlers] = {}
        if settings.role != "lookup":
            inference = GrpcInferenceService(state, settings, guard)
            services[SERVICE] = self._open_inference(inference, InferenceService(state, guard))
        if settings.role != "frontend":
            lookups = LookupService(state, settings, guard)
            services[LOOKUP] = lookup_handlers(lookups, guard)
        self._listen(services, also_at)

    def _open_inference(
        self, inference: GrpcInferenceService, service: InferenceService
    ) -> Handlers:
        generated = HandlerCollector()
        add_GRPCInferenceServiceServicer_to_server(service, generated)
        streams = ThreadPoolExecutor(_STREAMS, "grpc-stream")
        self._pools.append(streams)
        # These take and return bytes: see request.py and response.py.
        return {
            **generated.by_name,
            "ModelInfer": grpc.unary_unary_rpc_method_handler(UnaryHandler(inference.begin)),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
                BidiStreamHandler(inference.stream, streams)
            ),
        }
