"""``POST /v1/profile/<name>``: the time of one inference request, split by its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from hps.config.server_settings import ServerSettings
from services.frontend.auth import Authorizer
from services.frontend.http.api import JsonAnswer, answers, body_of, needs
from services.frontend.http.inference import header_size
from services.frontend.http.request import HttpRequestParser
from services.frontend.http.response import HttpResponseEncoder
from services.frontend.profiling import MakeWire, ProfiledProtocol, RequestProfiler
from services.frontend.state import FrontendState, ServedEndpoint

_GRPC = b"application/grpc"


def http_wire(settings: ServerSettings) -> MakeWire:
    def make(entry: ServedEndpoint) -> ProfiledProtocol:
        parser = HttpRequestParser(entry.name, entry.endpoint.rules, settings.max_keys)
        return ProfiledProtocol(parser.parse, HttpResponseEncoder(entry.name, entry.version))

    return make


def profile_route(
    state: FrontendState,
    settings: ServerSettings,
    guard: Authorizer,
    others: Mapping[str, MakeWire],
) -> APIRouter:
    """``others``: further protocols. Needs role admin: the times reveal what a cache holds."""
    router = APIRouter(tags=["admin"], dependencies=needs(guard, "admin"))
    profiler = RequestProfiler(state, settings, {"http": http_wire(settings), **others})

    @router.post("/v1/profile/{name}", responses=answers("Profile", [400, 404, 413, 503, 504]))
    async def profile(name: str, request: Request) -> Response:
        """Answers an inference request with its profile instead of its outputs. With the content type
        application/grpc, the body is a ModelInferRequest."""
        body = await body_of(request, settings.max_body_bytes)
        measure: Callable[..., dict[str, Any]] = profiler.measure
        headers = dict(request.scope["headers"])
        if headers.get(b"content-type", b"").startswith(_GRPC):
            return JsonAnswer(await run_in_threadpool(measure, name, body, None, "grpc"))
        size = header_size(headers.get(b"inference-header-content-length"), len(body))
        return JsonAnswer(await run_in_threadpool(measure, name, body, size))

    return router
