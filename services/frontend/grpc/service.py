"""``inference.GRPCInferenceService``: the Open Inference Protocol with Triton's extensions, over gRPC.

Model descriptions are protobuf's JSON form of the dictionaries that REST returns.
"""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer

from hps import __version__
from hps.config.auth import Role
from hps.errors import Unsupported
from services.frontend.auth import Authorizer
from services.frontend.grpc.call_identity import address_of, check
from services.frontend.grpc.method_handlers import Behavior
from services.frontend.grpc.responders import CallContext
from services.frontend.log_settings import change_log_settings
from services.frontend.log_settings import log_settings as current_log_settings
from services.frontend.metadata import server_metadata
from services.frontend.model_control import index, load, unload
from services.frontend.state import FrontendState

SERVICE = "inference.GRPCInferenceService"


def require_role(guard: Authorizer, role: Role | None, behavior: Behavior) -> Behavior:
    """Restrict ``behavior`` to callers with ``role`` (None: all).

    The result raises ``Unauthenticated`` or ``Forbidden``.
    """

    @wraps(behavior)
    def answer(request: Any, context: CallContext) -> Any:
        if role is not None:
            check(guard, context, role)
        return behavior(request, context)

    answer.role = role  # type: ignore[attr-defined]  # checked before the message is received, too
    return answer


class InferenceService(GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated without types
    """All methods but inference. Unsupported ones answer UNIMPLEMENTED."""

    def __init__(self, state: FrontendState, guard: Authorizer) -> None:
        self._state = state
        for name in ("ServerLive", "ServerReady", "ModelReady"):
            setattr(self, name, require_role(guard, None, getattr(self, name)))
        for name in (
            "ServerMetadata",
            "ModelMetadata",
            "ModelConfig",
            "ModelStatistics",
            "RepositoryIndex",
            "SystemSharedMemoryRegister",
            "SystemSharedMemoryUnregister",
            "SystemSharedMemoryStatus",
            "CudaSharedMemoryUnregister",
        ):
            setattr(self, name, require_role(guard, "read", getattr(self, name)))
        for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
            setattr(self, name, require_role(guard, "admin", getattr(self, name)))
        self.LogSettings = require_role(guard, "read", partial(self._log_settings, guard))
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            if method.name not in self.__dict__ and method.name not in type(self).__dict__:
                setattr(self, method.name, require_role(guard, "read", _not_offered(method.name)))

    def ServerLive(self, request: Any, context: CallContext) -> Any:
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: CallContext) -> Any:
        return pb.ServerReadyResponse(ready=self._state.ready)

    def ModelReady(self, request: Any, context: CallContext) -> Any:
        known = request.version in self._state.addresses.get(request.name, ())
        return pb.ModelReadyResponse(ready=known and self._state.ready)

    def ServerMetadata(self, request: Any, context: CallContext) -> Any:
        state = self._state
        metadata = server_metadata(
            __version__, control=state.control_on_data_port, shared_memory=state.regions.on
        )
        return ParseDict(metadata, pb.ServerMetadataResponse())

    def ModelMetadata(self, request: Any, context: CallContext) -> Any:
        metadata = self._state.metadata(request.name, request.version)
        return ParseDict(metadata, pb.ModelMetadataResponse(), ignore_unknown_fields=True)

    def ModelConfig(self, request: Any, context: CallContext) -> Any:
        config = self._state.config(request.name, request.version)
        return ParseDict({"config": config}, pb.ModelConfigResponse())

    def ModelStatistics(self, request: Any, context: CallContext) -> Any:
        entries = self._state.selected(request.name, request.version)
        statistics = self._state.statistics(entries)
        return ParseDict({"model_stats": statistics}, pb.ModelStatisticsResponse())

    def RepositoryIndex(self, request: Any, context: CallContext) -> Any:
        if request.repository_name:
            raise Unsupported("there is one repository; omit 'repository_name'")
        models = index(self._state, only_ready=request.ready)
        response = pb.RepositoryIndexResponse()
        return ParseDict({"models": models}, response, ignore_unknown_fields=True)

    def RepositoryModelLoad(self, request: Any, context: CallContext) -> Any:
        self._require_control(request, "RepositoryModelLoad")
        given = _parameters(request)
        load(
            self._state,
            request.model_name,
            given.get("version"),
            labels=given.get("labels", ""),
            beside=given.get("beside", False),
        )
        return pb.RepositoryModelLoadResponse()

    def RepositoryModelUnload(self, request: Any, context: CallContext) -> Any:
        self._require_control(request, "RepositoryModelUnload")
        unload(self._state, request.model_name, _parameters(request).get("version"))
        return pb.RepositoryModelUnloadResponse()

    def SystemSharedMemoryRegister(self, request: Any, context: CallContext) -> Any:
        self._state.regions.register(
            request.name, request.key, request.offset, request.byte_size, address_of(context)
        )
        return pb.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryUnregister(self, request: Any, context: CallContext) -> Any:
        self._state.regions.unregister(request.name, address_of(context))
        return pb.SystemSharedMemoryUnregisterResponse()

    def SystemSharedMemoryStatus(self, request: Any, context: CallContext) -> Any:
        described = self._state.regions.status(request.name, address_of(context))
        regions = {region["name"]: region for region in described}
        return ParseDict({"regions": regions}, pb.SystemSharedMemoryStatusResponse())

    def CudaSharedMemoryUnregister(self, request: Any, context: CallContext) -> Any:
        """Succeed for all regions, of which there are none: perf_analyzer unregisters those of every kind."""
        if request.name or not self._state.regions.on:
            raise Unsupported("CudaSharedMemoryUnregister is not offered")
        return pb.CudaSharedMemoryUnregisterResponse()

    def _require_control(self, request: Any, call: str) -> None:
        if not self._state.control_on_data_port:
            raise Unsupported(
                f"{call} is not offered here; use the admin port, or set models.control: all"
            )
        if request.repository_name:
            raise Unsupported("there is one repository; omit 'repository_name'")

    def _log_settings(self, guard: Authorizer, request: Any, context: CallContext) -> Any:
        """Change the given log settings; return all of them."""
        changes = {
            name: getattr(value, value.WhichOneof("parameter_choice"))
            for name, value in request.settings.items()
            if value.WhichOneof("parameter_choice") is not None
        }
        if changes:
            check(guard, context, "admin")
        response = pb.LogSettingsResponse()
        for name, value in (
            change_log_settings(changes, self._state) if changes else current_log_settings()
        ).items():
            kind = {bool: "bool_param", int: "uint32_param"}.get(type(value), "string_param")
            setattr(response.settings[name], kind, value)
        return response


def _parameters(request: Any) -> dict[str, Any]:
    """The parameters of a request to load or unload, by name."""
    return {
        name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for name, value in request.parameters.items()
    }


def _not_offered(name: str) -> Behavior:
    def refuse(request: Any, context: CallContext) -> Any:
        raise Unsupported(f"{name} is not offered")

    return refuse
