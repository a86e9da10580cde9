"""``ModelInfer`` and ``ModelStreamInfer``: from bytes to bytes, on a thread of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from time import perf_counter_ns
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from hps import metric_names as m
from hps.config.server_settings import ServerSettings
from hps.errors import HpsError, Unavailable
from hps.metrics import Metrics
from services.frontend.auth import Guard
from services.frontend.errors import Status, status_of, told
from services.frontend.grpc.callers import check
from services.frontend.grpc.failures import count_failure
from services.frontend.grpc.request import Address, GrpcCall, Parser, address
from services.frontend.grpc.response import Encoder
from services.frontend.grpc.runners import Runners
from services.frontend.grpc.waiting import Cancelling, deadline_of, wait_for
from services.frontend.grpc.wire import field
from services.frontend.state import Entry, State

# Set by clients that want the first error of a stream as the stream's own (Triton's extension).
_STRICT_STREAM = ("triton_grpc_error", "true")
# Streams at a time.
STREAMS = 128
_INFER_RESPONSE = 0x12  # field of ModelStreamInferResponse by its tag


class Route:
    """What reads the requests to one name, writes their answers and counts them. Used by any thread."""

    def __init__(self, entry: Entry, metrics: Metrics, max_keys: int) -> None:
        self.entry = entry
        self.parser = Parser(entry.name, entry.endpoint.rules, max_keys)
        self.encoder = Encoder(entry.name, entry.version)
        self.observe_ok = metrics.histogram(
            m.REQUEST_SECONDS, "grpc", "infer", entry.name, "OK"
        ).observe

    def encode(self, call: GrpcCall, result: Any) -> bytes:
        """The answer that carries ``result``."""
        outputs = self.entry.endpoint.outputs(call, result)
        freshness = self.entry.freshness
        stale_s = freshness.flag() if freshness.stale_s else 0
        return self.encoder.encode(call, result.defaulted, result.degraded, stale_s, outputs)


class Inference:
    """Answers inference requests, each on a thread of its own until the answer is there; ``runners`` has
    those of ``one``."""

    def __init__(
        self, state: State, settings: ServerSettings, guard: Guard, runners: Runners
    ) -> None:
        self._runners = runners
        self._state = state
        self._guard = guard
        self._timeout_s = settings.request_timeout_ms / 1e3
        self._max_keys = settings.max_keys
        self._streams = threading.Semaphore(STREAMS)
        self._routes: dict[str, Route] = {}
        state.watch(self._find_routes)

    def _find_routes(self) -> None:
        """Take over the names that are served now; one that is served as before keeps its route."""
        known = {route.entry: route for route in self._routes.values()}
        metrics = self._state.metrics
        self._routes = {
            name: known.get(entry) or Route(entry, metrics, self._max_keys)
            for name, entry in self._state.entries.items()
        }

    def one(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """``ModelInfer``."""
        try:
            self._check(context)
            return self._answer(message, context, self._runners.waiting, Cancelling(context))
        except HpsError as error:
            context.abort(grpc.StatusCode[status_of(error).grpc], str(error))
            raise AssertionError("abort raises") from None

    def stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """``ModelStreamInfer``: one answer or error message for each request, in their order."""
        if not self._streams.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{STREAMS} streams are open already; close some, or use ModelInfer",
            )
        try:
            self._check(context)
            yield from self._answers(messages, context)
        except HpsError as error:
            context.abort(grpc.StatusCode[status_of(error).grpc], str(error))
        finally:
            self._streams.release()

    def _answers(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        cancelling = Cancelling(context)
        strict = _STRICT_STREAM in context.invocation_metadata()
        for message in messages:
            try:
                answer = self._answer(message, context, nullcontext, cancelling)
                yield field(_INFER_RESPONSE, answer)
            except HpsError as error:
                if strict:
                    raise
                yield _stream_error(message, error)

    def _answer(
        self,
        message: bytes,
        context: grpc.ServicerContext,
        waiting: Callable[[], AbstractContextManager[None]],
        cancelling: Cancelling,
    ) -> bytes:
        """The answer to a request that may be made; entered ``waiting`` while others work at it. Raises what
        its client is to be told."""
        started = perf_counter_ns()
        route: Route | None = None
        known_as = ""
        try:
            to = address(message)
            known_as = to.id
            route = self._route(to)
            call = route.parser.parse(message, to)
            parsed = perf_counter_ns()
            deadline = deadline_of(context, call.form.timeout_us * 1e-6 or self._timeout_s)
            future = route.entry.endpoint.submit(call, deadline)
            if not future.done():
                with waiting():
                    wait_for(future, deadline, cancelling)
            result = future.result()
            inferred = perf_counter_ns()
            answer = route.encode(call, result)
            done = perf_counter_ns()
            route.entry.statistics.succeeded(call.batch, started, parsed, inferred, done)
            route.observe_ok((done - started) * 1e-9)
            return answer
        except Exception as error:
            answered = told(error, known_as)
            self._count_failure(route, status_of(answered), started)
            raise answered from None

    def _check(self, context: grpc.ServicerContext) -> None:
        started = perf_counter_ns()
        try:
            check(self._guard, context, "read")
        except HpsError as error:
            self._count_failure(None, status_of(error), started)
            raise

    def _route(self, to: Address) -> Route:
        route = self._routes.get(to.model)
        if route is None or to.version not in ("", route.entry.version):
            self._state.entry(to.model, to.version or None)
            raise Unavailable("the model has just become ready; ask again")
        return route

    def _count_failure(self, route: Route | None, status: Status, started: int) -> None:
        entry = None if route is None else route.entry
        count_failure(self._state.metrics, "infer", entry, status, started)


def _stream_error(message: bytes, error: HpsError) -> bytes:
    response = pb.ModelStreamInferResponse(error_message=str(error))
    with suppress(HpsError):  # which is the error
        response.infer_response.id = address(message).id
    told_so: bytes = response.SerializeToString()
    return told_so
