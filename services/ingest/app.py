"""The ASGI application of the ingest process: health, metrics, status and the streams. No lookups."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from hps import __version__
from hps.config.server_settings import ServerSettings
from hps.node.ingest import IngestNode
from services.frontend.auth import Authorizer
from services.frontend.http.admin import metrics_route, status_routes
from services.frontend.http.api import JsonAnswer, answers, needs, parameters_of, takes
from services.frontend.http.app import ErrorBoundary, bare_api
from services.frontend.http.application import PlainAsgi
from services.frontend.http.logging import logging_routes
from services.frontend.http.oip_routes import health_routes
from services.frontend.http.updates import updates_routes
from services.frontend.metadata import SERVER_NAME
from services.frontend.model_control import version_number
from services.server_state import ServerState

_ABOUT = "Writes update streams into the stores that all nodes share."


def ingest_app(
    state: ServerState[IngestNode], settings: ServerSettings, guard: Authorizer
) -> PlainAsgi:
    api = bare_api("hps ingest", _ABOUT, settings, guard, infers=False)
    api.include_router(health_routes(state))
    api.include_router(about_route(guard))
    api.include_router(metrics_route(state))
    api.include_router(status_routes(state, guard))
    api.include_router(updates_routes(state, guard))
    api.include_router(version_routes(state, guard))
    api.include_router(logging_routes(state, guard))
    return PlainAsgi(ErrorBoundary(api))


def about_route(guard: Authorizer) -> APIRouter:
    """Return the route of the server's name and version, which `hps doctor` reads."""
    router = APIRouter(tags=["models"], dependencies=needs(guard, "read"))

    @router.get("/v2", responses=answers("ServerMetadata"))
    async def metadata() -> Response:
        """The server's name and version; of the protocol's extensions it has one."""
        return JsonAnswer({"name": SERVER_NAME, "version": __version__, "extensions": ["logging"]})

    return router


def version_routes(state: ServerState[IngestNode], guard: Authorizer) -> APIRouter:
    """Return the routes that load and unload versions, as those of a node."""
    router = APIRouter(tags=["models"], dependencies=needs(guard, "admin"))
    path, errors = "/v2/repository/models/{model}", [400, 404, 503]

    @router.post(
        f"{path}/load", responses=answers("ModelLoaded", errors), openapi_extra=takes("ModelLoad")
    )
    async def load_version(request: Request, model: str) -> Response:
        """Feed a version of a model beside those that are fed: the parameter ``version``, else the one in
        the settings, else the highest. The response is sent once Redis has its rows, before the stream
        has been read from where its files end."""
        version = version_number((await parameters_of(request)).get("version"))
        versions = state.require_node().versions
        number = await run_in_threadpool(versions.load, model, version)
        return JsonAnswer({"name": model, "version": str(number)})

    @router.post(
        f"{path}/unload",
        responses=answers("ModelUnloaded", errors),
        openapi_extra=takes("ModelUnload"),
    )
    async def unload_version(request: Request, model: str) -> Response:
        """Feed a version, without the parameter ``version`` a model, no longer. Rows stay in Redis."""
        version = version_number((await parameters_of(request)).get("version"))
        await run_in_threadpool(state.require_node().versions.unload, model, version)
        return JsonAnswer({"name": model})

    return router
