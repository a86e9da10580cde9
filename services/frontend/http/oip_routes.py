"""Open Inference Protocol except inference: health, metadata, configuration, statistics, repository."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from hps import __version__
from hps.errors import BadRequest, Unavailable, Unsupported
from services.frontend.auth import Authorizer
from services.frontend.http.api import (
    JsonAnswer,
    answers,
    failure,
    json_body,
    needs,
    parameters_of,
    takes,
)
from services.frontend.metadata import server_metadata
from services.frontend.model_control import index as listed
from services.frontend.model_control import (
    label,
    load,
    rollback,
    set_traffic,
    switch,
    traffic,
    unload,
)
from services.frontend.path_redaction import without_paths
from services.frontend.state import FrontendState
from services.server_state import ServerState

# Changes of the served versions.
_CONTROL = ("load", "unload", "label", "switch", "rollback", "traffic")


def health_routes(state: ServerState[Any]) -> APIRouter:
    """Liveness and readiness, for probes, without an API key."""
    router = APIRouter(tags=["health"])

    @router.get("/v2/health/live", responses=answers("Live"))
    async def server_live() -> Response:
        """Liveness: the process responds; depends on nothing else."""
        return JsonAnswer({"live": True})

    @router.get("/v2/health/ready", responses=answers("Ready", [503]))
    async def server_ready() -> Response:
        """Readiness: every model is loaded and the server is not shutting down."""
        if state.ready:
            return JsonAnswer({"ready": True})
        return failure(503, without_paths(state.reason))

    return router


def model_routes(state: FrontendState, guard: Authorizer, *, control: bool) -> APIRouter:
    """Information about the server and its models; ``control``: the port can load models."""
    router = APIRouter(tags=["models"], dependencies=needs(guard, "read"))
    handlers = _ModelHandlers(state, control)
    get = partial(router.add_api_route, methods=["GET"])
    get("/v2", handlers.metadata, responses=answers("ServerMetadata"))
    get("/v2/", handlers.metadata, include_in_schema=False)
    get("/v2/models", handlers.models, responses=answers("ModelNames", [503]))
    get("/v2/models/stats", handlers.all_statistics, responses=answers("Statistics", [503]))
    prefixes = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
    for path, endpoint, schema in (
        ("", handlers.model_metadata, "ModelMetadata"),
        ("/config", handlers.model_config, "ModelConfig"),
        ("/stats", handlers.model_statistics, "Statistics"),
        ("/ready", handlers.model_ready, "ModelReady"),
    ):
        for prefix in prefixes:
            get(prefix + path, endpoint, responses=answers(schema, [404, 503]))
    for prefix in prefixes:  # documented by hand; registered so that GET answers 405
        router.add_api_route(
            f"{prefix}/infer", _unreached, methods=["POST"], include_in_schema=False
        )
    return router


class _ModelHandlers:
    """Handlers of `model_routes`. Those that ask other processes for their part are not ``async``."""

    def __init__(self, state: FrontendState, control: bool) -> None:
        self._state = state
        self._control = control

    async def metadata(self) -> Response:
        """The server's name, version and protocol extensions."""
        shared_memory = self._state.regions.on
        return JsonAnswer(
            server_metadata(__version__, control=self._control, shared_memory=shared_memory)
        )

    async def models(self) -> Response:
        """The served names."""
        self._state.require_node()
        return JsonAnswer({"models": list(self._state.entries)})

    def all_statistics(self) -> Response:
        """Counts and times of every model."""
        return JsonAnswer({"model_stats": self._state.statistics(self._state.selected(""))})

    async def model_metadata(self, model: str, version: str | None = None) -> Response:
        """A model's inputs and outputs."""
        return JsonAnswer(self._state.metadata(model, version))

    async def model_config(self, model: str, version: str | None = None) -> Response:
        """A model's configuration in Triton's form."""
        return JsonAnswer(self._state.config(model, version))

    def model_statistics(self, model: str, version: str | None = None) -> Response:
        """Counts and times of a model since the server started."""
        entries = self._state.selected(model, version)
        return JsonAnswer({"model_stats": self._state.statistics(entries)})

    async def model_ready(self, model: str, version: str | None = None) -> Response:
        """Readiness of one model."""
        entry = self._state.entry(model, version)
        if not self._state.ready:
            raise Unavailable(self._state.reason)
        return JsonAnswer({"name": entry.name, "ready": True})


def repository_routes(state: FrontendState, guard: Authorizer, *, control: bool) -> APIRouter:
    """The repository's index; with ``control`` also `load` and `unload`, which need role admin."""
    router = APIRouter(tags=["repository"], dependencies=needs(guard, "read"))

    @router.post("/v2/repository/index", responses=answers("RepositoryIndex", [400]))
    async def index(request: Request) -> Response:
        """Every served version, and versions of the repository that are not served, with their states.
        ``{"ready": true}`` lists only those that are ready."""
        only_ready = (await json_body(request)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise BadRequest("'ready' must be true or false")
        return JsonAnswer(await run_in_threadpool(partial(listed, state, only_ready=only_ready)))

    async def unsupported(request: Request) -> Response:
        hint = ""
        if request.url.path.endswith(tuple(f"/{verb}" for verb in _CONTROL)):
            hint = " here; use the admin port, or set models.control: all"
        raise Unsupported(f"{request.method} {request.url.path} is not offered{hint}")

    async def control_unsupported(request: Request, model: str) -> Response:
        """Not offered on this port: the admin port loads and unloads models."""
        return await unsupported(request)

    if control:
        router.include_router(_control_routes(state, guard))
    else:
        for verb in _CONTROL:
            router.add_api_route(
                f"/v2/repository/models/{{model}}/{verb}",
                control_unsupported,
                methods=["POST"],
                status_code=501,
                responses={501: answers("Error", [501])[501]},
            )
    for path in _UNSUPPORTED:
        router.add_api_route(path, unsupported, methods=["GET", "POST"], include_in_schema=False)
    return router


def _control_routes(state: FrontendState, guard: Authorizer) -> APIRouter:
    router = APIRouter(dependencies=needs(guard, "admin"))
    errors = [400, 404, 409, 501, 503]

    @router.post(
        "/v2/repository/models/{model}/load",
        responses=answers("ModelLoaded", errors),
        openapi_extra=takes("ModelLoad"),
    )
    async def load_model(request: Request, model: str) -> Response:
        """Serve a model of the repository, or another version of it: the parameter ``version``, else the one
        in the settings, else the highest. The current version answers until the new one is ready; the
        response is sent once it has replaced the current one. With ``beside``, the new one is served by its
        number and ``labels``, and the current version stays."""
        parameters = await parameters_of(request)
        version, warning = await run_in_threadpool(
            partial(
                load,
                state,
                model,
                parameters.get("version"),
                labels=parameters.get("labels", ()),
                beside=parameters.get("beside", False),
            )
        )
        optional = {"warning": warning} if warning else {}
        return JsonAnswer({"name": model, "version": str(version), **optional})

    @router.post(
        "/v2/repository/models/{model}/unload",
        responses=answers("ModelUnloaded", errors),
        openapi_extra=takes("ModelUnload"),
    )
    async def unload_model(request: Request, model: str) -> Response:
        """Stop serving a model, or the version of the parameter ``version``. Requests in flight are answered;
        rows stay in the stores."""
        parameters = await parameters_of(request)
        await run_in_threadpool(unload, state, model, parameters.get("version"))
        return JsonAnswer({"name": model})

    _add_switch_routes(router, state, errors)
    return router


def _add_switch_routes(router: APIRouter, state: FrontendState, errors: list[int]) -> None:
    """Add our own routes: labels, and changes of the current version to another served one."""

    @router.post(
        "/v2/repository/models/{model}/label",
        responses=answers("ModelUnloaded", errors),
        openapi_extra=takes("ModelLabel"),
    )
    async def label_model(request: Request, model: str) -> Response:
        """Give the served ``version`` a ``label``, by which requests may name it; without a version, remove
        the label."""
        parameters = await parameters_of(request)
        await run_in_threadpool(
            label, state, model, parameters.get("label"), parameters.get("version")
        )
        return JsonAnswer({"name": model})

    @router.post(
        "/v2/repository/models/{model}/switch",
        responses=answers("ModelLoaded", errors),
        openapi_extra=takes("ModelSwitch"),
    )
    async def switch_model(request: Request, model: str) -> Response:
        """Make a served version the current one, which answers requests without a version: ``version``, a
        number, a label, or ``latest``."""
        parameters = await parameters_of(request)
        version = await run_in_threadpool(switch, state, model, parameters.get("version"))
        return JsonAnswer({"name": model, "version": str(version)})

    @router.post(
        "/v2/repository/models/{model}/rollback",
        responses=answers("ModelLoaded", errors),
        openapi_extra=takes("ModelRollback"),
    )
    async def rollback_model(request: Request, model: str) -> Response:
        """Make the previous version the current one again."""
        await parameters_of(request)
        version = await run_in_threadpool(rollback, state, model)
        return JsonAnswer({"name": model, "version": str(version)})

    path = "/v2/repository/models/{model}/traffic"

    @router.post(path, responses=answers("Traffic", errors), openapi_extra=takes("TrafficChange"))
    async def change_traffic(request: Request, model: str) -> Response:
        """Set which versions answer requests without a version, and the bounds for an automatic rollback:
        ``parameters`` is the rule; an empty one removes it."""
        rule = await parameters_of(request)
        return JsonAnswer(await run_in_threadpool(set_traffic, state, model, rule))

    @router.get(path, responses=answers("Traffic", errors))
    async def read_traffic(model: str) -> Response:
        """The traffic rule of a model, and its versions' shares of the requests without a version."""
        return JsonAnswer(traffic(state, model))


# Parts of Triton's protocol that answer 501, unlike unknown paths.
_UNSUPPORTED = (
    "/v2/repository/{repository}/index",
    "/v2/repository/{repository}/models/{model}/{verb}",
    "/v2/cudasharedmemory/{rest:path}",
    "/v2/trace/setting",
    "/v2/models/{model}/trace/setting",
    "/v2/models/{model}/generate",
    "/v2/models/{model}/generate_stream",
)


async def _unreached() -> Response:
    raise AssertionError("inference requests do not reach this route")
