"""``ModelInfer`` and ``ModelStreamInfer``: from request bytes to response bytes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from hps.config.server_settings import ServerSettings
from hps.errors import HpsError, Unavailable
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from services.frontend.auth import Authorizer
from services.frontend.grpc.call_identity import CountedResponder, address_of, caller_of, check
from services.frontend.grpc.failures import count_failure, fail
from services.frontend.grpc.pending import PendingAnswers, call_deadline
from services.frontend.grpc.protobuf_wire import field
from services.frontend.grpc.request import (
    GrpcInferenceRequest,
    GrpcRequestParser,
    ModelReference,
    address,
)
from services.frontend.grpc.request_naming import identify
from services.frontend.grpc.responders import BlockingResponder, CallContext, UnaryResponder
from services.frontend.grpc.response import GrpcResponseEncoder
from services.frontend.grpc.status import abort
from services.frontend.grpc.stream_limit import OpenStream, StreamLimit
from services.frontend.shared_memory import SharedMemoryRegistry
from services.frontend.state import FrontendState, ServedEndpoint
from services.frontend.statistics import execution_samples, queued_ns

# Set by clients that want the first error of a stream as the stream's status (Triton's extension).
_STRICT_STREAM = ("triton_grpc_error", "true")
_INFER_RESPONSE = 0x12  # tag of the field in ModelStreamInferResponse


class GrpcRoute:
    """Parser, encoder and latency histogram of one served name. Thread-safe."""

    def __init__(
        self, entry: ServedEndpoint, metrics: Metrics, max_keys: int, regions: SharedMemoryRegistry
    ) -> None:
        self.entry = entry
        self.parser = GrpcRequestParser(entry.name, entry.endpoint.rules, max_keys)
        self.encoder = GrpcResponseEncoder(entry.name, entry.version, regions)
        self.observe_ok = metrics.histogram(
            m.REQUEST_SECONDS, "grpc", "infer", entry.name, entry.version, "OK"
        ).observe

    def encode(self, call: GrpcInferenceRequest, result: Any) -> bytes:
        """Return the encoded response with ``result``."""
        outputs = self.entry.endpoint.outputs(call, result)
        freshness = self.entry.freshness
        stale_s = freshness.flag() if freshness.stale_s else result.stale_s
        return self.encoder.encode(call, result.defaulted, result.degraded, stale_s, outputs)


class GrpcInferenceService:
    """Answers inference requests: single ones when their results are ready, those of a stream in order."""

    def __init__(
        self,
        state: FrontendState,
        settings: ServerSettings,
        guard: Authorizer,
        pending: PendingAnswers,
    ) -> None:
        self._pending = pending
        self._state = state
        self._guard = guard
        self._timeout_s = settings.request_timeout_ms / 1e3
        self._max_keys = settings.max_keys
        self._streams = StreamLimit()
        self._clients = state.admission.clients
        self._routes: dict[str, GrpcRoute] = {}
        state.on_models_changed(self._find_routes)

    def _find_routes(self) -> None:
        """Update the routes to the served names; an unchanged name keeps its route."""
        known = {route.entry: route for route in self._routes.values()}
        metrics, regions = self._state.metrics, self._state.regions
        self._routes = {
            name: known.get(entry) or GrpcRoute(entry, metrics, self._max_keys, regions)
            for name, entry in self._state.entries.items()
        }

    def begin(self, message: bytes, reply: UnaryResponder) -> None:
        """``ModelInfer``."""
        started = perf_counter_ns()
        try:
            caller = caller_of(reply, self._guard)
        except Exception as error:
            fail(error, reply, self._state, "infer", None, started)
        else:
            self._begin(message, reply, started, caller)

    def stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """``ModelStreamInfer``: one response or error message per request, in order."""
        try:
            caller = self._check(context)
            stream = self._streams.enter(caller or address_of(context), context)
        except HpsError as error:
            abort(error, context)
        try:
            yield from self._answers(messages, context, stream)
        except HpsError as error:
            abort(error, context)
        finally:
            self._streams.leave(stream)

    def _answers(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, stream: OpenStream
    ) -> Iterator[bytes]:
        strict = _STRICT_STREAM in context.invocation_metadata()
        reply = BlockingResponder(context)
        for message in messages:
            stream.works()
            # Checked per message: a stream may outlive its caller's key.
            self._begin(message, reply, perf_counter_ns(), self._check(context))
            try:
                answer = field(_INFER_RESPONSE, reply.result())
            except HpsError as error:
                if strict:
                    raise
                answer = _stream_error(message, error)
            stream.waits()
            yield answer

    def _begin(self, message: bytes, reply: UnaryResponder, started: int, caller: str) -> None:
        """Admit an authenticated request and submit it."""
        route: GrpcRoute | None = None
        request_id = ""
        try:
            to = address(message)
            request_id = to.id
            route = self._route(to)
            if self._clients is not None:
                reply = CountedResponder(reply, self._clients, caller)
            endpoint, size = route.entry.endpoint, len(message)
            expected = size if endpoint.is_long else None
            refusal = None
            if expected is not None:
                refusal = endpoint.reserve(expected)
            elif endpoint.is_saturated:
                refusal = endpoint.rejection(size)
            if refusal is not None:
                fail(refusal, reply, self._state, "infer", route.entry, started, request_id)
                return
            submit = partial(self._submit, message, to, route, reply, started, expected)
            reply.run(submit, size)
        except Exception as error:
            entry = None if route is None else route.entry
            fail(error, reply, self._state, "infer", entry, started, request_id)

    def _submit(
        self,
        message: bytes,
        to: ModelReference,
        route: GrpcRoute,
        reply: UnaryResponder,
        started: int,
        expected: int | None,
    ) -> None:
        """Parse and submit a request. ``expected``: the bytes reserved for it in the byte budget, if any."""
        endpoint = route.entry.endpoint
        try:
            call = self._read(message, to, route, reply, expected)
            parsed = perf_counter_ns()
            identify(call, route.entry.name, reply.context, started, self._state.observer)
            deadline = call_deadline(reply.context, call.form.timeout_us * 1e-6 or self._timeout_s)
        except Exception as error:
            if expected is not None:
                endpoint.cancel_reservation(expected)
            fail(error, reply, self._state, "infer", route.entry, started, to.id)
            return
        try:
            future = endpoint.submit(call, deadline, reserved=expected)
        except Exception as error:
            fail(error, reply, self._state, "infer", route.entry, started, to.id, call.origin)
            return
        end = partial(self._end, reply, route, call, started, parsed)
        self._pending.add(future, deadline, reply, end)

    def _read(
        self,
        message: bytes,
        to: ModelReference,
        route: GrpcRoute,
        reply: UnaryResponder,
        expected: int | None,
    ) -> GrpcInferenceRequest:
        """Parse the request and read its inputs in shared memory."""
        call = route.parser.parse(message, to)
        if (refs := call.form.memory_refs) is not None:
            endpoint = route.entry.endpoint
            if expected is not None:
                endpoint.require_bytes(refs.size, expected)
            elif endpoint.is_saturated:
                endpoint.require_capacity(refs.size)
            caller = address_of(reply.context)
            inputs, call.targets = self._state.regions.take(refs, caller)
            call.inputs.update(inputs)
        return call

    def _end(
        self,
        reply: UnaryResponder,
        route: GrpcRoute,
        call: GrpcInferenceRequest,
        started: int,
        parsed: int,
        future: Future[Any],
    ) -> None:
        """Answer with the result or the error of ``future``, which is done."""
        entry = route.entry
        try:
            # Raising the failure would make a reference cycle.
            if (failure := future.exception()) is not None:
                fail(failure, reply, self._state, "infer", entry, started, call.id, call.origin)
                return
            result = future.result()
            inferred = perf_counter_ns()
            answer = route.encode(call, result)
            done = perf_counter_ns()
            route.entry.statistics.succeeded(
                call.batch,
                started,
                parsed,
                inferred,
                done,
                queued_ns(future),
                execution_samples(future),
            )
            route.observe_ok((done - started) * 1e-9)
            if call.origin is not None:
                self._state.observer.answered(
                    "grpc",
                    call.origin,
                    route.entry.endpoint,
                    call,
                    result,
                    started,
                    parsed,
                    inferred,
                    done,
                )
        except Exception as error:
            fail(error, reply, self._state, "infer", route.entry, started, call.id, call.origin)
        else:
            reply.answer(answer)

    def _check(self, context: CallContext) -> str:
        started = perf_counter_ns()
        try:
            return check(self._guard, context, "read")
        except HpsError as error:
            count_failure(error, self._state.metrics, "infer", None, started)
            raise

    def _route(self, to: ModelReference) -> GrpcRoute:
        route = self._routes.get(to.model)
        if route is None or to.version not in ("", route.entry.version):
            self._state.entry(to.model, to.version or None)
            raise Unavailable("the model has just become ready; retry")
        return route


def _stream_error(message: bytes, error: HpsError) -> bytes:
    response = pb.ModelStreamInferResponse(error_message=str(error))
    with suppress(HpsError):  # an unreadable ID: ``error`` reports it
        response.infer_response.id = address(message).id
    told_so: bytes = response.SerializeToString()
    return told_so
