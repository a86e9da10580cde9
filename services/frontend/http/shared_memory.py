"""Triton's system shared memory extension: register memory shared with clients on this machine."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from hps.errors import BadRequest, Unsupported
from services.frontend.auth import Authorizer
from services.frontend.http.api import JsonAnswer, answers, json_body, needs, takes
from services.frontend.http.peer import peer_of
from services.frontend.state import FrontendState

_ALL = "/v2/systemsharedmemory"
_ONE = "/v2/systemsharedmemory/region/{region}"


def shared_memory_routes(state: FrontendState, guard: Authorizer) -> APIRouter:
    """Register, unregister and list regions of `services.frontend.shared_memory.SharedMemoryRegistry`."""
    router = APIRouter(tags=["shared memory"], dependencies=needs(guard, "read"))
    errors = [400, 403, 404, 501]

    @router.get(f"{_ALL}/status", responses=answers("Regions", [403, 501]))
    @router.get(f"{_ONE}/status", responses=answers("Regions", errors))
    async def status(request: Request, region: str = "") -> Response:
        """A registered region, or all."""
        return JsonAnswer(state.regions.status(region, peer_of(request.scope).host))

    @router.post(
        f"{_ONE}/register", responses=answers("Nothing", errors), openapi_extra=takes("Region")
    )
    async def register(request: Request, region: str) -> Response:
        """Register ``byte_size`` bytes from ``offset`` of ``/dev/shm/<key>`` under a name."""
        key, offset, size = _memory_range(await json_body(request))
        state.regions.register(region, key, offset, size, peer_of(request.scope).host)
        return JsonAnswer({})

    @router.post(f"{_ALL}/unregister", responses=answers("Nothing", [403, 501]))
    @router.post(f"{_ONE}/unregister", responses=answers("Nothing", [403, 501]))
    def unregister(request: Request, region: str = "") -> Response:
        """Unregister a region, or all. After the answer, the server writes nothing to it."""
        state.regions.unregister(region, peer_of(request.scope).host)
        return JsonAnswer({})

    @router.post("/v2/cudasharedmemory/unregister", include_in_schema=False)
    async def unregister_cuda() -> Response:
        """Succeed for all regions, of which there are none: perf_analyzer unregisters those of every kind."""
        if not state.regions.on:
            raise Unsupported("POST /v2/cudasharedmemory/unregister is not offered")
        return JsonAnswer({})

    return router


def _memory_range(fields: dict[str, Any]) -> tuple[str, int, int]:
    """Return the key, offset and size of the memory to register; raise ``BadRequest``."""
    key, size, offset = fields.get("key"), fields.get("byte_size"), fields.get("offset", 0)
    if type(key) is not str or type(size) is not int or type(offset) is not int:
        raise BadRequest(
            "registering shared memory requires 'key' (string), 'byte_size' (integer) and optionally "
            "'offset' (integer)"
        )
    return key, offset, size
