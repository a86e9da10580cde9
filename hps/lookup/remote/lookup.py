"""Remote lookup: the protocol of ``LookupEngine``, answered by other nodes.

Requests are checked before they are sent. If a node fails, is late or no longer serves the version, another
node is tried while the request has time; a node's error about the request itself is the answer. Lookups
have no side effects, so a retry is harmless.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np

from hps.errors import BadRequest, DeadlineExceeded, HpsError, Unavailable
from hps.lookup.base import Lookup, PreparedRequest, PreparedSubmit, submit_in_span
from hps.lookup.remote.balancing import LeastBusy, NodePicker
from hps.lookup.remote.candidates import Candidates
from hps.lookup.remote.lookup_codec import LookupRequestTemplate, offsets_and_weights
from hps.lookup.remote.lookup_node import short_error
from hps.lookup.remote.remote_call import LookupAttempt, RemoteLookupCall
from hps.lookup.remote.request_checks import RemoteRequestChecks
from hps.lookup.remote.retry_budget import RetryBudget
from hps.lookup.request_sample import NO_SAMPLE
from hps.observability.meters import LookupMeter
from hps.observability.metrics import Metrics
from hps.tracing import RequestContext, call_timed
from hps.types import (
    KeyArray,
    LookupRequest,
    LookupResult,
    VectorArray,
    as_keys,
)
from hps.v1 import lookup_pb2 as pb

_Code = grpc.StatusCode
# Appended to a request: the node reports how its time was spent.
_PROFILED: bytes = pb.LookupRequest(profile=True).SerializeToString()
# Codes after which another node is tried.
_RETRIABLE = (
    _Code.UNAVAILABLE,
    _Code.NOT_FOUND,
    _Code.DEADLINE_EXCEEDED,
    _Code.CANCELLED,
    _Code.INTERNAL,
    _Code.UNKNOWN,
    _Code.DATA_LOSS,
)
# Codes that count as no answer. OK: the node has another description of the model.
_NO_ANSWER = (_Code.OK, _Code.UNAVAILABLE, _Code.NOT_FOUND, _Code.CANCELLED)
# After all nodes have failed they are tried again for this long, at this interval.
_RETRY_ALL_S, _RETRY_PAUSE_S = 1.0, 0.1
_ERRORS: dict[grpc.StatusCode, type[HpsError]] = {
    _Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    _Code.RESOURCE_EXHAUSTED: Unavailable,
    # Errors of this process, not of the caller.
    _Code.UNAUTHENTICATED: Unavailable,
    _Code.PERMISSION_DENIED: Unavailable,
}


@dataclass(frozen=True, slots=True)
class RemoteLookupLimits:
    """Limits of one model's remote lookups.

    ``in_flight``: lookups in flight; more are rejected. ``retries``: other nodes that a lookup may try,
    within the retry budget. ``timeout_s``: of a request without a deadline. ``attempt_s``: the longest
    wait for one node while others remain; never more than half of the time left. Once all have been
    tried, an attempt gets half of the time left."""

    in_flight: int = 1024
    retries: int = 2
    timeout_s: float = 1.0
    attempt_s: float = 1.0


class RemoteLookup(Lookup):
    """Serves one version of a model from the nodes that have it. Thread-safe.

    Futures complete on a thread of gRPC. Vectors are read-only, except those in a request's ``out``.
    """

    def __init__(
        self,
        candidates: Candidates,
        picker: NodePicker | None = None,
        limits: RemoteLookupLimits | None = None,
        *,
        budget: RetryBudget | None = None,
        meter: LookupMeter | None = None,
    ) -> None:
        """``budget``: the retry budget, shared with other models' lookups."""
        limits = limits or RemoteLookupLimits()
        self.model = model = candidates.model
        self.features, self.tables = model.features, model.tables
        self.sample = NO_SAMPLE
        """Gets requests while it is armed."""
        self._candidates = candidates
        self._picker = picker or LeastBusy()
        self._max_in_flight, self._in_flight = limits.in_flight, 0
        self._retries, self._timeout_s = limits.retries, limits.timeout_s
        self._attempt_s = limits.attempt_s
        self._budget = budget or RetryBudget(limits.in_flight)
        self._checks = RemoteRequestChecks(
            model, meter or LookupMeter(Metrics(), model.name, model.version)
        )
        self._lock = threading.Lock()

    def prepare(self, request: LookupRequest) -> PreparedSubmit:
        """See ``Lookup.prepare``."""
        template, _ = self._checks.prepare(request)
        prepared_request = PreparedRequest(request)

        def submit(
            keys: Sequence[KeyArray],
            deadline: float | None,
            origin: RequestContext | None = None,
            /,
        ) -> Future[LookupResult]:
            wide = [each if each.dtype == np.int64 else as_keys(each) for each in keys]
            if self.sample.armed:
                self.sample.add(prepared_request.request(wide, deadline, origin))
            return self._begin(template, template.message(wide), deadline, None, origin)

        return submit

    def submit(self, request: LookupRequest) -> Future[LookupResult]:
        """Start a lookup; see ``Lookup.submit``."""
        return submit_in_span(self.model.name, request, self._submit)

    def _submit(self, request: LookupRequest) -> Future[LookupResult]:
        template, features = self._checks.prepare(request)
        if self.sample.armed:
            self.sample.add(request)
        keys = [each.keys for each in features.values()]
        more = b"" if template.are_keys_all else offsets_and_weights(features)
        message = call_timed(request.origin, "encode", template.message, keys, more)
        return self._begin(template, message, request.deadline, request.out, request.origin)

    def _begin(
        self,
        template: LookupRequestTemplate,
        message: bytes,
        deadline: float | None,
        out: Mapping[str, VectorArray] | None,
        origin: RequestContext | None,
    ) -> Future[LookupResult]:
        now = time.monotonic()
        if deadline is None:
            deadline = now + self._timeout_s
        if deadline <= now:
            raise DeadlineExceeded("deadline exceeded before the lookup started")
        headers = profile = None
        if origin is not None:
            headers = origin.headers()
            if origin.is_profiled:
                profile, message = origin, message + _PROFILED
        call = RemoteLookupCall(template, message, now, deadline, out, headers, profile)
        with self._lock:
            if self._in_flight >= self._max_in_flight:
                raise Unavailable(
                    f"overloaded: {self._max_in_flight} lookups are already in flight "
                    "(lookup.in_flight); retry later"
                )
            self._in_flight += 1
        self._budget.earn()
        call.answer.add_done_callback(partial(self._ended, call))
        self._start_attempt(call)
        return call.answer

    # -- attempts ----------------------------------------------------------------------------------

    def _start_attempt(self, call: RemoteLookupCall) -> None:
        """Send ``call`` to a node that was not tried yet."""
        try:
            self._send(call)
        except Exception as error:  # any error, such as a picker's, must reach the caller
            call.fail(error)

    def _send(self, call: RemoteLookupCall) -> None:
        if call.answer.cancelled():
            return
        ready = [target for target in self._candidates.ready if target not in call.tried]
        others = [target for target in self._candidates.others if target not in call.tried]
        if not ready and not others:
            call.fail(Unavailable(self._unavailable_reason(call)))
            return
        target = self._picker.pick(ready) if ready else others[0]
        now = time.monotonic()
        left_s = max(0.0, call.deadline - now)
        alone = len(ready) + len(others) == 1
        is_last = alone or len(call.tried) >= self._retries or self._budget.is_spent
        if not is_last:
            left_s /= 2
            if call.all_failed_since is None:  # after that, another is hardly faster
                left_s = min(left_s, self._attempt_s)
        call.tried.append(target)
        call.attempt = attempt = LookupAttempt(target, now, is_last)
        on_done = partial(self._finish_attempt, call, attempt)
        try:
            attempt.cancel = target.start(call.message, left_s, call.headers, on_done)
        except ValueError:  # the node was removed, or the process is ending
            call.failure = f"{target.address}: its connection has been closed"
            self._start_attempt(call)
            return
        if call.answer.cancelled():  # the caller cancelled before `attempt.cancel` was set
            attempt.cancel()

    def _finish_attempt(
        self,
        call: RemoteLookupCall,
        attempt: LookupAttempt,
        code: grpc.StatusCode,
        details: str,
        response: Any,
    ) -> None:
        """Handle the end of an attempt."""
        try:
            self._handle_result(call, attempt, code, short_error(details), response)
        except Exception as error:  # any error must reach the caller
            call.fail(error)

    def _handle_result(
        self,
        call: RemoteLookupCall,
        attempt: LookupAttempt,
        code: grpc.StatusCode,
        details: str,
        response: Any,
    ) -> None:
        target = attempt.target
        if code is _Code.CANCELLED and call.answer.cancelled():
            return
        self._picker.record(target, code, time.monotonic() - attempt.started)
        retriable = code in _RETRIABLE
        if code is _Code.OK:
            if self._candidates.means_the_same(response.digest):
                self._finish(call, attempt, response)
                return
            details, retriable = "now serves another model under the same version", True
        call.failure = f"{target.address}: {details}"
        if code in (_Code.OK, _Code.NOT_FOUND):
            self._candidates.mark_not_served(target)
        elif code is _Code.UNAVAILABLE:
            self._candidates.nodes.poll_soon()
        if retriable and not attempt.is_last and self._may_retry(call):
            target.count_retry()
            self._start_attempt(call)
        elif code is _Code.INVALID_ARGUMENT:
            call.fail(BadRequest(details))
        elif code in _NO_ANSWER:
            self._give_up(call)
        else:
            call.fail(_ERRORS.get(code, HpsError)(f"lookup node {call.failure}"))

    def _may_retry(self, call: RemoteLookupCall) -> bool:
        return time.monotonic() < call.deadline and self._budget.spend()

    def _give_up(self, call: RemoteLookupCall) -> None:
        """Retry all nodes for a while after each has failed, then fail the call.

        One node may have left while the channel to another is still connecting.
        """
        now = time.monotonic()
        if call.all_failed_since is None:
            call.all_failed_since = now
        until = min(call.deadline, call.all_failed_since + _RETRY_ALL_S) - _RETRY_PAUSE_S
        again = now < until and self._budget.spend()
        call.tried.clear()
        if not again or not self._candidates.nodes.later(
            _RETRY_PAUSE_S, partial(self._start_attempt, call)
        ):
            call.fail(Unavailable(self._unavailable_reason(call)))

    def _finish(self, call: RemoteLookupCall, attempt: LookupAttempt, response: Any) -> None:
        if call.profile is not None:
            sent, now = round(attempt.started * 1e9), time.monotonic_ns()
            call.profile.reported("node", sent, now, response.profile)
        result = call_timed(call.profile, "decode", call.template.result, response)
        call.template.finished(time.monotonic() - call.started)
        call.finish(result)

    def _ended(self, call: RemoteLookupCall, answer: Future[LookupResult]) -> None:
        with self._lock:
            self._in_flight -= 1
        if answer.cancelled():
            call.cancel()

    def _unavailable_reason(self, call: RemoteLookupCall) -> str:
        if call.failure:
            return f"no lookup node answered; last failure: {call.failure}"
        problems = self._candidates.problems or {"lookup.nodes": self._candidates.nodes.problem}
        why = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
        return (
            f"no lookup node serves model '{self.model.name}' version {self.model.version}: {why}"
        )
