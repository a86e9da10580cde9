"""``hps.v1.Admin``: server status and model control.

Responses are protobuf's JSON form of the dictionaries that the REST admin port returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict

from hps.config.auth import Role
from hps.v1 import admin_pb2 as pb
from services.frontend.grpc.responders import CallContext
from services.frontend.model_control import (
    label,
    load,
    rollback,
    set_traffic,
    switch,
    traffic,
    unload,
)
from services.frontend.state import FrontendState


class AdminService:
    """The methods of the service, by their names in the ``.proto``."""

    roles: Mapping[str, Role] = dict.fromkeys(
        (
            "Status",
            "Models",
            "LoadModel",
            "UnloadModel",
            "LabelModel",
            "SwitchModel",
            "RollbackModel",
            "SetTraffic",
            "Traffic",
        ),
        "admin",
    )

    def __init__(self, state: FrontendState) -> None:
        self._state = state

    def Status(self, request: Any, context: CallContext) -> Any:
        return ParseDict({"status": self._state.status()}, pb.StatusResponse())

    def Models(self, request: Any, context: CallContext) -> Any:
        models = self._state.require_node().status()["models"]
        return ParseDict({"models": models}, pb.ModelsResponse(), ignore_unknown_fields=True)

    def LoadModel(self, request: Any, context: CallContext) -> Any:
        version, warning = load(
            self._state,
            request.model,
            request.version or None,
            labels=list(request.labels),
            beside=request.beside,
        )
        return pb.LoadModelResponse(version=version, warning=warning)

    def UnloadModel(self, request: Any, context: CallContext) -> Any:
        unload(self._state, request.model, request.version)
        return pb.UnloadModelResponse()

    def LabelModel(self, request: Any, context: CallContext) -> Any:
        label(self._state, request.model, request.label, request.version)
        return pb.LabelModelResponse()

    def SwitchModel(self, request: Any, context: CallContext) -> Any:
        version = switch(self._state, request.model, request.version)
        return pb.SwitchModelResponse(version=version)

    def RollbackModel(self, request: Any, context: CallContext) -> Any:
        return pb.RollbackModelResponse(version=rollback(self._state, request.model))

    def SetTraffic(self, request: Any, context: CallContext) -> Any:
        rule = MessageToDict(request.rule)
        return ParseDict(set_traffic(self._state, request.model, rule), pb.TrafficResponse())

    def Traffic(self, request: Any, context: CallContext) -> Any:
        return ParseDict(traffic(self._state, request.model), pb.TrafficResponse())
