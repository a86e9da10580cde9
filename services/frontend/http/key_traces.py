"""Recordings of the keys that a model's lookups ask for."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from hps.errors import BadRequest
from hps.lookup.key_sampling import MAX_KEYS, merge_traces
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


def key_trace_routes(state: ServerState[Any], guard: Authorizer) -> APIRouter:
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
        served = state.require_node().model(model)
        record_keys(served, seconds, keys)
        await run_in_threadpool(state.ask_workers, "record_keys", model, seconds, keys)
        return JsonAnswer({"model": served.name, "version": served.version, "seconds": seconds})

    @router.get(path, responses=answers("Nothing", [404, 501, 503]) | _ARCHIVE)
    async def read(model: str) -> Response:
        """What is recorded so far."""
        packed = await run_in_threadpool(_recorded, state, model)
        return Response(packed, media_type="application/octet-stream")

    @router.delete(path, responses=answers("Nothing", [404, 501, 503]))
    def end(model: str) -> Response:
        """End the recording and free its memory."""
        end_recording(state.require_node().model(model))
        state.ask_workers("end_recording", model)
        return JsonAnswer({})

    return router


def _recorded(state: ServerState[Any], model: str) -> bytes:
    """The recordings of the node and of its workers, as one."""
    own = recorded_keys(state.require_node().model(model))
    with tempfile.TemporaryDirectory(prefix="hps-trace-") as folder:
        files = state.ask_workers("recorded_keys", model, folder)
        return merge_traces([own, *(Path(file).read_bytes() for file in files)])
