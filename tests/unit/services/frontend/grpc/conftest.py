"""The small node behind a gRPC port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import tritonclient.grpc as triton

from hps.config.server_settings import GrpcSettings
from services.frontend.auth import NoAuthorizer
from services.frontend.grpc.server import GrpcServer


class Running:
    """A server on an event loop of its own thread."""

    def __init__(self, server: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.server = server
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self.server.serve())

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, *, at_once: bool = False) -> None:
        """Begin the end, if that has not come."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: self.server.stop(at_once=at_once))

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@contextmanager
def running(small: Any, guard: Any = None, **settings: Any) -> Iterator[Running]:
    """A server for ``small``; ``settings`` as in `server`, those of `server.grpc` under ``grpc``; ``state``
    in place of the small node's."""
    at = GrpcSettings(**{"port": 0, **settings.pop("grpc", {})})
    state = settings.pop("state", small.state)
    chosen = small.settings.model_copy(update=settings)
    server = Running(GrpcServer(at, state, chosen, guard or NoAuthorizer()))
    try:
        yield server
    finally:
        server.stop(at_once=True)
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
