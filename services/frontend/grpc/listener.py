"""A gRPC port, one of several servers in a process: its socket, health, reflection and shutdown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hps.config.server_settings import GrpcListener, ServerSettings
from hps.errors import ConfigError, Unavailable
from services.frontend.auth import Authorizer
from services.frontend.connection_limit import most_connections
from services.frontend.grpc.call_identity import check
from services.frontend.grpc.call_limits import call_options
from services.frontend.grpc.connection_age import age_options
from services.frontend.grpc.core import probe
from services.frontend.grpc.credentials import credentials
from services.frontend.grpc.health import GrpcHealth
from services.frontend.grpc.method_handlers import (
    BidiStreamHandler,
    PooledUnaryHandler,
    UnaryHandler,
)
from services.frontend.grpc.thread_calls import ThreadPoolCalls
from services.server_state import ServerState

# Threads for short calls, for calls that keep a thread (reflection, a stream), and for health watches without
# grpc's core: a watcher that does not read keeps one.
_QUICK, _OTHERS, _WATCHES = 16, 8, 8
# Limits on requests and lookups in flight, and on other calls, such as health's; the second bounds streams
# too. Calls beyond them are rejected with RESOURCE_EXHAUSTED.
_REQUESTS, _AUXILIARY = 4096, 512
# The longest handshake of a connection, and the longest time without a call.
_HANDSHAKE_MS, _IDLE_MS = 20_000, 300_000
_PINGS_MS = 5000
# The time for which new calls are rejected before the server stops; less than the retry pause of clients.
_REFUSING_S = 0.25

Handlers = Mapping[str, grpc.RpcMethodHandler]


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
        state: ServerState[Any],
        settings: ServerSettings,
        guard: Authorizer,
        *,
        one_of_many: bool = False,
    ) -> None:
        """``setting`` is the name of ``at``. ``one_of_many``: other processes listen on the port too."""
        self._setting, self._at, self._state = setting, at, state
        self._drain_s = settings.drain_s
        quick = ThreadPoolExecutor(_QUICK, "grpc-quick")
        others = ThreadPoolExecutor(_OTHERS, "grpc-others")
        on_core = at.calls == "auto" and probe.is_supported()
        self.acceptor = _call_acceptor(guard) if on_core else ThreadPoolCalls()
        self._quick = quick
        self._watches = quick if on_core else ThreadPoolExecutor(_WATCHES, "grpc-watch")
        self._pools = [quick, others, self._watches]
        self._server = grpc.server(
            others,
            # Limits only the calls that grpc itself accepts.
            maximum_concurrent_rpcs=_AUXILIARY if on_core else _REQUESTS + _AUXILIARY,
            options=_server_options(at, settings, one_of_many=one_of_many),
        )
        self.started = False
        self._one_request: dict[str, UnaryHandler] = {}  # handlers of unary methods, by full name
        # Handlers whose calls are rejected at shutdown.
        self._behaviors: list[UnaryHandler | BidiStreamHandler] = []
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()

    def _listen(self, services: Mapping[str, Handlers]) -> None:
        """Register ``services``, by name, with health and reflection, and listen. Raises ``ConfigError``."""
        self._health = GrpcHealth(self._state, self._watches, ("", *services))
        generated = HandlerCollector()
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, generated)
        for name, handlers in services.items():
            self._behaviors += self._offer(name, handlers)
        self._offer(health.SERVICE_NAME, generated.by_name)
        if self._at.reflection:
            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        host = f"[{self._at.host}]" if ":" in self._at.host else self._at.host
        self.url = f"{host}:{self._port(host)}"

    def _offer(self, service: str, handlers: Handlers) -> list[UnaryHandler | BidiStreamHandler]:
        """Register ``handlers`` for the calls of ``service``; return their behaviors."""
        behaviors: list[UnaryHandler | BidiStreamHandler] = []
        offered = {}
        for name, handler in handlers.items():
            offered[name] = handler
            if (behavior := handler.unary_unary) is not None:
                if not isinstance(behavior, UnaryHandler):
                    behavior = PooledUnaryHandler(handler, self._quick)
                offered[name] = grpc.unary_unary_rpc_method_handler(behavior)
            elif (behavior := handler.unary_stream) is not None:
                offered[name] = grpc.unary_stream_rpc_method_handler(behavior)
            else:
                behavior = handler.stream_stream
            behaviors.append(behavior)
            if isinstance(behavior, UnaryHandler):
                self._one_request[f"/{service}/{name}"] = behavior
        self._server.add_registered_method_handlers(service, offered)
        return behaviors

    def _port(self, host: str) -> int:
        """Listen; return the port number."""
        at, setting = self._at, self._setting
        address = f"{host}:{at.port}"
        try:
            if at.tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials(at.tls, setting))
        except RuntimeError:
            try:
                socket.getaddrinfo(at.host.strip("[]"), at.port, type=socket.SOCK_STREAM)
            except OSError as error:
                message = f"{setting}.host is {at.host!r}, which is not a usable address: {error}"
                raise ConfigError(message) from None
            remedy = (
                f"stop the process that listens there, or set {setting}.port (0 takes a free one), or "
                f"{setting}: null"
            )
            if at.tls is not None:
                files = f"{at.tls.certificate_file} and {at.tls.key_file}"
                remedy += f"; or {setting}.tls: {files} cannot be used"
            raise ConfigError(f"{setting}: cannot listen on {address}: {remedy}") from None
        return int(port)

    async def serve(self) -> None:
        """Serve until ``stop``, then finish the accepted calls."""
        self.acceptor.start(self._server, self._one_request)
        self.started = True
        await self._stopping.wait()
        self._health.stop()
        await self._refuse()
        self._health.end()
        ended = self._server.stop(self._drain_s)
        waiting = asyncio.create_task(asyncio.to_thread(ended.wait))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({waiting, forced}, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not waiting.done():
            await asyncio.to_thread(self._server.stop, None)  # blocks until the calls are cancelled
            await waiting
        self.acceptor.shutdown()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)

    async def _refuse(self) -> None:
        """Reject new calls for a while, so that clients go to other replicas.

        Calls that arrive between grpc's stop and the client's notice of it are CANCELLED, which clients do
        not retry (https://github.com/grpc/grpc/issues/41785); by then there should be none.
        """
        error = Unavailable("the server is shutting down; ask another replica")
        for behavior in self._behaviors:
            behavior.refuse(error)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._forced.wait(), _REFUSING_S)

    def stop(self, *, force: bool = False) -> None:
        """Start the shutdown; ``force`` drops calls in flight. Call it on the event loop."""
        self._stopping.set()
        if force:
            self._forced.set()


def _server_options(
    at: GrpcListener, settings: ServerSettings, *, one_of_many: bool
) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", int(one_of_many)),
        # Clients with long calls may ping to check that the server is alive.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _PINGS_MS),
        ("grpc.max_allowed_incoming_connections", most_connections()),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        *call_options(),
        *age_options(at.max_connection_age_s, settings.drain_delay_s, settings.drain_s),
    ]


def _call_acceptor(guard: Authorizer) -> Any:
    from services.frontend.grpc.core.call_acceptor import CallAcceptor  # imports private names

    return CallAcceptor(_REQUESTS, _AUXILIARY, partial(check, guard) if guard.enabled else None)
