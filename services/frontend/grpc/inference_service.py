"""``ModelInfer`` and ``ModelStreamInfer``: from request bytes to response bytes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from hps.config.server_settings import ServerSettings
from hps.errors import HpsError, Unavailable
from hps.node.served_versions import CURRENT
from services.frontend.auth import Authorizer
from services.frontend.grpc import responders
from services.frontend.grpc.call_identity import address_of, caller_of, check, metadata_value
from services.frontend.grpc.inference import GrpcInference
from services.frontend.grpc.protobuf_wire import field
from services.frontend.grpc.request import (
    GrpcRequestParser,
    ModelReference,
    address,
)
from services.frontend.grpc.responders import BlockingResponder, UnaryResponder
from services.frontend.grpc.response import GrpcResponseEncoder
from services.frontend.grpc.status import abort
from services.frontend.grpc.stream_limit import OpenStream, StreamLimit
from services.frontend.inference import InferencePort
from services.frontend.inference_request import InferenceRequest
from services.frontend.inference_route import InferenceRoute
from services.frontend.state import FrontendState, ServedEndpoint

# Set by clients that want the first error of a stream as the stream's status (Triton's extension).
_STRICT_STREAM = ("triton_grpc_error", "true")
_INFER_RESPONSE = 0x12  # tag of the field in ModelStreamInferResponse
# The largest request that is copied on the thread that received it: about 0.2 ms.
_MAX_COPIED_BYTES = 1 << 20

GrpcRoute = InferenceRoute[GrpcRequestParser, bytes]


class _ModelInference(GrpcInference):
    """A ``ModelInferRequest``: its message, the addressed model and the model's route."""

    __slots__ = ("message", "route", "to")

    message: bytes
    to: ModelReference
    route: GrpcRoute

    def answer(self, future: Future[Any]) -> bytes:
        result, call = future.result(), self.call
        answer = self.encode(self.route.encoder, result)
        self.succeed(result, future, self.route.observe, call.batch, self.observed_inputs())
        return answer

    def run(self) -> None:
        """Decode and submit the request."""
        route = self.route
        try:
            if route.split is None:
                call = self._parse(route)
            else:
                self.route, call = route.split.decode(self._header, self._parse)
                self.redirect(self.route.entry, len(self.message))
            self.submit(call)
        except Exception as error:
            self.reject(error)
        else:
            self.wait()

    def _parse(self, route: GrpcRoute) -> InferenceRequest:
        return route.parser.parse(self.message, self.to)

    def _header(self, name: str) -> str | None:
        return metadata_value(self.reply.context, name)

    def choose(self, route: GrpcRoute) -> None:
        """Take ``route``; of one that is divided, the choice, unless that needs the decoded request."""
        split = route.split
        if split is not None and not split.needs_body:
            route = split.choose(self._header, None)
        self.route = route
        self.entry = route.entry


class GrpcInferenceService:
    """Answers inference requests: single ones when their results are ready, those of a stream in order."""

    def __init__(self, state: FrontendState, settings: ServerSettings, guard: Authorizer) -> None:
        self._state = state
        self._port = InferencePort(state, "grpc", "infer", settings.request_timeout_ms)
        self._guard = guard
        self._max_keys = settings.max_keys
        self._streams = StreamLimit()
        self._routes: dict[tuple[str, str], GrpcRoute] = {}
        state.on_models_changed(self._find_routes)

    def _find_routes(self) -> None:
        """Update the routes to the served names; an unchanged name keeps its route."""
        known = {r.entry: r for r in self._routes.values() if r.split is None}
        routes: dict[tuple[str, str], GrpcRoute] = {}
        for name, found in self._state.addresses.items():
            for version, entry in found.items():
                route = known.get(entry) or self._make_route(entry)
                known[entry] = routes[name, version] = route
            if (split := self._state.splits.get(name)) is not None:
                chosen = {version: known[entry] for version, entry in found.items()}
                routes[name, CURRENT] = chosen[CURRENT].divided(split, chosen)
        self._routes = routes

    def _make_route(self, entry: ServedEndpoint) -> GrpcRoute:
        parser = GrpcRequestParser(entry.name, entry.endpoint.rules, self._max_keys)
        encoder = GrpcResponseEncoder(entry.name, entry.version)
        return InferenceRoute(entry, parser, encoder, self._port.latency(entry, "OK"))

    def begin(self, message: bytes, reply: UnaryResponder) -> None:
        """``ModelInfer``."""
        inference = _ModelInference(self._port, reply)
        try:
            caller = caller_of(reply, self._guard)
        except Exception as error:
            inference.reject(error)
        else:
            self._begin(message, inference, caller)

    def stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """``ModelStreamInfer``: one response or error message per request, in order."""
        try:
            caller = self._check(BlockingResponder(context))
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
            self._begin(message, _ModelInference(self._port, reply), self._check(reply))
            try:
                answer = field(_INFER_RESPONSE, reply.result())
            except HpsError as error:
                if strict:
                    raise
                answer = _stream_error(message, error)
            stream.waits()
            yield answer

    def _begin(self, message: bytes, inference: _ModelInference, caller: str) -> None:
        """Admit an authenticated request and submit it."""
        try:
            inference.message = message
            inference.to = to = address(message)
            inference.choose(self._route(to))
            inference.enter(caller)
            rejection = inference.admit(len(message))
            if rejection is not None:
                inference.reject(rejection)
                return
            inference.reply.run(inference.run, _parsing_bytes(message, to, inference.route.parser))
        except Exception as error:
            inference.reject(error)

    def _check(self, reply: UnaryResponder) -> str:
        """Return the caller of a stream. A rejection ends the stream."""
        inference = _ModelInference(self._port, reply)
        try:
            return check(self._guard, reply.context, "read")
        except HpsError as error:
            inference.fail(error)
            raise

    def _route(self, to: ModelReference) -> GrpcRoute:
        route = self._routes.get((to.model, to.version))
        if route is None:
            self._state.entry(to.model, to.version or None)
            raise Unavailable("the model has just become ready; retry")
        return route


def _parsing_bytes(message: bytes, to: ModelReference, parser: GrpcRequestParser) -> int:
    """Return the size of a request for ``UnaryResponder.run``.

    0 if it is sent on as it is: copying it takes less time than passing it to another thread.
    """
    size = len(message)
    if responders.LARGE_BYTES < size <= _MAX_COPIED_BYTES and parser.is_prepared(message, to):
        return 0
    return size


def _stream_error(message: bytes, error: HpsError) -> bytes:
    response = pb.ModelStreamInferResponse(error_message=str(error))
    with suppress(HpsError):  # an unreadable ID: ``error`` reports it
        response.infer_response.id = address(message).id
    encoded: bytes = response.SerializeToString()
    return encoded
