"""gRPC as one of several servers in a process.

Calls are taken up when their request is there (`arrivals.py`): inference on the server's own thread, whatever
else is quick on a few others. Streams keep a thread each while they last.
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
from services.frontend.grpc.age import age_options
from services.frontend.grpc.arrivals import Arrivals, Direct
from services.frontend.grpc.credentials import credentials
from services.frontend.grpc.health import Health
from services.frontend.grpc.infer import STREAMS, Inference
from services.frontend.grpc.lookup import SERVICE as LOOKUP
from services.frontend.grpc.lookup import LookupService, lookup_handlers
from services.frontend.grpc.service import SERVICE, InferenceService
from services.frontend.state import State

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
        self._pools = {
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
                *age_options(at.max_connection_age_s, settings.drain_s),
            ],
        )
        arrivals = Arrivals(self._pools["quick"])
        self._health = Health(state, arrivals, ("", SERVICE, LOOKUP))
        self._add_services(
            Inference(state, settings, guard), InferenceService(state, guard), arrivals
        )
        self._server.add_registered_method_handlers(
            LOOKUP, lookup_handlers(LookupService(state, settings, guard), guard, arrivals)
        )
        if at.reflection:
            names = (SERVICE, LOOKUP, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        host = f"[{at.host}]" if ":" in at.host else at.host
        self.url = f"{host}:{self._listen(at, host)}"
        self.started = False
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()

    def _add_services(
        self, inference: Inference, service: InferenceService, arrivals: Arrivals
    ) -> None:
        handlers = _Handlers()
        add_GRPCInferenceServiceServicer_to_server(service, handlers)
        for name, handler in handlers.by_name.items():
            if handler.unary_unary is not None:
                handlers.by_name[name] = grpc.unary_unary_rpc_method_handler(
                    _Pooled(handler.unary_unary, arrivals),
                    handler.request_deserializer,
                    handler.response_serializer,
                )
        # In bytes and out bytes: see request.py and response.py.
        handlers.by_name["ModelInfer"] = grpc.unary_unary_rpc_method_handler(
            Direct(inference.begin, arrivals)
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
