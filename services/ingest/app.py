"""The ASGI application of the ingest process: health, metrics, status and the streams. No lookups."""

from __future__ import annotations

from hps.config.server_settings import ServerSettings
from hps.ingest import Ingest
from services.frontend.auth import Guard
from services.frontend.http.admin import metrics_route, status_routes
from services.frontend.http.app import Contained, bare_api
from services.frontend.http.asgi import Plain
from services.frontend.http.logging import logging_routes
from services.frontend.http.protocol import health_routes
from services.frontend.http.updates import updates_routes
from services.server_state import ServerState

_ABOUT = "Feeds the stores that all nodes share from the update streams."


def ingest_app(state: ServerState[Ingest], settings: ServerSettings, guard: Guard) -> Plain:
    api = bare_api("hps ingest", _ABOUT, settings, guard, infers=False)
    api.include_router(health_routes(state))
    api.include_router(metrics_route(state))
    api.include_router(status_routes(state, guard))
    api.include_router(updates_routes(state, guard))
    api.include_router(logging_routes(state, guard))
    return Plain(Contained(api))
