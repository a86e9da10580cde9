"""The admin port: what the server is doing, its tables and single rows of them."""

from __future__ import annotations

import time

import numpy as np
from fastapi import APIRouter, Query
from starlette.responses import Response

from hps.errors import BadRequest, NotFound
from hps.lookup.explain import explained
from hps.types import JaggedKeys, KeyArray, LookupRequest
from services.frontend.auth import Guard
from services.frontend.http_api import Json, answers, needs
from services.frontend.infer import outcome
from services.frontend.request_faults import nearest, shown
from services.frontend.state import State

MAX_ROWS = 1000


def metrics_route(state: State) -> APIRouter:
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


def admin_routes(state: State, guard: Guard, timeout_s: float) -> APIRouter:
    """``/v1/...``; needs role admin."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "admin"))

    # Not `async`: stores may be asked for row counts, which runs on a thread then.
    @router.get("/v1/status", responses=answers("Status"))
    def status() -> Response:
        """What the server serves and how it is doing; while it loads, how far it is."""
        return Json(state.status())

    @router.get("/v1/models", responses=answers("Models", [503]))
    def models() -> Response:
        """The served models with their tables."""
        return Json({"models": state.require_node().status()["models"]})

    @router.get("/v1/tables", responses=answers("Tables", [503]))
    def tables() -> Response:
        """Every table of every model."""
        found = [
            {"model": model["name"], "version": model["version"], **table}
            for model in state.require_node().status()["models"]
            for table in model["tables"]
        ]
        return Json({"tables": found})

    # Not `async`: a large cache is looked through, which runs on a thread then.
    @router.get("/v1/hotkeys", responses=answers("HotKeys", [400, 404, 503]))
    def hot_keys(
        model: str | None = None,
        table: str | None = None,
        limit: int = Query(20, ge=1, le=MAX_ROWS, description="Keys per table"),
    ) -> Response:
        """The hottest keys of the CPU cache, by table, with their scores from 255 down."""
        return Json({"tables": state.require_node().hot_keys(model, table, limit)})

    @router.get("/v1/tables/{model}/{table}/rows", responses=answers("Rows", [400, 404, 503, 504]))
    async def rows(
        model: str,
        table: str,
        keys: str = Query(description="Keys, separated by commas", examples=["1,2"]),
    ) -> Response:
        """Rows of a table: the vector, the tier it came from, its version and age. Keys are the
        table's own (features may add an offset to theirs). The lookup counts as any other."""
        served = state.require_node().model(model)
        if table not in served.tables:
            raise NotFound(f"model '{model}' has no table '{table}'{nearest(table, served.tables)}")
        wanted = parse_keys(keys)
        deadline = time.monotonic() + timeout_s
        request = LookupRequest(
            {table: JaggedKeys(wanted, len(wanted))}, deadline, want_source=True, by_table=True
        )
        result = await outcome(served.engine.submit(request), deadline)
        return Json(explained(served.tables[table], wanted, result))

    return router


def parse_keys(text: str) -> KeyArray:
    """Comma-separated integers of 64 bits, signed or unsigned, as ``(n,) int64``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or len(parts) > MAX_ROWS:
        raise BadRequest(f"'keys' must be 1 to {MAX_ROWS} integers separated by commas")
    keys = []
    for part in parts:
        digits = part.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 21):
            raise BadRequest(f"key {shown(part)} is not an integer")
        if not -(2**63) <= int(part) < 2**64:
            raise BadRequest(f"key {part} does not fit into 64 bits")
        keys.append(int(part) % 2**64)
    return np.array(keys, np.uint64).view(np.int64)
