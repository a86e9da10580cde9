"""The Open Inference Protocol beside inference: health, metadata, configuration, statistics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hps import __version__
from hps.errors import BadRequest, Unavailable, Unsupported
from services.frontend.auth import Guard
from services.frontend.http.api import Json, answers, failure, json_body, needs
from services.frontend.metadata import server_metadata
from services.frontend.state import State
from services.server_state import ServerState


def health_routes(state: ServerState[Any]) -> APIRouter:
    """Alive, ready: for probes, without a key."""
    router = APIRouter(tags=["health"])

    @router.get("/v2/health/live", responses=answers("Live"))
    async def server_live() -> Response:
        """Whether the process can answer; depends on nothing else."""
        return Json({"live": True})

    @router.get("/v2/health/ready", responses=answers("Ready", [503]))
    async def server_ready() -> Response:
        """Whether every model is loaded and the server is not shutting down."""
        if state.ready:
            return Json({"ready": True})
        return failure(503, state.reason)

    return router


def model_routes(state: State, guard: Guard) -> APIRouter:
    """What is told of the server and its models."""
    router = APIRouter(tags=["models"], dependencies=needs(guard, "read"))
    prefixes = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")

    @router.get("/v2", responses=answers("ServerMetadata"))
    @router.get("/v2/", include_in_schema=False)
    async def metadata() -> Response:
        """The server's name, version and the protocol extensions it has."""
        return Json(server_metadata(__version__))

    @router.get("/v2/models", responses=answers("ModelNames", [503]))
    async def models() -> Response:
        """The names that can be asked."""
        state.require_node()
        return Json({"models": list(state.entries)})

    @router.get("/v2/models/stats", responses=answers("Statistics", [503]))
    def all_statistics() -> Response:
        """Counts and times of every model."""
        state.require_node()
        return Json({"model_stats": state.statistics(state.entries.values())})

    async def model_metadata(model: str, version: str | None = None) -> Response:
        """A model's inputs and outputs."""
        return Json(state.entry(model, version).info.metadata())

    async def model_config(model: str, version: str | None = None) -> Response:
        """A model's configuration in Triton's form."""
        return Json(state.entry(model, version).info.config())

    # Not `async`, as above: other processes may be asked for theirs.
    def model_statistics(model: str, version: str | None = None) -> Response:
        """Counts and times of a model since the server started."""
        return Json({"model_stats": state.statistics([state.entry(model, version)])})

    async def model_ready(model: str, version: str | None = None) -> Response:
        """Whether a model can be asked."""
        entry = state.entry(model, version)
        if not state.ready:
            raise Unavailable(state.reason)
        return Json({"name": entry.name, "ready": True})

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


def repository_routes(state: State, guard: Guard) -> APIRouter:
    """The repository's index. Models are loaded at start: load and unload are answered with 501."""
    router = APIRouter(tags=["repository"], dependencies=needs(guard, "read"))

    @router.post("/v2/repository/index", responses=answers("RepositoryIndex", [400]))
    async def index(request: Request) -> Response:
        """Every served name with its state. ``{"ready": true}`` leaves out those not ready."""
        only_ready = (await json_body(request)).get("ready", False)
        if not isinstance(only_ready, bool):
            raise BadRequest("'ready' must be true or false")
        status = "READY" if state.ready else "UNAVAILABLE"
        if only_ready and not state.ready:
            return Json([])
        return Json(
            [
                {"name": entry.name, "version": entry.version, "state": status, "reason": ""}
                for entry in state.entries.values()
            ]
        )

    async def unsupported(request: Request) -> Response:
        hint = ""
        if "/repository/" in request.url.path:
            hint = "; models are served as the repository holds them when the server starts"
        raise Unsupported(f"{request.method} {request.url.path} is not offered{hint}")

    async def change(request: Request, model: str) -> Response:
        """Not offered: models are served as the repository holds them when the server starts."""
        return await unsupported(request)

    for verb in ("load", "unload"):
        router.add_api_route(
            f"/v2/repository/models/{{model}}/{verb}",
            change,
            methods=["POST"],
            status_code=501,
            responses={501: answers("Error", [501])[501]},
        )
    for path in _UNSUPPORTED:
        router.add_api_route(path, unsupported, methods=["GET", "POST"], include_in_schema=False)
    return router


# Parts of Triton's protocol that are told apart from paths nobody knows.
_UNSUPPORTED = (
    "/v2/repository/{repository}/index",
    "/v2/repository/{repository}/models/{model}/{verb}",
    "/v2/systemsharedmemory/{rest:path}",
    "/v2/cudasharedmemory/{rest:path}",
    "/v2/trace/setting",
    "/v2/models/{model}/trace/setting",
    "/v2/models/{model}/generate",
    "/v2/models/{model}/generate_stream",
)


async def _unreached() -> Response:
    raise AssertionError("inference requests never come here")
