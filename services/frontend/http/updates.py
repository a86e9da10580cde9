"""Update streams on the admin port: how far they are; pause, resume, replay."""

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
        found: UpdateStreams = state.require_node().streams
        return found

    def told() -> Response:
        return JsonAnswer({"updates": streams().status()})

    @router.get("/v1/updates", responses=answers("Updates", [503]))
    def updates() -> Response:
        """The readers of update streams here: their groups, what they wait for, how far behind they are."""
        return told()

    @router.post(
        "/v1/updates/pause",
        responses=answers("Updates", [400, 404, 503]),
        openapi_extra=takes("UpdatesGroup"),
    )
    async def pause(request: Request) -> Response:
        """Apply nothing more until resumed; of one group's reader, or of all. Nothing is lost."""
        group = _text(await json_body(request), "group")
        await run_in_threadpool(partial(streams().pause, group))
        return told()

    @router.post(
        "/v1/updates/resume",
        responses=answers("Updates", [400, 404, 503]),
        openapi_extra=takes("UpdatesGroup"),
    )
    async def resume(request: Request) -> Response:
        """Go on where it was paused."""
        streams().resume(_text(await json_body(request), "group"))
        return told()

    @router.post(
        "/v1/updates/seek",
        responses=answers("Updates", [400, 404, 503]),
        openapi_extra=takes("UpdatesSeek"),
    )
    async def seek(request: Request) -> Response:
        """Go on at an offset: back, to have messages applied again, or forward, to leave some out. Rows that
        are newer stay."""
        body = await json_body(request)
        topic, group = _text(body, "topic"), _text(body, "group")
        if topic is None:
            raise BadRequest("'topic' is missing")
        work = partial(
            streams().seek, topic, _number(body, "partition"), _number(body, "offset"), group
        )
        await run_in_threadpool(work)
        return told()

    return router


def _text(body: dict[str, Any], name: str) -> str | None:
    given = body.get(name)
    if given is not None and not isinstance(given, str):
        raise BadRequest(f"'{name}' must be a text")
    return given


def _number(body: dict[str, Any], name: str) -> int:
    given = body.get(name)
    if type(given) is not int or not 0 <= given < 2**63:
        raise BadRequest(f"'{name}' must be a whole number from 0")
    return given
