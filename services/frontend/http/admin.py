"""The admin port: what the server is doing, and its metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from services.frontend.auth import Authorizer
from services.frontend.http.api import JsonAnswer, answers, needs
from services.server_state import ServerState

_MOST_HOT_KEYS = 10_000


def metrics_route(state: ServerState[Any]) -> APIRouter:
    """``/metrics``, for scrapers, without a key."""
    router = APIRouter(tags=["admin"])

    @router.get(
        "/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    )
    def metrics() -> Response:
        """Prometheus metrics."""
        found = state.metrics
        return Response(found.render(), media_type=found.content_type)

    return router


def status_routes(state: ServerState[Any], guard: Authorizer) -> APIRouter:
    """What the server holds and how it is doing; needs role admin."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "admin"))

    # Not `async`: stores may be asked for row counts, which runs on a thread then.
    @router.get("/v1/status", responses=answers("Status"))
    def status() -> Response:
        """What the server serves and how it is doing; while it loads, how far it is."""
        return JsonAnswer(state.status())

    @router.get("/v1/models", responses=answers("Models", [503]))
    def models() -> Response:
        """The served models with their tables."""
        return JsonAnswer({"models": state.require_node().status()["models"]})

    @router.get("/v1/tables", responses=answers("Tables", [503]))
    def tables() -> Response:
        """Every table of every model."""
        found = [
            {"model": model["name"], "version": model["version"], **table}
            for model in state.require_node().status()["models"]
            for table in model["tables"]
        ]
        return JsonAnswer({"tables": found})

    return router


def hot_keys_route(state: ServerState[Any], guard: Authorizer) -> APIRouter:
    """What the caches hold; needs role admin."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "admin"))

    # Not `async`: a large cache is looked through, which runs on a thread then.
    @router.get("/v1/hotkeys", responses=answers("HotKeys", [400, 404, 503]))
    def hot_keys(
        model: str | None = None,
        table: str | None = None,
        limit: int = Query(20, ge=1, le=_MOST_HOT_KEYS, description="Keys per table"),
    ) -> Response:
        """The hottest keys of the CPU cache, by table, with their scores from 255 down; ``features`` has the
        names by which requests ask for the table, with what is added to their keys."""
        return JsonAnswer({"tables": state.require_node().hot_keys(model, table, limit)})

    return router
