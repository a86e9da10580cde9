"""gRPC as one of several servers in a process.

Calls are answered on threads, which in Python take fewer cycles than grpc.aio. Three groups of them, so that
none waits for another: inference, streams (each keeps a thread while it lasts), and all that is quick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tritonclient.grpc.service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

from hps.config.server_settings import GrpcSettings, ServerSettings
from hps.errors import ConfigError
from services.frontend.auth import Guard
from services.frontend.grpc.credentials import credentials
from services.frontend.grpc.health import Health
from services.frontend.grpc.infer import STREAMS, Inference
from services.frontend.grpc.runners import Runners
from services.frontend.grpc.service import SERVICE, InferenceService
from services.frontend.state import State

# Threads of inference that compute at a time; one alone would idle whenever grpc hands it the next request.
_AT_ONCE = 2
# Threads for what is quick, for streams (each keeps its own) and for refusing more of them, and calls at a
# time: beyond that grpc refuses them with RESOURCE_EXHAUSTED.
_QUICK, _STREAMS, _CALLS = 16, STREAMS + 8, 4096


class _Pooled:
    """A behavior that grpc runs on the threads of ``experimental_thread_pool``."""

    def __init__(self, behavior: Any, pool: ThreadPoolExecutor) -> None:
        self._behavior = behavior
        self.experimental_thread_pool = pool

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._behavior(request, context)


class _Handlers:
    """Takes a server's place in generated code, and keeps the handlers it is given."""

    def __init__(self) -> None:
        self.by_name: dict[str, grpc.RpcMethodHandler] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]
    ) -> None:
        self.by_name.update(handlers)


class GrpcServer:
    """One port. Listens from the start; ``serve`` answers until ``stop``."""

    def __init__(
        self,
        at: GrpcSettings,
        state: State,
        settings: ServerSettings,
        guard: Guard,
        *,
        one_of_many: bool = False,
    ) -> None:
        """``ConfigError`` when it cannot listen. ``one_of_many``: other processes listen there too."""
        self._drain_s = settings.drain_s
        runners = Runners(_AT_ONCE, at.threads, "grpc-infer")
        self._pools = {
            "infer": runners,
            "quick": ThreadPoolExecutor(_QUICK, "grpc-quick"),
            "stream": ThreadPoolExecutor(_STREAMS, "grpc-stream"),
        }
        self._server = grpc.server(
            self._pools["quick"],
            maximum_concurrent_rpcs=_CALLS,
            options=[
                ("grpc.max_receive_message_length", settings.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", int(one_of_many)),
            ],
        )
        self._health = Health(state, self._pools["quick"])
        self._add_services(
            Inference(state, settings, guard, runners), InferenceService(state, guard)
        )
        if at.reflection:
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        host = f"[{at.host}]" if ":" in at.host else at.host
        self.url = f"{host}:{self._listen(at, host)}"
        self.started = False
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()

    def _add_services(self, inference: Inference, service: InferenceService) -> None:
        handlers = _Handlers()
        add_GRPCInferenceServiceServicer_to_server(service, handlers)
        # In bytes and out bytes: see request.py and response.py.
        handlers.by_name["ModelInfer"] = grpc.unary_unary_rpc_method_handler(
            _Pooled(inference.one, self._pools["infer"])
        )
        handlers.by_name["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            _Pooled(inference.stream, self._pools["stream"])
        )
        self._server.add_registered_method_handlers(SERVICE, handlers.by_name)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)

    def _listen(self, at: GrpcSettings, host: str) -> int:
        """The port it listens on."""
        address = f"{host}:{at.port}"
        try:
            if at.tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials(at.tls))
        except RuntimeError:
            mend = (
                "stop the process that listens there, or set server.grpc.port (0 takes a free one), or "
                "server.grpc: null"
            )
            if at.tls is not None:
                files = f"{at.tls.certificate_file} and {at.tls.key_file}"
                mend += f"; or server.grpc.tls: {files} cannot be used"
            raise ConfigError(f"server.grpc: cannot listen on {address}: {mend}") from None
        return int(port)

    async def serve(self) -> None:
        """Serve until ``stop``; then what was accepted is answered."""
        self._server.start()
        self.started = True
        await self._stopping.wait()
        self._health.stop()
        ended = self._server.stop(self._drain_s)
        waiting = asyncio.create_task(asyncio.to_thread(ended.wait))
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait({waiting, at_once}, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if not waiting.done():
            self._server.stop(None)
            await waiting
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def stop(self, *, at_once: bool = False) -> None:
        """Begin the end; ``at_once`` drops what is still being answered. Called on the event loop."""
        self._stopping.set()
        if at_once:
            self._at_once.set()
