"""``/v2/logging``: Triton's log settings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from services.frontend.auth import Authorizer
from services.frontend.http.api import JsonAnswer, answers, json_body, needs, takes
from services.frontend.log_settings import change_log_settings, log_settings
from services.server_state import ServerState


def logging_routes(state: ServerState[Any], guard: Authorizer) -> APIRouter:
    """Reading the settings needs role read, changing them role admin."""
    router = APIRouter(tags=["admin"])

    @router.get("/v2/logging", responses=answers("LogSettings"), dependencies=needs(guard, "read"))
    async def settings() -> Response:
        """The log settings, by Triton's names."""
        return JsonAnswer(log_settings())

    @router.post(
        "/v2/logging",
        responses=answers("LogSettings", [400, 501]),
        dependencies=needs(guard, "admin"),
        openapi_extra=takes("LogSettings"),
    )
    async def set_some(request: Request) -> Response:
        """Change some log settings; a `log_verbose_level` above 0 also logs every request."""
        changes = await json_body(request)
        return JsonAnswer(
            await run_in_threadpool(change_log_settings, changes, state)
        )  # notifies other processes

    return router
