"""How requests over gRPC are read and their answers written, for `services.frontend.profiling`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hps.config.server_settings import ServerSettings
from services.frontend.endpoints import Output
from services.frontend.grpc.request import Parser, address
from services.frontend.grpc.response import Encoder
from services.frontend.inference_request import Call
from services.frontend.profiling import MakeWire
from services.frontend.shared_memory import Regions
from services.frontend.state import Entry, State


class GrpcWire:
    """A `Wire`."""

    def __init__(self, entry: Entry, max_keys: int, regions: Regions) -> None:
        self._parser = Parser(entry.name, entry.endpoint.rules, max_keys)
        self._encoder = Encoder(entry.name, entry.version, regions)

    def read(self, body: bytes, _size: int | None) -> Call:
        return self._parser.parse(body, address(body))

    def write(self, call: Any, result: Any, outputs: Sequence[Output]) -> object:
        return self._encoder.encode(
            call, result.defaulted, result.degraded, result.stale_s, outputs
        )


def grpc_wire(state: State, settings: ServerSettings) -> MakeWire:
    return lambda entry: GrpcWire(entry, settings.max_keys, state.regions)
