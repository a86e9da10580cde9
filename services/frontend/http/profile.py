"""``POST /v1/profile/<name>``: the time of one inference request, split by its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from hps.config.server_settings import ServerSettings
from services.frontend.auth import Authorizer
from services.frontend.endpoints import Output
from services.frontend.http.api import JsonAnswer, answers, body_of, needs
from services.frontend.http.inference import header_size
from services.frontend.http.request import HttpRequestParser
from services.frontend.http.response import HttpResponseEncoder
from services.frontend.inference_request import InferenceRequest
from services.frontend.profiling import MakeWire, RequestProfiler
from services.frontend.state import FrontendState, ServedEndpoint

_GRPC = b"application/grpc"


class HttpProfiledProtocol:
    """The REST implementation of `profiling.ProfiledProtocol`."""

    def __init__(self, entry: ServedEndpoint, max_keys: int) -> None:
        endpoint = entry.endpoint
        self._parser = HttpRequestParser(endpoint.name, endpoint.rules, max_keys)
        self._encoder = HttpResponseEncoder(endpoint.name, endpoint.version)

    def read(self, body: bytes, size: int | None) -> InferenceRequest:
        return self._parser.parse(body, size)

    def write(self, call: Any, result: Any, outputs: Sequence[Output]) -> object:
        return self._encoder.encode(
            call.form, result.defaulted, result.degraded, result.stale_s, outputs
        )


def http_wire(settings: ServerSettings) -> MakeWire:
    return lambda entry: HttpProfiledProtocol(entry, settings.max_keys)


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
