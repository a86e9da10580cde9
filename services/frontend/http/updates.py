"""Update streams on the admin port: status, pause, resume, replay."""

from __future__ import annotations

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
    handlers = _UpdatesHandlers(state)
    router.add_api_route(
        "/v1/updates", handlers.updates, methods=["GET"], responses=answers("Updates", [503])
    )
    for verb, endpoint, body in (
        ("pause", handlers.pause, "UpdatesGroup"),
        ("resume", handlers.resume, "UpdatesGroup"),
        ("seek", handlers.seek, "UpdatesSeek"),
    ):
        router.add_api_route(
            f"/v1/updates/{verb}",
            endpoint,
            methods=["POST"],
            responses=answers("Updates", [400, 404, 503]),
            openapi_extra=takes(body),
        )
    return router


class _UpdatesHandlers:
    """Handlers of `updates_routes`."""

    def __init__(self, state: ServerState[Any]) -> None:
        self._state = state

    def updates(self) -> Response:
        """The readers of this process's update streams: group, state and lag."""
        return JsonAnswer({"updates": self._streams().status()})

    async def pause(self, request: Request) -> Response:
        """Stop applying updates until resumed, for one group's reader or for all. No update is lost."""
        group = _text(await json_body(request), "group")
        await run_in_threadpool(self._streams().pause, group)
        return self.updates()

    async def resume(self, request: Request) -> Response:
        """Continue from where the reader was paused."""
        self._streams().resume(_text(await json_body(request), "group"))
        return self.updates()

    async def seek(self, request: Request) -> Response:
        """Continue from an offset: an earlier one applies messages again, a later one skips messages. Newer
        rows stay."""
        body = await json_body(request)
        topic, group = _text(body, "topic"), _text(body, "group")
        if topic is None:
            raise BadRequest("'topic' is missing")
        seek = self._streams().seek
        partition, offset = _number(body, "partition"), _number(body, "offset")
        await run_in_threadpool(seek, topic, partition, offset, group)
        return self.updates()

    def _streams(self) -> UpdateStreams:
        streams: UpdateStreams = self._state.require_node().streams
        return streams


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
