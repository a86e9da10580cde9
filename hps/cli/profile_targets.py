"""Targets of ``hps profile``: a server's admin port, or a node in this process with a server's codecs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hps.cli.options import Credentials, open_admin
from hps.client.http_messages import Request
from hps.errors import ConfigError
from hps.tools.bench.hot_key_pools import MOST

if TYPE_CHECKING:
    from hps.node.node import Node

_LENGTH = "Inference-Header-Content-Length"
_GRPC = "application/grpc"


class ServerProfileTarget:
    """A server, by its admin address."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        self._admin = open_admin(url, credentials)
        self._client = credentials.client(url)

    def __enter__(self) -> ServerProfileTarget:
        return self

    def __exit__(self, *_error: object) -> None:
        self._admin.close()
        self._client.close()

    def metadata(self, model: str) -> dict[str, Any]:
        return self._client.metadata(model)

    def models(self) -> list[str]:
        return self._client.models()

    def hot_keys(self, model: str) -> Sequence[Mapping[str, Any]]:
        """Get the hottest keys; see `hps.tools.bench.hot_key_pools.HotKeys`."""
        return self._admin.hot_keys(model, limit=MOST)

    def profile(self, model: str, request: Request) -> dict[str, Any]:
        path = f"/v1/profile/{quote(model, safe='')}"
        reply = self._admin.send(request._replace(path=path))
        return dict(reply.json(self._admin.url))

    def plain(self, request: Request) -> float | None:
        """Seconds of the same request at this client, without a profile.

        None for gRPC: the admin port accepts only HTTP requests."""
        if is_grpc(request):
            return None
        started = time.perf_counter()
        self._admin.send(request)
        return time.perf_counter() - started


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
        wires = {"http": http_wire(settings.server), "grpc": grpc_wire(settings.server)}
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
        """None: a request has no other caller here."""


ProfileTarget = ServerProfileTarget | LocalProfileTarget


def of_grpc(message: bytes) -> Request:
    """Wrap the bytes of a ``ModelInferRequest`` in a request for a profile."""
    return Request("POST", "", {"Content-Type": _GRPC}, message)


def is_grpc(request: Request) -> bool:
    return request.headers.get("Content-Type") == _GRPC
