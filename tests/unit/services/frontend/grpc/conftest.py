"""The small node behind a gRPC port."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import tritonclient.grpc as triton

from hps.config.server_settings import GrpcSettings
from services.frontend.auth import Authorizer
from services.frontend.grpc.server import GrpcServer
from tests.support.server_thread import Running


@contextmanager
def running(small: Any, guard: Any = None, **settings: Any) -> Iterator[Running]:
    """A server for ``small``.

    ``settings``: those of `server`, of `server.grpc` under ``grpc``; ``state`` replaces the small node's."""
    at = GrpcSettings(**{"port": 0, **settings.pop("grpc", {})})
    state = settings.pop("state", small.state)
    chosen = small.settings.model_copy(update=settings)
    server = Running(GrpcServer(at, state, chosen, guard or Authorizer()))
    try:
        yield server
    finally:
        server.stop(force=True)
        server.join()


@pytest.fixture
def serve(small: Any) -> Iterator[Callable[..., Running]]:
    """``serve(**settings)``: a running server."""
    with ExitStack() as stack:
        yield lambda *args, **settings: stack.enter_context(running(small, *args, **settings))


@pytest.fixture
def client(serve: Callable[..., Running]) -> Iterator[triton.InferenceServerClient]:
    """Triton's client of a server with default settings."""
    with triton.InferenceServerClient(serve().server.url) as client:
        yield client
