"""ASGI applications of the data port and of the admin port, which has all routes of the data port."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from fastapi import FastAPI

from hps import __version__
from hps.config.server_settings import ServerSettings
from services.frontend.auth import Authorizer
from services.frontend.http.admin import hot_keys_route, metrics_route, status_routes
from services.frontend.http.api import install_errors
from services.frontend.http.asgi import App, Receive, Scope, Send
from services.frontend.http.checkpoints import checkpoint_route
from services.frontend.http.docs import add_docs
from services.frontend.http.head import request_id
from services.frontend.http.inference_app import InferApp
from services.frontend.http.key_traces import key_trace_routes
from services.frontend.http.logging import logging_routes
from services.frontend.http.oip_routes import health_routes, model_routes, repository_routes
from services.frontend.http.openapi import document
from services.frontend.http.profile import profile_route
from services.frontend.http.rows import row_writes, rows_routes
from services.frontend.http.shared_memory import shared_memory_routes
from services.frontend.http.updates import updates_routes
from services.frontend.http.version_files import version_files_route
from services.frontend.profiling import MakeWire
from services.frontend.state import FrontendState

_ABOUT = "Embedding lookup and ranking by the Open Inference Protocol."
_ERRORS = ' Every error is `{"error": "<cause and remedy>"}`.'


def data_app(state: FrontendState, settings: ServerSettings, guard: Authorizer) -> InferApp:
    """Create the data port's application: inference and model information."""
    api = _api("hps", state, settings, guard, control=state.control_on_data_port)
    return InferApp(state, settings, guard, ErrorBoundary(api))


def admin_app(
    state: FrontendState,
    settings: ServerSettings,
    guard: Authorizer,
    profiled: Mapping[str, MakeWire] | None = None,
) -> InferApp:
    """Create the admin port's application: the data port's routes, metrics, and ``/v1``.

    A front end has no rows or streams, so it has no routes for them. ``profiled``: further protocols whose
    requests can be profiled.
    """
    api = _api("hps admin", state, settings, guard, control=True)
    api.include_router(metrics_route(state))
    api.include_router(status_routes(state, guard))
    api.include_router(rows_routes(state, guard, settings.request_timeout_ms / 1e3))
    api.include_router(profile_route(state, settings, guard, profiled or {}))
    if settings.role != "frontend":
        api.include_router(hot_keys_route(state, guard))
        api.include_router(row_writes(state, guard))
        api.include_router(updates_routes(state, guard))
        api.include_router(checkpoint_route(state, guard))
        api.include_router(version_files_route(state, guard))
        api.include_router(key_trace_routes(state, guard))
    return InferApp(state, settings, guard, ErrorBoundary(api))


def _api(
    title: str, state: FrontendState, settings: ServerSettings, guard: Authorizer, *, control: bool
) -> FastAPI:
    api = bare_api(title, _ABOUT, settings, guard)
    api.include_router(health_routes(state))
    api.include_router(model_routes(state, guard, control=control))
    api.include_router(shared_memory_routes(state, guard))
    api.include_router(repository_routes(state, guard, control=control))
    api.include_router(logging_routes(state, guard))
    return api


def bare_api(
    title: str, about: str, settings: ServerSettings, guard: Authorizer, *, infers: bool = True
) -> FastAPI:
    """Create an application without routes, with error responses and documentation.

    ``infers``: the documentation has the inference routes.
    """
    api = FastAPI(
        title=title,
        version=__version__,
        description=about + _ERRORS,
        docs_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install_errors(api)
    if settings.docs:
        add_docs(api)

    @cache
    def openapi() -> dict[str, Any]:
        return document(api, guard, infers=infers)

    api.openapi = openapi  # type: ignore[method-assign]
    return api


class ErrorBoundary:
    """Wraps ``app``: repeats the request ID in responses, and drops errors that were already answered.

    Starlette answers and logs an unexpected error (``install_errors``), then raises it again for the server
    to log a second time.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent_id = request_id(dict(scope.get("headers", ())))

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", sent_id.encode())]
            await send(message)

        with contextlib.suppress(Exception):
            await self._app(scope, receive, send_with_id if sent_id else send)
