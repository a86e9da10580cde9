"""Parsing and encoding of gRPC requests, for `services.frontend.profiling`."""

from __future__ import annotations

from hps.config.server_settings import ServerSettings
from services.frontend.grpc.request import GrpcRequestParser, address
from services.frontend.grpc.response import GrpcResponseEncoder
from services.frontend.profiling import MakeWire, ProfiledProtocol
from services.frontend.state import ServedEndpoint


def grpc_wire(settings: ServerSettings) -> MakeWire:
    def make(entry: ServedEndpoint) -> ProfiledProtocol:
        parser = GrpcRequestParser(entry.name, entry.endpoint.rules, settings.max_keys)
        encoder = GrpcResponseEncoder(entry.name, entry.version)
        return ProfiledProtocol(lambda body, _size: parser.parse(body, address(body)), encoder)

    return make
