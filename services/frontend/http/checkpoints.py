"""RocksDB checkpoints of a serving node."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from hps.errors import BadRequest
from services.frontend.auth import Authorizer
from services.frontend.http.api import JsonAnswer, answers, json_body, needs, takes
from services.server_state import ServerState


def checkpoint_route(state: ServerState[Any], guard: Authorizer) -> APIRouter:
    """``POST /v1/checkpoints``; needs role admin."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "admin"))

    @router.post(
        "/v1/checkpoints",
        responses=answers("Checkpoint", [400, 501, 503]),
        openapi_extra=takes("CheckpointKeep"),
    )
    async def make(request: Request) -> Response:
        """Create a consistent copy of the RocksDB below `tiers.rocksdb.checkpoints`, and remove all but the
        newest `keep` copies there. Answers when the copy is complete."""
        keep = (await json_body(request)).get("keep", 1)
        if type(keep) is not int:
            raise BadRequest("'keep' must be an integer from 1")
        started = time.monotonic()
        folder = await run_in_threadpool(partial(state.require_node().checkpoint, keep))
        seconds = round(time.monotonic() - started, 3)
        return JsonAnswer({"checkpoint": str(folder), "seconds": seconds})

    return router
