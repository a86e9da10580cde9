"""The Open Inference Protocol beside inference: health, metadata, configuration, statistics."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from hps import __version__
from hps.errors import BadRequest, Unavailable, Unsupported
from services.frontend.auth import Authorizer
from services.frontend.http.api import JsonAnswer, answers, failure, json_body, needs, takes
from services.frontend.metadata import server_metadata
from services.frontend.model_control import index as listed
from services.frontend.model_control import load, unload
from services.frontend.path_redaction import without_paths
from services.frontend.state import FrontendState
from services.server_state import ServerState


def health_routes(state: ServerState[Any]) -> APIRouter:
    """Alive, ready: for probes, without a key."""
    router = APIRouter(tags=["health"])

    @router.get("/v2/health/live", responses=answers("Live"))
    async def server_live() -> Response:
        """Whether the process can answer; depends on nothing else."""
        return JsonAnswer({"live": True})

    @router.get("/v2/health/ready", responses=answers("Ready", [503]))
    async def server_ready() -> Response:
        """Whether every model is loaded and the server is not shutting down."""
        if state.ready:
            return JsonAnswer({"ready": True})
        return failure(503, without_paths(state.reason))

    return router


def model_routes(state: FrontendState, guard: Authorizer, *, control: bool) -> APIRouter:
    """What is told of the server and its models; ``control``: they can be loaded here."""
    router = APIRouter(tags=["models"], dependencies=needs(guard, "read"))
    prefixes = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")

    @router.get("/v2", responses=answers("ServerMetadata"))
    @router.get("/v2/", include_in_schema=False)
    async def metadata() -> Response:
        """The server's name, version and the protocol extensions it has."""
        on = state.regions.on
        return JsonAnswer(server_metadata(__version__, control=control, shared_memory=on))

    @router.get("/v2/models", responses=answers("ModelNames", [503]))
    async def models() -> Response:
        """The names that can be asked."""
        state.require_node()
        return JsonAnswer({"models": list(state.entries)})

    @router.get("/v2/models/stats", responses=answers("Statistics", [503]))
    def all_statistics() -> Response:
        """Counts and times of every model."""
        state.require_node()
        return JsonAnswer({"model_stats": state.statistics(state.entries.values())})

    async def model_metadata(model: str, version: str | None = None) -> Response:
        """A model's inputs and outputs."""
        return JsonAnswer(state.entry(model, version).info.metadata())

    async def model_config(model: str, version: str | None = None) -> Response:
        """A model's configuration in Triton's form."""
        return JsonAnswer(state.entry(model, version).info.config())

    # Not `async`, as above: other processes may be asked for theirs.
    def model_statistics(model: str, version: str | None = None) -> Response:
        """Counts and times of a model since the server started."""
        return JsonAnswer({"model_stats": state.statistics([state.entry(model, version)])})

    async def model_ready(model: str, version: str | None = None) -> Response:
        """Whether a model can be asked."""
        entry = state.entry(model, version)
        if not state.ready:
            raise Unavailable(state.reason)
        return JsonAnswer({"name": entry.name, "ready": True})

    for path, endpoint, schema in (
        ("", model_metadata, "ModelMetadata"),
        ("/config", model_config, "ModelConfig"),
        ("/stats", model_statistics, "Statistics"),
        ("/ready", model_ready, "ModelReady"),
    ):
        for prefix in prefixes:
            told = answers(schema, [404, 503])
            router.add_api_route(prefix + path, endpoint, methods=["GET"], responses=told)
    for prefix in prefixes:  # described by hand; here only so that GET is answered with 405
        router.add_api_route(
            f"{prefix}/infer", _unreached, methods=["POST"], include_in_schema=False
        )
    return router


def repository_routes(state: FrontendState, guard: Authorizer, *, control: bool) -> APIRouter:
    """The repository's index; with ``control`` also `load` and `unload`, which need role admin."""
    router = APIRouter(tags=["repository"], dependencies=needs(guard, "read"))

    @router.post("/v2/repository/index", responses=answers("RepositoryIndex", [400]))
    async def index(request: Request) -> Response:
        """Every served name, and models of the repository that are not served, with their states.
        ``{"ready": true}`` leaves out those not ready."""
        only_ready = (await json_body(request)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise BadRequest("'ready' must be true or false")
        return JsonAnswer(await run_in_threadpool(partial(listed, state, only_ready=only_ready)))

    async def unsupported(request: Request) -> Response:
        hint = ""
        if request.url.path.endswith(("/load", "/unload")):
            hint = " here; ask the admin port, or set models.control: all"
        raise Unsupported(f"{request.method} {request.url.path} is not offered{hint}")

    async def elsewhere(request: Request, model: str) -> Response:
        """Not offered on this port: models are loaded and unloaded on the admin port."""
        return await unsupported(request)

    if control:
        router.include_router(_control_routes(state, guard))
    else:
        for verb in ("load", "unload"):
            router.add_api_route(
                f"/v2/repository/models/{{model}}/{verb}",
                elsewhere,
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
        that the settings state, else the highest. The version is made ready beside the one that is served;
        answers when it is served in its place."""
        given = _parameters(await json_body(request))
        version, warning = await run_in_threadpool(load, state, model, given.get("version"))
        said = {"warning": warning} if warning else {}
        return JsonAnswer({"name": model, "version": str(version), **said})

    @router.post(
        "/v2/repository/models/{model}/unload",
        responses=answers("ModelUnloaded", errors),
        openapi_extra=takes("ModelUnload"),
    )
    async def unload_model(request: Request, model: str) -> Response:
        """Serve a model no more. Requests under way are answered; its rows stay in the stores."""
        _parameters(await json_body(request))
        await run_in_threadpool(unload, state, model)
        return JsonAnswer({"name": model})

    return router


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    given = body.get("parameters", {})
    if not isinstance(given, dict):
        raise BadRequest("'parameters' must be an object")
    return given


# Parts of Triton's protocol that are told apart from paths nobody knows.
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
    raise AssertionError("inference requests never come here")
