"""Recordings of the keys that a model's lookups ask for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from hps.errors import BadRequest, Unsupported
from hps.lookup.key_sampling import MAX_KEYS
from hps.node.key_traces import end_recording, record_keys, recorded_keys
from services.frontend.auth import Authorizer
from services.frontend.http.api import JsonAnswer, answers, json_body, needs, takes
from services.server_state import ServerState

_ARCHIVE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An .npz archive for hps plan.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def key_trace_routes(state: ServerState[Any], guard: Authorizer, workers: int) -> APIRouter:
    """``/v1/traces/<model>``: start, read and end a recording; needs role admin."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "admin"))
    path = "/v1/traces/{model}"

    @router.post(
        path,
        responses=answers("KeyTrace", [400, 404, 501, 503]),
        openapi_extra=takes("KeyTraceStart"),
    )
    async def start(model: str, request: Request) -> Response:
        """Record the keys of the model's lookups for `seconds`; of each table a sample of `keys` keys."""
        body = await json_body(request)
        seconds, keys = body.get("seconds", 60), body.get("keys", MAX_KEYS)
        if type(seconds) not in (int, float) or type(keys) is not int:
            raise BadRequest("'seconds' must be a number, and 'keys' an integer")
        if workers:
            raise Unsupported(
                "lookups are answered by workers, whose keys are not recorded; record a server with "
                "server.workers 0, or the requests at their source"
            )
        served = state.require_node().model(model)
        record_keys(served, seconds, keys)
        return JsonAnswer({"model": served.name, "version": served.version, "seconds": seconds})

    @router.get(path, responses=answers("Nothing", [404, 501, 503]) | _ARCHIVE)
    async def read(model: str) -> Response:
        """What is recorded so far."""
        packed = await run_in_threadpool(recorded_keys, state.require_node().model(model))
        return Response(packed, media_type="application/octet-stream")

    @router.delete(path, responses=answers("Nothing", [404, 501, 503]))
    def end(model: str) -> Response:
        """End the recording and free its memory."""
        end_recording(state.require_node().model(model))
        return JsonAnswer({})

    return router
