"""``hps.v1.Lookup``: lookups for other nodes, with the source of each row."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from time import perf_counter_ns
from typing import Any

import grpc

from hps.bounded_memo import memoize
from hps.config.auth import Role
from hps.config.server_settings import ServerSettings
from hps.lookup.base import LookupModel
from hps.lookup.remote.model_description import describe_model
from hps.observability.profile import Profile
from hps.tracing import RequestContext
from hps.types import LookupRequest, LookupResult
from hps.v1 import lookup_pb2 as pb
from services.frontend.auth import Authorizer
from services.frontend.grpc.call_identity import CountedResponder, caller_of
from services.frontend.grpc.failures import fail
from services.frontend.grpc.lookup_request import LookupRequestParser
from services.frontend.grpc.method_handlers import UnaryHandler
from services.frontend.grpc.pending import PendingAnswers, call_deadline
from services.frontend.grpc.protobuf_wire import field, parse_message
from services.frontend.grpc.request_naming import call_identity, request_context
from services.frontend.grpc.responders import CallContext, UnaryResponder
from services.frontend.grpc.unary_services import handlers_of
from services.frontend.inference_request import InferenceRequest, RequestTemplate
from services.frontend.state import FrontendState, ServedEndpoint
from services.frontend.statistics import execution_samples, queued_ns

SERVICE = "hps.v1.Lookup"
_LOOKUP = ".lookup"
_PROFILE = 0x4A  # tag of the field in LookupResponse

Version = tuple[str, str]
"""A model's name and one of its versions."""

# Parsers kept, and the longest `Asked` of one; longer ones are not worth their memory.
_PARSERS_KEPT, _ASKED_BYTES = 256, 16_384


class LookupService:
    """The lookup service. Thread-safe.

    A replaced version that front ends ask for by number is answered until they have noticed the replacement
    (`models.linger_s`).
    """

    roles: Mapping[str, Role] = {"Describe": "read", "Serving": "read"}

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
        self._digests: dict[ServedEndpoint, int] = {}
        self._current: dict[Version, ServedEndpoint] = {}
        self._former: dict[Version, ServedEndpoint] = {}
        self._asked_by_version: set[ServedEndpoint] = set()
        # Parsers by the bytes of `Asked`. They keep references to entries.
        self._parsers: dict[bytes, LookupRequestParser] = {}
        state.on_models_changed(self._describe_all)

    def _describe_all(self) -> None:
        lookups = [each for each in self._state.entries.values() if each.name.endswith(_LOOKUP)]
        before, self._current = self._current, {_version_of(entry): entry for entry in lookups}
        models = {model for model, _ in self._current}
        replaced = {
            of: entry
            for of, entry in before.items()
            if of not in self._current and of[0] in models and entry in self._asked_by_version
        }
        self._keep(
            {of: each for of, each in self._former.items() if of not in self._current} | replaced
        )
        self._state.call_later(self._state.linger_s, lambda: self._drop(replaced))

    def _keep(self, former: dict[Version, ServedEndpoint]) -> None:
        self._former = former
        entries = {*self._current.values(), *former.values()}
        self._asked_by_version &= entries
        self._parsers = {}
        self._digests = {entry: self._described(entry).digest for entry in entries}

    def _drop(self, replaced: dict[Version, ServedEndpoint]) -> None:
        """Drop versions whose replacement front ends have noticed by now."""
        gone = set(replaced.values())
        self._keep({of: entry for of, entry in self._former.items() if entry not in gone})
        replaced.clear()

    def Serving(self, request: Any, context: CallContext) -> Any:
        response = pb.ServingResponse(ready=self._state.ready)
        for former, entries in ((False, self._current), (True, self._former)):
            for (model, version), entry in entries.items():
                digest = self._digest(entry)
                response.models.add(model=model, version=int(version), digest=digest, former=former)
        return response

    def Describe(self, request: Any, context: CallContext) -> Any:
        return self._described(self._entry(request))

    def _described(self, entry: ServedEndpoint) -> Any:
        served = entry.served
        return describe_model(
            LookupModel(
                served.name,
                served.version,
                served.tables,
                served.engine.features,
                served.spec.max_batch_size,
                self._max_keys,
            )
        )

    def begin(self, message: bytes, reply: UnaryResponder) -> None:
        """``Lookup``."""
        reply.run(partial(self._begin, message, reply, perf_counter_ns()), len(message))

    def _begin(self, message: bytes, reply: UnaryResponder, started: int) -> None:
        entry: ServedEndpoint | None = None
        origin: RequestContext | None = None
        try:
            caller = caller_of(reply, self._guard)
            if (clients := self._state.admission.clients) is not None:
                reply = CountedResponder(reply, clients, caller)
            request = parse_message(pb.LookupRequest, message)
            parsers = self._parsers  # replaced when the served models change
            parser = parsers.get(request.asked)
            if parser is None:
                description = parse_message(pb.Asked, request.asked)
                entry = self._entry(description)
                parser = self._make_parser(description, entry)
                _keep_parser(parsers, request.asked, parser)
            entry = parser.entry
            entry.freshness.require()
            keys = parser.keys(request)
            read = perf_counter_ns()
            if request.profile:
                origin = Profile(began=started)
            else:
                identity = call_identity("", reply.context)
                origin = request_context(identity, entry.name, started, self._state.observer)
            deadline = call_deadline(reply.context, self._timeout_s)
            lookup_request: LookupRequest | None = None
            if origin is None and parser.prepared is not None:
                start = partial(parser.prepared, keys, deadline)
            else:
                features = parser.features(request, keys)
                lookup_request = LookupRequest(
                    features, deadline, parser.report, None, parser.by_table, origin
                )
                # A profile covers its own request alone, so it bypasses batching.
                engine = entry.served.engine if request.profile else entry.lookup
                start = partial(engine.submit, lookup_request)
            future = entry.endpoint.admit(start, len(message), deadline)
        except Exception as error:
            fail(error, reply, self._state, "lookup", entry, started, origin=origin)
            return
        end = partial(self._end, reply, parser, lookup_request, started, read)
        self._pending.add(future, deadline, reply, end)

    def _end(
        self,
        reply: UnaryResponder,
        parser: LookupRequestParser,
        lookup_request: LookupRequest | None,
        started: int,
        parsed: int,
        future: Future[LookupResult],
    ) -> None:
        """Answer with the result or the error of ``future``, which is done.

        ``lookup_request`` is None unless the request is observed or profiled.
        """
        entry = parser.entry
        origin = None if lookup_request is None else lookup_request.origin
        try:
            # Raising the failure would make a reference cycle.
            if (failure := future.exception()) is not None:
                fail(failure, reply, self._state, "lookup", entry, started, origin=origin)
                return
            result = future.result()
            inferred = perf_counter_ns()
            freshness = entry.freshness
            stale_s = freshness.flag() if freshness.stale_s else result.stale_s
            answer = parser.answer(result, stale_s)
            done = perf_counter_ns()
            batch, queued = parser.batch, queued_ns(future)
            entry.statistics.succeeded(
                batch, started, parsed, inferred, done, queued, execution_samples(future)
            )
            parser.observe((done - started) * 1e-9)
            if isinstance(origin, Profile):
                answer += field(_PROFILE, _profiled(origin, started, parsed, inferred, done))
            elif lookup_request is not None and origin is not None:
                call = InferenceRequest(
                    RequestTemplate(),
                    {name: keys.keys for name, keys in lookup_request.features.items()},
                )
                call.batch = batch
                self._state.observer.answered(
                    "grpc", origin, entry.endpoint, call, result, started, parsed, inferred, done
                )
        except Exception as error:
            fail(error, reply, self._state, "lookup", entry, started, origin=origin)
        else:
            reply.answer(answer)

    def _make_parser(self, description: Any, entry: ServedEndpoint) -> LookupRequestParser:
        digest, metrics = self._digest(entry), self._state.metrics
        return LookupRequestParser(description, entry, digest, self._max_keys, metrics)

    def _digest(self, entry: ServedEndpoint) -> int:
        """Return the digest of the entry's description; the entry may be out of service by now."""
        return self._digests.get(entry) or int(self._described(entry).digest)

    def _entry(self, request: Any) -> ServedEndpoint:
        version = str(request.version or "") or None
        if version is not None and (former := self._former.get((request.model, version))):
            return former
        entry = self._state.entry(request.model + _LOOKUP, version)
        if version is not None:
            self._asked_by_version.add(entry)
        return entry


def lookup_handlers(service: LookupService, guard: Authorizer) -> dict[str, grpc.RpcMethodHandler]:
    """Return the handlers of the service's methods; ``Lookup`` takes and returns bytes."""
    return {
        **handlers_of(pb.DESCRIPTOR.services_by_name["Lookup"], service, guard),
        "Lookup": grpc.unary_unary_rpc_method_handler(UnaryHandler(service.begin)),
    }


def _version_of(entry: ServedEndpoint) -> Version:
    return entry.served.name, entry.version


def _keep_parser(
    parsers: dict[bytes, LookupRequestParser], key: bytes, parser: LookupRequestParser
) -> None:
    if len(key) <= _ASKED_BYTES:
        parser.prepare()
        memoize(parsers, key, parser, _PARSERS_KEPT)


def _profiled(profile: Profile, started: int, parsed: int, inferred: int, done: int) -> bytes:
    profile.stage("decode", started, parsed)
    profile.stage("encode", inferred, done)
    profile.ns = done - started
    return profile.packed()
