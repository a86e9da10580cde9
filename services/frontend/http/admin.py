"""Admin port: server status, tables, hot keys and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from services.frontend.auth import Authorizer
from services.frontend.http.api import JsonAnswer, answers, needs
from services.server_state import ServerState

_MOST_HOT_KEYS = 10_000


def metrics_route(state: ServerState[Any]) -> APIRouter:
    """``/metrics``, for scrapers, without an API key."""
    router = APIRouter(tags=["admin"])

    @router.get(
        "/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    )
    def metrics() -> Response:
        """Prometheus metrics."""
        registry = state.metrics
        return Response(registry.render(), media_type=registry.content_type)

    return router


def status_routes(state: ServerState[Any], guard: Authorizer) -> APIRouter:
    """Status, models and tables; needs role admin."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "admin"))

    # Not `async`: row counts may be read from stores, which must run on a thread.
    @router.get("/v1/status", responses=answers("Status"))
    def status() -> Response:
        """The server's phase and what it serves; its progress while it loads."""
        return JsonAnswer(state.status())

    @router.get("/v1/models", responses=answers("Models", [503]))
    def models() -> Response:
        """The served models with their tables."""
        return JsonAnswer({"models": state.require_node().status()["models"]})

    @router.get("/v1/tables", responses=answers("Tables", [503]))
    def tables() -> Response:
        """Every table of every model."""
        all_tables = [
            {"model": model["name"], "version": model["version"], **table}
            for model in state.require_node().status()["models"]
            for table in model["tables"]
        ]
        return JsonAnswer({"tables": all_tables})

    return router


def hot_keys_route(state: ServerState[Any], guard: Authorizer) -> APIRouter:
    """Hot keys of the caches; needs role admin."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "admin"))

    # Not `async`: the scan of a large cache must run on a thread.
    @router.get("/v1/hotkeys", responses=answers("HotKeys", [400, 404, 503]))
    def hot_keys(
        model: str | None = None,
        table: str | None = None,
        limit: int = Query(20, ge=1, le=_MOST_HOT_KEYS, description="Keys per table"),
    ) -> Response:
        """The hottest keys of the CPU cache, by table, with their scores from 255 down; ``features`` lists
        the features that use the table, with their key offsets."""
        return JsonAnswer({"tables": state.require_node().hot_keys(model, table, limit)})

    return router
