"""``hps.v1.Lookup``: lookups for other machines, with a report of where each row came from.

What comes is read by protobuf; keys are taken as they lie. Vectors are written behind a head each, and joined
once: protobuf would copy them twice more.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from time import perf_counter_ns
from typing import Any

import grpc
import numpy as np

from hps import metric_names as m
from hps.config.auth import Role
from hps.config.server_settings import ServerSettings
from hps.errors import BadRequest
from hps.lookup.base import LookupModel
from hps.lookup.remote.messages import described
from hps.tracing import Origin
from hps.types import JaggedKeys, LookupRequest, LookupResult
from hps.v1 import lookup_pb2 as pb
from services.frontend import faults
from services.frontend.auth import Guard
from services.frontend.call import Call, Form
from services.frontend.datatypes import DATATYPE_OF
from services.frontend.errors import shown
from services.frontend.grpc.arrivals import Arrivals, Direct, Reply
from services.frontend.grpc.callers import Counted, check
from services.frontend.grpc.failures import fail
from services.frontend.grpc.methods import handlers_of
from services.frontend.grpc.named import begun, named
from services.frontend.grpc.packed import FLOAT32, INT64, numbers
from services.frontend.grpc.pending import Pending, deadline_of
from services.frontend.grpc.wire import field, varint
from services.frontend.state import Entry, State
from services.frontend.statistics import queued_ns

SERVICE = "hps.v1.Lookup"
_LOOKUP = ".lookup"

Version = tuple[str, str]
"""A model and one of its versions."""

# Fields of LookupResponse and Vectors by their tags.
_VECTORS = 0x32
_SOURCES, _VERSIONS, _VALUES = 0x22, 0x2A, 0x32


class LookupService:
    """Any number of threads may call it. A version that is replaced while front ends ask for it by its number
    is answered for on, until they have noticed (`models.linger_s`)."""

    roles: Mapping[str, Role] = {"Describe": "read", "Serving": "read"}

    def __init__(
        self, state: State, settings: ServerSettings, guard: Guard, pending: Pending
    ) -> None:
        self._pending = pending
        self._state = state
        self._guard = guard
        self._timeout_s = settings.request_timeout_ms / 1e3
        self._max_keys = settings.max_keys
        self._digests: dict[Entry, int] = {}
        self._current: dict[Version, Entry] = {}
        self._former: dict[Version, Entry] = {}
        self._asked_by_version: set[Entry] = set()
        state.watch(self._describe_all)

    def _describe_all(self) -> None:
        lookups = [each for each in self._state.entries.values() if each.name.endswith(_LOOKUP)]
        before, self._current = self._current, {_of(entry): entry for entry in lookups}
        models = {model for model, _ in self._current}
        replaced = {
            of: entry
            for of, entry in before.items()
            if of not in self._current and of[0] in models and entry in self._asked_by_version
        }
        self._keep(
            {of: each for of, each in self._former.items() if of not in self._current} | replaced
        )
        self._state.later(self._state.linger_s, lambda: self._let_go(replaced))

    def _keep(self, former: dict[Version, Entry]) -> None:
        self._former = former
        entries = {*self._current.values(), *former.values()}
        self._asked_by_version &= entries
        self._digests = {entry: self._described(entry).digest for entry in entries}

    def _let_go(self, replaced: dict[Version, Entry]) -> None:
        """Front ends have noticed by now that these have been replaced."""
        gone = set(replaced.values())
        self._keep({of: entry for of, entry in self._former.items() if entry not in gone})
        replaced.clear()

    def Serving(self, request: Any, context: grpc.ServicerContext) -> Any:
        told = pb.ServingResponse(ready=self._state.ready)
        for former, entries in ((False, self._current), (True, self._former)):
            for (model, version), entry in entries.items():
                digest = self._digest(entry)
                told.models.add(model=model, version=int(version), digest=digest, former=former)
        return told

    def Describe(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._described(self._entry(request))

    def _described(self, entry: Entry) -> Any:
        served = entry.served
        return described(
            LookupModel(
                served.name,
                served.version,
                served.tables,
                served.engine.features,
                served.spec.max_batch_size,
                self._max_keys,
            )
        )

    def begin(self, message: bytes, reply: Reply) -> None:
        """``Lookup``."""
        started = perf_counter_ns()
        entry: Entry | None = None
        origin: Origin | None = None
        try:
            caller = check(self._guard, reply.context, "read")
            if (clients := self._state.admission.clients) is not None:
                reply = Counted(reply, clients, caller)
            request = _parsed(message)
            entry = self._entry(request)
            entry.freshness.require()
            features = _features(request, self._max_keys)
            parsed = perf_counter_ns()
            found = named("", reply.context)
            origin = begun(found, entry.name, started, self._state.observer)
            deadline = deadline_of(reply.context, self._timeout_s)
            asked = LookupRequest(
                features, deadline, request.report, by_table=request.by_table, origin=origin
            )
            start = partial(entry.served.engine.submit, asked)
            future = entry.endpoint.admit(start, len(message), deadline)
        except Exception as error:
            fail(error, reply, self._state, "lookup", entry, started, origin=origin)
            return
        end = partial(self._end, reply, entry, asked, started, parsed)
        self._pending.add(future, deadline, reply, end)

    def _end(
        self,
        reply: Reply,
        entry: Entry,
        asked: LookupRequest,
        started: int,
        parsed: int,
        future: Future[LookupResult],
    ) -> None:
        """Answer with what ``future`` has."""
        try:
            result = future.result()
            inferred = perf_counter_ns()
            served, freshness = entry.served, entry.freshness
            stale_s = freshness.flag() if freshness.stale_s else result.stale_s
            answer = encode(served.name, served.version, self._digest(entry), result, stale_s)
            done = perf_counter_ns()
            batch = _batch(asked)
            queued = queued_ns(future)
            entry.statistics.succeeded(batch, started, parsed, inferred, done, queued)
            seconds = self._state.metrics.histogram(
                m.REQUEST_SECONDS, "grpc", "lookup", entry.name, entry.version, "OK"
            )
            seconds.observe((done - started) * 1e-9)
            if asked.origin is not None:
                self._tell(entry, asked, batch, result, started, parsed, inferred, done)
        except Exception as error:
            fail(error, reply, self._state, "lookup", entry, started, origin=asked.origin)
        else:
            reply.answer(answer)

    def _digest(self, entry: Entry) -> int:
        """Of what is told of it; it may have been taken out of service by now."""
        return self._digests.get(entry) or int(self._described(entry).digest)

    def _tell(
        self, entry: Entry, asked: LookupRequest, batch: int, result: LookupResult, *instants: int
    ) -> None:
        """Have it in the log and in its trace."""
        assert asked.origin is not None
        call = Call(Form(), {name: given.keys for name, given in asked.features.items()})
        call.batch = batch
        self._state.observer.answered("grpc", asked.origin, entry.endpoint, call, result, *instants)

    def _entry(self, request: Any) -> Entry:
        version = str(request.version or "") or None
        if version is not None and (former := self._former.get((request.model, version))):
            return former
        entry = self._state.entry(request.model + _LOOKUP, version)
        if version is not None:
            self._asked_by_version.add(entry)
        return entry


def lookup_handlers(
    service: LookupService, guard: Guard, arrivals: Arrivals
) -> dict[str, grpc.RpcMethodHandler]:
    """Handlers for the service's calls: lookups are bytes in and bytes out."""
    return {
        **handlers_of(pb.DESCRIPTOR.services_by_name["Lookup"], service, guard),
        "Lookup": grpc.unary_unary_rpc_method_handler(Direct(service.begin, arrivals)),
    }


def _of(entry: Entry) -> Version:
    return entry.served.name, entry.version


def _parsed(message: bytes) -> Any:
    try:
        return pb.LookupRequest.FromString(message)
    except Exception as error:  # the class of protobuf's depends on how protobuf was built
        raise BadRequest(f"the message is no hps.v1.LookupRequest: {error}") from None


def _batch(asked: LookupRequest) -> int:
    """Samples, for statistics; every key of a table is one."""
    if asked.by_table:
        return max((len(keys.keys) for keys in asked.features.values()), default=0)
    return max((keys.batch for keys in asked.features.values()), default=0)


def _features(request: Any, max_keys: int) -> dict[str, JaggedKeys]:
    """The keys of a request, by name. Raises ``BadRequest`` or ``TooLarge``."""
    found: dict[str, JaggedKeys] = {}
    total = 0
    for each in request.keys:
        name = each.name
        if name in found:
            raise BadRequest(f"{shown(name)} stands twice in the request")
        keys = numbers(name, "keys", each.keys, INT64)
        total += len(keys)
        offsets = weights = None
        batch = each.batch or len(keys)
        if request.by_table and batch > len(keys):
            raise BadRequest(
                f"{shown(name)} is a table: {len(keys)} keys are no batch of {batch}; leave the batch out"
            )
        if packed := each.offsets:
            offsets = numbers(name, "offsets", packed, INT64)
            batch = len(offsets) - 1
        if packed := each.weights:
            weights = numbers(name, "weights", packed, FLOAT32)
        found[name] = JaggedKeys(keys, batch, offsets, weights)
    if total > max_keys:
        raise faults.too_many_keys(total, max_keys)
    return found


def encode(model: str, version: int, digest: int, result: LookupResult, stale_s: int) -> bytes:
    """The bytes of the ``LookupResponse`` that carries ``result``."""
    head = pb.LookupResponse(
        model=model,
        version=version,
        defaulted=result.defaulted,
        degraded=result.degraded,
        stale_s=stale_s,
        digest=digest,
    )
    pieces: list[Any] = [head.SerializeToString()]
    for name, vectors in result.vectors.items():
        about = pb.Vectors(
            name=name, datatype=DATATYPE_OF[vectors.dtype.num], dim=vectors.shape[1]
        ).SerializeToString()
        if (sources := result.sources.get(name)) is not None:
            about += field(_SOURCES, sources.tobytes())
            about += field(_VERSIONS, result.versions[name].tobytes())
        about += b"%c%b" % (_VALUES, varint(vectors.nbytes))
        pieces.append(b"%c%b%b" % (_VECTORS, varint(len(about) + vectors.nbytes), about))
        if vectors.size:
            pieces.append(np.ascontiguousarray(vectors))
    return b"".join(pieces)
