"""Update streams on the admin port: status, pause, resume, replay."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from hps.errors import BadRequest
from hps.node.streams import UpdateStreams
from services.frontend.auth import Authorizer
from services.frontend.http.api import JsonAnswer, answers, json_body, needs, takes
from services.server_state import ServerState


def updates_routes(state: ServerState[Any], guard: Authorizer) -> APIRouter:
    """``/v1/updates``; needs role admin."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "admin"))

    def streams() -> UpdateStreams:
        update_streams: UpdateStreams = state.require_node().streams
        return update_streams

    def status() -> Response:
        return JsonAnswer({"updates": streams().status()})

    @router.get("/v1/updates", responses=answers("Updates", [503]))
    def updates() -> Response:
        """The readers of this process's update streams: group, state and lag."""
        return status()

    @router.post(
        "/v1/updates/pause",
        responses=answers("Updates", [400, 404, 503]),
        openapi_extra=takes("UpdatesGroup"),
    )
    async def pause(request: Request) -> Response:
        """Stop applying updates until resumed, for one group's reader or for all. No update is lost."""
        group = _text(await json_body(request), "group")
        await run_in_threadpool(partial(streams().pause, group))
        return status()

    @router.post(
        "/v1/updates/resume",
        responses=answers("Updates", [400, 404, 503]),
        openapi_extra=takes("UpdatesGroup"),
    )
    async def resume(request: Request) -> Response:
        """Continue from where the reader was paused."""
        streams().resume(_text(await json_body(request), "group"))
        return status()

    @router.post(
        "/v1/updates/seek",
        responses=answers("Updates", [400, 404, 503]),
        openapi_extra=takes("UpdatesSeek"),
    )
    async def seek(request: Request) -> Response:
        """Continue from an offset: an earlier one applies messages again, a later one skips messages. Newer
        rows stay."""
        body = await json_body(request)
        topic, group = _text(body, "topic"), _text(body, "group")
        if topic is None:
            raise BadRequest("'topic' is missing")
        work = partial(
            streams().seek, topic, _number(body, "partition"), _number(body, "offset"), group
        )
        await run_in_threadpool(work)
        return status()

    return router


def _text(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"'{name}' must be a string")
    return value


def _number(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise BadRequest(f"'{name}' must be an integer from 0")
    return value
