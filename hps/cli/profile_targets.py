"""Targets of ``hps profile``: a server's admin port, or a node in this process with a server's codecs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hps.client import Admin, Client
from hps.client.address import address
from hps.client.http_messages import Request, key_headers
from hps.client.rest import HttpConnectionPool
from hps.errors import ConfigError, NotFound
from hps.tools.bench.hot_key_pools import MOST

if TYPE_CHECKING:
    from hps.client import Tls
    from hps.node.node import Node

_PATIENCE_S = 30.0
_LENGTH = "Inference-Header-Content-Length"
_GRPC = "application/grpc"


class ServerProfileTarget:
    """A server, by its admin address."""

    def __init__(self, url: str, api_key: str | None, tls: Tls | None) -> None:
        at = address(url, tls, ("http", "https"))
        self._url, self._api_key, self._tls = at.base, api_key, tls
        self._headers = key_headers(api_key)
        self._line = HttpConnectionPool(at)
        self._client = Client(url, api_key=api_key, tls=tls)

    def __enter__(self) -> ServerProfileTarget:
        return self

    def __exit__(self, *_error: object) -> None:
        self._line.close()
        self._client.close()

    def metadata(self, model: str) -> dict[str, Any]:
        return self._client.metadata(model)

    def models(self) -> list[str]:
        return self._client.models()

    def hot_keys(self, model: str) -> Sequence[Mapping[str, Any]]:
        with Admin(self._url, api_key=self._api_key, tls=self._tls) as admin:
            return admin.hot_keys(model, limit=MOST)

    def profile(self, model: str, request: Request) -> dict[str, Any]:
        path = f"/v1/profile/{quote(model, safe='')}"
        reply = self._send(request._replace(path=path))
        if reply.status == 404 and b"Not Found" in reply.body:
            raise NotFound(
                f"{self._url} has no {path}; is it the admin address? The server prints it when it starts, "
                "port 8002 unless configured otherwise"
            )
        return dict(reply.json(self._url))

    def plain(self, request: Request) -> float | None:
        """See `ProfileTarget.plain`. None for gRPC: the admin port accepts only HTTP requests."""
        if is_grpc(request):
            return None
        started = time.perf_counter()
        self._send(request).checked(self._url)
        return time.perf_counter() - started

    def _send(self, request: Request) -> Any:
        headers = {**request.headers, **self._headers}
        return self._line.send(request._replace(headers=headers), time.monotonic() + _PATIENCE_S)


class LocalProfileTarget:
    """A node in this process; requests are decoded and answers encoded as in a server."""

    def __init__(self, node: Node) -> None:
        from hps.config import Settings
        from services.frontend.grpc.profile import grpc_wire
        from services.frontend.http.profile import http_wire
        from services.frontend.profiling import RequestProfiler
        from services.frontend.state import FrontendState

        self._node = node
        settings = Settings()
        self._state = state = FrontendState("node", settings)
        state.serve(node)
        wires = {"http": http_wire(settings.server), "grpc": grpc_wire(state, settings.server)}
        self._profiler = RequestProfiler(state, settings.server, wires)

    def metadata(self, model: str) -> dict[str, Any]:
        return self._state.entry(model).info.metadata()

    def models(self) -> list[str]:
        return list(self._state.entries)

    def hot_keys(self, model: str) -> Sequence[Mapping[str, Any]]:
        return self._node.hot_keys(model, limit=MOST)

    def profile(self, model: str, request: Request) -> dict[str, Any]:
        body = request.body
        if body is None:
            raise ConfigError("a request without a body")
        size = request.headers.get(_LENGTH)
        protocol = "grpc" if is_grpc(request) else "http"
        return self._profiler.measure(model, body, None if size is None else int(size), protocol)

    def plain(self, _request: Request) -> None:
        return None


def of_grpc(message: bytes) -> Request:
    """Wrap the bytes of a ``ModelInferRequest`` in a request for a profile."""
    return Request("POST", "", {"Content-Type": _GRPC}, message)


def is_grpc(request: Request) -> bool:
    return request.headers.get("Content-Type") == _GRPC
