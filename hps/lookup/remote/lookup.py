"""The lookup's remote twin: the same protocol as ``LookupEngine``, answered by other nodes.

Requests are checked here, so that only what can be answered is sent. A node that is not available, or does
not serve the version any more, is passed over for another one while the request has time; every other
error is the answer. Lookups change nothing, so asking twice is harmless.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from hps.errors import (
    BadRequest,
    DeadlineExceeded,
    HpsError,
    ModelError,
    Unavailable,
)
from hps.lookup.base import Feature, LookupModel, Submit
from hps.lookup.checks import check_keys, check_out_names, check_sizes, check_targets, unknown
from hps.lookup.remote.messages import check_same, decoded, encoded
from hps.lookup.remote.picking import LeastBusy, Picker
from hps.lookup.remote.targets import Target, Targets
from hps.lookup.traced import traced
from hps.meters import LookupMeter
from hps.metrics import Metrics
from hps.types import EmbeddingTable, JaggedKeys, KeyArray, LookupRequest, LookupResult, Source
from hps.workers import Repeated

log = logging.getLogger(__name__)

_Code = grpc.StatusCode
# How often nodes are asked that could not yet say what they serve.
_LOOK_AGAIN_S = 1.0
# Another node may answer.
_ELSEWHERE = (_Code.UNAVAILABLE, _Code.NOT_FOUND)
_ERRORS: dict[grpc.StatusCode, type[HpsError]] = {
    _Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    _Code.RESOURCE_EXHAUSTED: Unavailable,
    _Code.CANCELLED: Unavailable,
    # Ours, not the caller's.
    _Code.UNAUTHENTICATED: Unavailable,
    _Code.PERMISSION_DENIED: Unavailable,
}


class RemoteLookup:
    """Serves one model from nodes that have it. Any number of threads may call it, until ``close``.

    Futures are done on a thread of gRPC's. Vectors are read-only, but those in a request's ``out``.
    """

    def __init__(
        self,
        model: LookupModel,
        targets: Targets,
        picker: Picker | None = None,
        *,
        in_flight: int = 1024,
        retries: int = 2,
        timeout_s: float = 1.0,
        meter: LookupMeter | None = None,
    ) -> None:
        """``in_flight``: lookups under way, beyond which they are refused. ``retries``: how many other nodes
        may be asked. ``timeout_s``: of a request without a deadline.

        Nodes are asked what they serve; those that do not answer now are asked again. Raises ``ModelError``
        when one serves something else under the model's name and version.
        """
        self.model = model
        self._targets = targets
        self._picker = picker or LeastBusy()
        self._most, self._under_way = in_flight, 0
        self._retries, self._timeout_s = retries, timeout_s
        self._meter = meter or LookupMeter(Metrics(), model.name)
        self._by_table = {
            name: Feature(name, table, pooling="none") for name, table in model.tables.items()
        }
        self._lock = threading.Lock()
        self._usable: tuple[Target, ...] = ()
        self._problems: dict[Target, str] = {}
        # The descriptions that were compared with the model and mean the same: a node may start again with
        # another model.yaml, unnoticed but for what its answers say.
        self._same: frozenset[int] = frozenset()
        self._look(refuse=True)
        self._watch = Repeated(self._look, _LOOK_AGAIN_S, f"hps-lookup-nodes-{model.name}")

    @property
    def features(self) -> Mapping[str, Feature]:
        return self.model.features

    @property
    def tables(self) -> Mapping[str, EmbeddingTable]:
        return self.model.tables

    @property
    def problems(self) -> Mapping[str, str]:
        """Why nodes are not asked, by their address."""
        return {target.address: why for target, why in self._problems.items()}

    def close(self) -> None:
        """Look after the nodes no more; their channels stay open."""
        self._watch.close()

    def lookup(self, request: LookupRequest) -> LookupResult:
        """Answer ``request``, waiting. Errors as ``submit`` and its future."""
        return self.submit(request).result()

    def prepare(self, request: LookupRequest) -> Submit:
        """See ``Lookup.prepare``."""
        batches = [(name, keys.batch) for name, keys in request.features.items()]
        self._checked(request)

        def submit(keys: Sequence[KeyArray], deadline: float | None) -> Future[LookupResult]:
            features = {
                name: JaggedKeys(mine, batch)
                for (name, batch), mine in zip(batches, keys, strict=True)
            }
            return self.submit(replace(request, features=features, deadline=deadline))

        return submit

    def submit(self, request: LookupRequest) -> Future[LookupResult]:
        """Start a lookup; see ``Lookup.submit``."""
        return traced(self.model.name, request, self._submit)

    def _submit(self, request: LookupRequest) -> Future[LookupResult]:
        features = self._checked(request)
        now = time.monotonic()
        deadline = now + self._timeout_s if request.deadline is None else request.deadline
        if deadline <= now:
            raise DeadlineExceeded("the request's deadline had passed when it came")
        message = encoded(self.model.name, self.model.version, request, features)
        call = _Call(request, features, message, deadline)
        with self._lock:
            if self._under_way >= self._most:
                raise Unavailable(
                    f"overloaded: {self._most} lookups are under way at other nodes already "
                    "(tiers.remote.in_flight); retry later"
                )
            self._under_way += 1
        call.answer.add_done_callback(partial(self._ended, call))
        self._ask(call)
        return call.answer

    def _checked(self, request: LookupRequest) -> dict[str, JaggedKeys]:
        """The request's keys, well formed. Raises BadRequest."""
        known = self._by_table if request.by_table else self.model.features
        if not request.features:
            raise BadRequest(f"the request names no feature of model {self.model.name!r}")
        for name in request.features:
            if name not in known:
                kind = "table" if request.by_table else "feature"
                raise unknown(kind, name, known, self.model.name)
        check_sizes(self.model, request)
        found = {name: check_keys(known[name], keys) for name, keys in request.features.items()}
        if out := request.out:
            check_out_names(out, request, self.model.name)
            for name, keys in found.items():
                check_targets(known[name].table, [known[name]], [keys], out)
        return found

    # -- asking ------------------------------------------------------------------------------------

    def _ask(self, call: _Call) -> None:
        """Send ``call`` to a node that was not tried yet."""
        try:
            self._send(call)
        except Exception as error:  # a picker's, for one; the caller must hear of it
            call.fail(error)

    def _send(self, call: _Call) -> None:
        if call.answer.cancelled():
            return
        left = [target for target in self._usable if target not in call.tried]
        if not left:
            call.fail(Unavailable(self._nobody(call)))
            return
        target = self._picker.pick(left)
        call.tried.append(target)
        started = time.monotonic()
        try:
            origin = call.request.origin
            headers = {} if origin is None else origin.headers()
            asked = target.start(call.message, max(0.0, call.deadline - started), headers)
        except ValueError:  # the channel is closed
            call.fail(Unavailable("the lookup is being closed; ask another replica"))
            return
        call.asked = asked
        asked.add_done_callback(partial(self._told, call, target, started))

    def _told(self, call: _Call, target: Target, started: float, asked: Any) -> None:
        """A node answered."""
        try:
            self._heard(call, target, started, asked)
        except Exception as error:  # as above
            call.fail(error)

    def _heard(self, call: _Call, target: Target, started: float, asked: Any) -> None:
        code = asked.code()
        self._picker.answered(target, code, time.monotonic() - started)
        details, changed = asked.details(), False
        if code is _Code.OK:
            response = asked.result()
            if response.digest in self._same:
                self._finish(call, response)
                return
            details, changed = "serves something else under the same version by now", True
        told = call.failure = f"{target.address}: {details}"
        if changed or code is _Code.NOT_FOUND:
            self._drop(target, told)
        if changed or code in _ELSEWHERE:
            if len(call.tried) <= self._retries:
                self._ask(call)
            else:
                call.fail(Unavailable(self._nobody(call)))
        elif code is _Code.INVALID_ARGUMENT:
            call.fail(BadRequest(details))
        else:
            call.fail(_ERRORS.get(code, HpsError)(f"lookup node {told}"))

    def _finish(self, call: _Call, response: Any) -> None:
        known = self._by_table if call.request.by_table else self.model.features
        result = decoded(response, known, call.features)
        for name, into in (call.request.out or {}).items():
            into[...] = result.vectors[name]
            result.vectors[name] = into
        counted = [
            (known[n].table, int(Source.REMOTE), len(k.keys)) for n, k in call.features.items()
        ]
        self._meter.counted(counted, time.monotonic() - call.started)
        if call.answer.set_running_or_notify_cancel():
            call.answer.set_result(result)

    def _ended(self, call: _Call, answer: Future[LookupResult]) -> None:
        with self._lock:
            self._under_way -= 1
        if answer.cancelled() and call.asked is not None:
            call.asked.cancel()

    def _nobody(self, call: _Call) -> str:
        if call.failure:
            return f"no lookup node could answer; the last was {call.failure}"
        why = "; ".join(f"{address}: {problem}" for address, problem in self.problems.items())
        return (
            f"no lookup node serves model '{self.model.name}' version {self.model.version}: {why}"
        )

    # -- who can be asked --------------------------------------------------------------------------

    def _look(self, *, refuse: bool = False) -> None:
        """Ask the nodes what they serve that were not compared yet."""
        for target in self._targets.all:
            if target in self._usable:
                continue
            try:
                told = target.describe(self.model.name, self.model.version, _LOOK_AGAIN_S)
                check_same(target.address, told, self.model)
            except grpc.RpcError as error:
                self._problem(target, f"{error.code().name}: {error.details()}")
            except ModelError as error:
                if refuse:
                    raise
                self._problem(target, str(error))
            else:
                with self._lock:
                    self._same |= {told.digest}
                    self._problems = {t: why for t, why in self._problems.items() if t != target}
                    self._usable = (*self._usable, target)

    def _problem(self, target: Target, why: str) -> None:
        if self._problems.get(target) != why:
            log.warning("lookup node %s is not asked: %s", target.address, why)
        with self._lock:
            self._problems = {**self._problems, target: why}

    def _drop(self, target: Target, why: str) -> None:
        """Ask it no more, until it serves the version again, and the same under it."""
        with self._lock:
            self._usable = tuple(each for each in self._usable if each is not target)
        self._problem(target, why)


class _Call:
    """A lookup on its way; ``tried`` are the nodes it was sent to."""

    __slots__ = (
        "answer",
        "asked",
        "deadline",
        "failure",
        "features",
        "message",
        "request",
        "started",
        "tried",
    )

    def __init__(
        self,
        request: LookupRequest,
        features: Mapping[str, JaggedKeys],
        message: bytes,
        deadline: float,
    ) -> None:
        self.request = request
        self.features = features
        self.message = message
        self.deadline = deadline
        self.started = time.monotonic()
        self.tried: list[Target] = []
        self.failure = ""
        self.asked: Any = None
        self.answer: Future[LookupResult] = Future()

    def fail(self, error: BaseException) -> None:
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)
