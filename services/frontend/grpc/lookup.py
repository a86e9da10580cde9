"""``hps.v1.Lookup``: lookups for other nodes, with the source of each row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

from hps.bounded_memo import memoize
from hps.config.auth import Role
from hps.config.server_settings import ServerSettings
from hps.config.traffic_settings import RequestKey
from hps.errors import HpsError
from hps.lookup.base import LookupModel
from hps.lookup.remote.model_description import describe_model
from hps.node.served_versions import CURRENT
from hps.node.traffic_split import ValueOf
from hps.observability.profile import Profile
from hps.types import JaggedKeys, LookupRequest, LookupResult
from hps.v1 import lookup_pb2 as pb
from services.frontend.auth import Authorizer
from services.frontend.endpoints import Output
from services.frontend.grpc.call_identity import caller_of, metadata_value
from services.frontend.grpc.inference import GrpcInference
from services.frontend.grpc.lookup_request import LookupRequestParser
from services.frontend.grpc.method_handlers import UnaryHandler
from services.frontend.grpc.protobuf_wire import field, parse_message
from services.frontend.grpc.responders import CallContext, UnaryResponder
from services.frontend.grpc.unary_services import handlers_of
from services.frontend.inference import InferencePort
from services.frontend.shadow import Shadow
from services.frontend.state import FrontendState, ServedEndpoint
from services.frontend.statistics import Stages

SERVICE = "hps.v1.Lookup"
_LOOKUP = ".lookup"
_PROFILE = 0x4A  # tag of the field in LookupResponse

Version = tuple[str, str]
"""A model's name and one of its versions."""

# Parsers kept, and the longest `Asked` of one; longer ones are not worth their memory.
_PARSERS_KEPT, _ASKED_BYTES = 256, 16_384


class _LookupInference(GrpcInference):
    """A ``LookupRequest``; it has ``features`` unless a prepared lookup answers it."""

    __slots__ = ("features", "parser", "profile")

    parser: LookupRequestParser

    def __init__(self, port: InferencePort, reply: UnaryResponder) -> None:
        super().__init__(port, reply)
        self.features: Mapping[str, JaggedKeys] = {}
        self.profile: Profile | None = None

    def answer(self, future: Future[LookupResult]) -> bytes:
        parser, result = self.parser, future.result()
        answer = parser.answer(result, self.mark_inferred(result))
        is_observed = self.origin is not None
        keys = {name: each.keys for name, each in self.features.items()} if is_observed else {}
        stages = self.succeed(result, future, parser.observe, parser.batch, keys)
        return answer if self.profile is None else answer + _profile_field(self.profile, stages)


class LookupService:
    """The lookup service. Thread-safe.

    A replaced version that front ends ask for by number is answered until they have noticed the replacement
    (`models.linger_s`).
    """

    roles: Mapping[str, Role] = {"Describe": "read", "Serving": "read"}

    def __init__(self, state: FrontendState, settings: ServerSettings, guard: Authorizer) -> None:
        self._state = state
        self._port = InferencePort(state, "grpc", "lookup", settings.request_timeout_ms)
        self._guard = guard
        self._max_keys = settings.max_keys
        self._digests: dict[ServedEndpoint, int] = {}
        self._current: dict[Version, ServedEndpoint] = {}
        self._former: dict[Version, ServedEndpoint] = {}
        self._asked_by_version: set[ServedEndpoint] = set()
        # Parsers by the bytes of `Asked`. They keep references to entries.
        self._parsers: dict[bytes, LookupRequestParser] = {}
        state.on_models_changed(self._describe_all)

    def _describe_all(self) -> None:
        lookups = [each for each in self._state.all_entries if each.name.endswith(_LOOKUP)]
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
                current = self._state.entries.get(entry.name)
                response.models.add(
                    model=model,
                    version=int(version),
                    digest=self._digest(entry),
                    former=former,
                    beside=not former and entry is not current,
                    labels=() if former else self._state.labels(entry),
                    traffic=self._rule(model) if entry is current else "",
                )
        return response

    def _rule(self, model: str) -> str:
        rule = self._state.require_node().models.names[model].traffic
        return "" if rule is None else json.dumps(rule.as_json(), sort_keys=True)

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
        inference = _LookupInference(self._port, reply)
        reply.run(partial(self._begin, message, inference), len(message))

    def _begin(self, message: bytes, inference: _LookupInference) -> None:
        reply = inference.reply
        try:
            inference.enter(caller_of(reply, self._guard))
            request = parse_message(pb.LookupRequest, message)
            parser = self._parser(request.asked)
            if parser.choose is not None:
                parser = parser.choose(partial(_value_of, reply.context, request, parser))
            inference.parser = parser
            entry = inference.entry = parser.entry
            entry.freshness.require()
            keys = parser.keys(request)
            inference.mark_decoded()
            deadline, profile = inference.deadline, None
            if request.profile:
                inference.profile = profile = Profile(began=inference.started)
            origin = profile or inference.origin
            if origin is None and parser.prepared is not None:
                start = partial(parser.prepared, keys, deadline)
            else:
                inference.features = features = parser.features(request, keys)
                lookup_request = parser.request(features, deadline, origin)
                # A profile covers its own request alone, so it bypasses batching.
                engine = entry.lookup if profile is None else entry.served.engine
                start = partial(engine.submit, lookup_request)
            inference.future = entry.endpoint.admit(start, len(message), deadline)
            shadow = None if parser.names_version else entry.shadow
            # Rows as they are stored can't be compared as numbers.
            if shadow is not None and not parser.stored_rows and shadow.takes():
                with suppress(HpsError):  # the live request goes on
                    self._mirror(shadow, inference, request, len(message))
        except Exception as error:
            inference.reject(error)
        else:
            inference.wait()

    def _mirror(self, shadow: Shadow, inference: _LookupInference, request: Any, size: int) -> None:
        """Mirror a lookup to the shadow version."""
        parser = inference.parser
        target = self._state.entry(shadow.target.name, shadow.target.version)
        features = parser.features(request, parser.keys(request))

        def submit(deadline: float) -> Future[LookupResult]:
            return target.lookup.submit(LookupRequest(features, deadline, by_table=parser.by_table))

        shadow.add(inference.future, _vectors, submit, _vectors, size)

    def _parser(self, asked: bytes) -> LookupRequestParser:
        """Return the parser of the requests with these bytes of ``Asked``."""
        parsers = self._parsers  # replaced when the served models change
        parser = parsers.get(asked)
        if parser is None:
            description = parse_message(pb.Asked, asked)
            parser = self._make_parser(description, self._entry(description))
            parser.choose = self._chooser(description, parser)
            if len(asked) <= _ASKED_BYTES:
                parser.prepare()
                memoize(parsers, asked, parser, _PARSERS_KEPT)
        return parser

    def _make_parser(self, description: Any, entry: ServedEndpoint) -> LookupRequestParser:
        digest, metrics = self._digest(entry), self._state.metrics
        return LookupRequestParser(description, entry, digest, self._max_keys, metrics)

    def _chooser(
        self, description: Any, current: LookupRequestParser
    ) -> Callable[[ValueOf], LookupRequestParser] | None:
        """Return the choice of a parser by the model's traffic rule, for requests that name no version."""
        name = current.entry.name
        split = self._state.splits.get(name)
        if split is None or description.version or description.label:
            return None
        found = self._state.addresses[name]
        parsers = {CURRENT: current}

        def choose(value_of: ValueOf) -> LookupRequestParser:
            reference = split.choose(value_of)
            parser = parsers.get(reference)
            if parser is None:  # threads may race; both parsers are right
                entry = found.get(reference, current.entry)
                parsers[reference] = parser = self._make_parser(description, entry)
                parser.prepare()
            return parser

        return choose

    def _digest(self, entry: ServedEndpoint) -> int:
        """Return the digest of the entry's description; the entry may be out of service by now."""
        return self._digests.get(entry) or int(self._described(entry).digest)

    def _entry(self, request: Any) -> ServedEndpoint:
        version = str(request.version or request.label)
        if former := self._former.get((request.model, version)):
            return former
        entry = self._state.entry(request.model + _LOOKUP, version)
        if version:
            self._asked_by_version.add(entry)
        return entry


def lookup_handlers(service: LookupService, guard: Authorizer) -> dict[str, grpc.RpcMethodHandler]:
    """Return the handlers of the service's methods; ``Lookup`` takes and returns bytes."""
    return {
        **handlers_of(pb.DESCRIPTOR.services_by_name["Lookup"], service, guard),
        "Lookup": grpc.unary_unary_rpc_method_handler(UnaryHandler(service.begin)),
    }


def _vectors(result: LookupResult) -> list[Output]:
    return list(result.vectors.items())


def _version_of(entry: ServedEndpoint) -> Version:
    return entry.served.name, entry.version


def _profile_field(profile: Profile, stages: Stages) -> bytes:
    started, parsed, inferred, done = stages
    profile.stage("decode", started, parsed)
    profile.stage("encode", inferred, done)
    profile.ns = done - started
    return field(_PROFILE, profile.packed())


def _value_of(
    context: CallContext, request: Any, parser: LookupRequestParser, key: RequestKey
) -> str | None:
    """Return a request's value for a traffic rule; lookups have no parameters."""
    if key.kind == "header":
        return metadata_value(context, key.name)
    return parser.first_key(request, key.name) if key.kind == "input" else None
