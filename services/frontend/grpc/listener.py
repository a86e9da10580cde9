"""A gRPC port, one of several servers on an event loop: its sockets, health, reflection and shutdown."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hps.config.server_settings import GrpcListener, ServerSettings
from hps.errors import Unavailable
from hps.observability import metric_names as m
from services.frontend.acceptor import Acceptor
from services.frontend.auth import Authorizer
from services.frontend.connection_limit import ConnectionLimit, most_connections
from services.frontend.grpc.call_identity import check
from services.frontend.grpc.connection_age import connection_age_s
from services.frontend.grpc.health import GrpcHealth
from services.frontend.grpc.http2 import calls
from services.frontend.grpc.http2.calls import CallTable
from services.frontend.grpc.http2.connection import GrpcConnection
from services.frontend.grpc.http2.limits import PortSettings
from services.frontend.grpc.http2.port import PortContext
from services.frontend.grpc.http2.receive_budget import ReceiveBudget
from services.frontend.grpc.http2.stream_calls import StreamCalls
from services.frontend.grpc.http2.tls import certificate_properties, grpc_server_context
from services.frontend.grpc.method_handlers import (
    BidiStreamHandler,
    PooledUnaryHandler,
    UnaryHandler,
    parsed_stream,
)
from services.frontend.listening import host_of, listen, listen_unix
from services.frontend.state import FrontendState

# Threads for short calls, and for reflection, whose calls keep a thread.
_QUICK, _OTHERS = 16, 8
# Limits on requests and lookups in flight, on other calls, such as health's, and on streams. Calls beyond
# them are rejected with RESOURCE_EXHAUSTED.
_REQUESTS, _AUXILIARY = 4096, 512
# The time for which new calls are rejected before the server stops; less than the retry pause of clients.
_REFUSING_S = 0.25
# The period in which the end of a shutdown is checked.
_POLL_S = 0.01

Handlers = Mapping[str, grpc.RpcMethodHandler]
Handler = UnaryHandler | BidiStreamHandler


class HandlerCollector:
    """Stands in for a server in generated code, and collects the handlers that it registers."""

    def __init__(self) -> None:
        self.by_name: dict[str, grpc.RpcMethodHandler] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        pass

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        self.by_name.update(handlers)


class GrpcPort:
    """One gRPC port. Subclasses pass their services to ``_listen``; ``serve`` then answers until ``stop``."""

    url: str

    def __init__(
        self,
        setting: str,
        at: GrpcListener,
        state: FrontendState,
        settings: ServerSettings,
        guard: Authorizer,
        *,
        one_of_many: bool = False,
    ) -> None:
        """``setting`` is the name of ``at``. ``one_of_many``: other processes listen on the port too."""
        self._setting, self._at, self._state = setting, at, state
        self._one_of_many = one_of_many
        self._drain_s = settings.drain_s
        self._quick = ThreadPoolExecutor(_QUICK, "grpc-quick")
        self._others = ThreadPoolExecutor(_OTHERS, "grpc-others")
        self._pools = [self._quick, self._others]
        self.calls = CallTable(
            _REQUESTS, _AUXILIARY, partial(check, guard) if guard.enabled else None
        )
        self._methods: dict[str, Handler] = {}
        budget = state.admission.byte_budget
        streams = StreamCalls(_AUXILIARY, settings.max_body_bytes, budget)
        self.context = PortContext(
            _port_settings(at, settings),
            self._methods,
            self.calls,
            ConnectionLimit(most_connections()),
            ReceiveBudget(
                budget, lambda: state.metrics.counter(m.REQUESTS_REFUSED, "queue_bytes").add()
            ),
            streams.begin,
            certificate_properties,
        )
        streams.post = self.context.post
        self._tls = grpc_server_context(at, setting)
        self._sockets: list[socket.socket] = []
        self.started = False
        self._refused: list[Handler] = []  # handlers whose calls are rejected at shutdown
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()

    def _listen(self, services: Mapping[str, Handlers], also_at: Path | None = None) -> None:
        """Register ``services``, by name, with health and reflection, and listen. Raises ``ConfigError``.

        ``also_at``: a Unix socket, in plain text."""
        self._health = GrpcHealth(self._state, self._quick, ("", *services))
        generated = HandlerCollector()
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, generated)
        for name, handlers in services.items():
            self._refused += self._offer(name, handlers)
        self._offer(health.SERVICE_NAME, generated.by_name)
        if self._at.reflection:
            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflected = HandlerCollector()
            reflection.enable_server_reflection(names, reflected)
            self._offer(reflection.SERVICE_NAME, reflected.by_name)
        at = self._at
        listener = listen(
            at.host, at.port, self._setting, one_of_many=self._one_of_many, is_optional=True
        )
        self._sockets = [listener]
        try:
            if also_at is not None:
                self._sockets.append(listen_unix(also_at))
        except BaseException:
            listener.close()
            raise
        self.url = f"{host_of(at.host)}:{listener.getsockname()[1]}"

    def _offer(self, service: str, handlers: Handlers) -> list[Handler]:
        """Register ``handlers`` for the calls of ``service``; return those that are called."""
        offered = {name: self._called(handler) for name, handler in handlers.items()}
        for name, handler in offered.items():
            self._methods[f"/{service}/{name}"] = handler
        return list(offered.values())

    def _called(self, handler: grpc.RpcMethodHandler) -> Handler:
        """Return what is called for ``handler``: our own handler in it, or one that runs it on a pool."""
        own = handler.unary_unary or handler.unary_stream or handler.stream_stream
        if isinstance(own, UnaryHandler | BidiStreamHandler):
            return own
        if handler.unary_unary is not None:
            return PooledUnaryHandler(handler, self._quick)
        return parsed_stream(handler, self._others)

    async def serve(self) -> None:
        """Serve until ``stop``, then finish the accepted calls."""
        self.context.start()
        acceptors = [self._accept(sock) for sock in self._sockets]
        sweeper = asyncio.create_task(self._sweep())
        self.started = True
        try:
            await self._stopping.wait()
            self._health.stop()
            await self._refuse()
            self._health.end()
            for acceptor in acceptors:
                acceptor.close()
            await self._drain()
        finally:
            sweeper.cancel()
            self.calls.shutdown()
            for pool in self._pools:
                pool.shutdown(wait=False, cancel_futures=True)

    def _accept(self, sock: socket.socket) -> Acceptor:
        connection = partial(GrpcConnection, self.context)
        if sock.family == socket.AF_UNIX or self._tls is None:
            return Acceptor(sock, connection)
        return Acceptor(sock, connection, self._tls, self.context.settings.handshake_s)

    async def _sweep(self) -> None:
        """End idle, old and stalled connections periodically, without a timer for each."""
        while True:
            await asyncio.sleep(calls.SWEEP_S)
            self.context.sweep(time.monotonic())

    async def _refuse(self) -> None:
        """Reject new calls for a while, so that clients go to other replicas, and retry."""
        error = Unavailable("the server is shutting down; ask another replica")
        for handler in self._refused:
            handler.refuse(error)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._forced.wait(), _REFUSING_S)

    async def _drain(self) -> None:
        """Tell clients to make no more calls, and wait for those in flight, at most ``drain_s``."""
        connections = self.context.connections
        for connection in list(connections):
            connection.begin_drain()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._drain_s
        while connections and not self._forced.is_set() and loop.time() < until:
            await asyncio.sleep(_POLL_S)
        for connection in list(connections):
            connection.abort()

    def stop(self, *, force: bool = False) -> None:
        """Start the shutdown; ``force`` drops calls in flight. Call it on the event loop."""
        self._stopping.set()
        if force:
            self._forced.set()


def _port_settings(at: GrpcListener, settings: ServerSettings) -> PortSettings:
    return PortSettings(
        max_message_bytes=settings.max_body_bytes,
        age_s=connection_age_s(at.max_connection_age_s, settings.drain_delay_s),
        grace_s=settings.drain_s,
    )
