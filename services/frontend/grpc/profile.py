"""Parsing and encoding of gRPC requests, for `services.frontend.profiling`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hps.config.server_settings import ServerSettings
from services.frontend.endpoints import Output
from services.frontend.grpc.request import GrpcRequestParser, address
from services.frontend.grpc.response import GrpcResponseEncoder
from services.frontend.inference_request import InferenceRequest
from services.frontend.profiling import MakeWire
from services.frontend.shared_memory import SharedMemoryRegistry
from services.frontend.state import FrontendState, ServedEndpoint


class GrpcProfiledProtocol:
    """The gRPC implementation of `profiling.ProfiledProtocol`."""

    def __init__(self, entry: ServedEndpoint, max_keys: int, regions: SharedMemoryRegistry) -> None:
        self._parser = GrpcRequestParser(entry.name, entry.endpoint.rules, max_keys)
        self._encoder = GrpcResponseEncoder(entry.name, entry.version, regions)

    def read(self, body: bytes, _size: int | None) -> InferenceRequest:
        return self._parser.parse(body, address(body))

    def write(self, call: Any, result: Any, outputs: Sequence[Output]) -> object:
        return self._encoder.encode(
            call, result.defaulted, result.degraded, result.stale_s, outputs
        )


def grpc_wire(state: FrontendState, settings: ServerSettings) -> MakeWire:
    return lambda entry: GrpcProfiledProtocol(entry, settings.max_keys, state.regions)
