"""The lifecycle of one inference request, for every protocol.

Once the caller is authenticated, a protocol calls the methods of its subclass of `Inference` in this order:

    Inference.enter        limits of the client
    Inference.admit        admission queue and byte budget, before the request is decoded
    Inference.submit       shared memory, trace context, deadline, the endpoint; its argument is decoded first
    PendingRequests        wait for the result up to the deadline
    Inference.encode       the answer's tensors to the protocol's answer
    Inference.succeed      statistics, latency, trace, log

Failures end in ``Inference.fail``, which returns the error for the client. Subclasses know bytes and
statuses: ``inference.py`` in ``http/`` and ``grpc/``. Their callers authenticate and find the model:
``http/inference_app.py``, ``grpc/inference_service.py`` and, for lookups of other nodes, ``grpc/lookup.py``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from time import perf_counter_ns
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from hps.errors import HpsError
from hps.observability import metric_names as m
from hps.tracing import RequestContext, traceparent_of, tracestate_of
from services.frontend.endpoints import Output
from services.frontend.errors import (
    REFUSALS,
    Overloaded,
    client_error,
    rejection_reason,
    status_of,
)
from services.frontend.inference_request import InferenceRequest
from services.frontend.request_observer import end_span
from services.frontend.state import FrontendState, ServedEndpoint
from services.frontend.statistics import Stages, execution_samples, queued_ns

Answer = TypeVar("Answer", covariant=True)


NO_IDENTITY = RequestContext()
"""The identity, request ID and trace context, of a request that was sent without; always this object."""


def request_identity(request_id: str, traceparent: str, tracestate: str) -> RequestContext:
    """Return the identity with a trace context whose headers are valid; `NO_IDENTITY` if all are empty."""
    parent = traceparent_of(traceparent) if traceparent else ""
    if not parent:
        return RequestContext(request_id) if request_id else NO_IDENTITY
    return RequestContext(request_id, parent, tracestate_of(tracestate))


class ResponseEncoder(Protocol[Answer]):
    """Encoder of a protocol's answers of one served name. Thread-safe."""

    def encode(
        self,
        call: Any,
        defaulted: int,
        degraded: tuple[str, ...],
        stale_s: int,
        outputs: Sequence[Output],
    ) -> Answer:
        """Encode the answer to ``call``; outputs in shared memory are written already."""
        ...


class InferencePort:
    """State shared by the requests of one kind and protocol. Thread-safe.

    ``protocol`` (``http`` or ``grpc``) and ``method`` (``infer`` or ``lookup``) are labels of the metrics.
    """

    def __init__(
        self, state: FrontendState, protocol: str, method: str, request_timeout_ms: float
    ) -> None:
        self.state = state
        self.protocol = protocol
        self.clients = state.admission.clients
        self.timeout_s = request_timeout_ms / 1e3
        self._method = method

    def latency(self, entry: ServedEndpoint, status: str) -> Callable[[float], None]:
        """Return the function that observes latencies of ``entry`` in seconds."""
        labels = self.protocol, self._method, entry.name, entry.version, status
        return self.state.metrics.histogram(m.REQUEST_SECONDS, *labels).observe

    def fail(
        self,
        error: BaseException,
        started: int,
        identify: Callable[[], RequestContext],
        entry: ServedEndpoint | None = None,
        origin: RequestContext | None = None,
    ) -> HpsError:
        """Count, log and trace a request that began at ``started`` (ns) and failed.

        ``entry`` is None if the name is unknown, ``origin`` if the request was not observed yet. Returns the
        error for the client.
        """
        observer = self.state.observer
        if origin is None and isinstance(error, REFUSALS) and not observer.watches:
            # Nothing observes the rejection but its client. In an overload, most of the work is this.
            self._count(error, error, started, entry)
            return error
        endpoint = None if entry is None else entry.endpoint
        if origin is None:
            name = "" if endpoint is None else endpoint.name
            identity = identify()
            origin = observer.begin(name, started, identity.request_id, identity)
        answer = client_error(error, origin.request_id)
        self._count(answer, error, started, entry)
        status = getattr(status_of(answer), self.protocol)
        observer.failed(self.protocol, origin, endpoint, status, error, started)
        return answer

    def _count(
        self, answer: HpsError, error: BaseException, started: int, entry: ServedEndpoint | None
    ) -> None:
        done = perf_counter_ns()
        name = version = ""
        if entry is not None:
            name, version = entry.name, entry.version
            entry.statistics.failed(started, done)
            if entry.watch is not None and not isinstance(error, REFUSALS):
                entry.watch.failed()
        metrics = self.state.metrics
        status = str(getattr(status_of(answer), self.protocol))
        metrics.histogram(
            m.REQUEST_SECONDS, self.protocol, self._method, name, version, status
        ).observe((done - started) * 1e-9)
        if (reason := rejection_reason(error)) is not None:
            metrics.counter(m.REQUESTS_REFUSED, reason).add()


class Inference(ABC):
    """One inference request. Its methods are called one after the other, on any threads."""

    __slots__ = (
        "_client",
        "_inferred",
        "_parsed",
        "_reserved",
        "call",
        "deadline",
        "entry",
        "future",
        "origin",
        "port",
        "started",
    )

    call: InferenceRequest
    future: Future[Any]
    """Holds the result by the instant ``deadline`` (``time.monotonic``), or the request fails."""
    deadline: float

    def __init__(self, port: InferencePort, entry: ServedEndpoint | None = None) -> None:
        """``entry`` is None if it is not known yet; set it before `admit`."""
        self.port = port
        self.entry = entry
        self.started = perf_counter_ns()
        self.origin: RequestContext | None = None
        self._client: str | None = None
        self._reserved: int | None = None

    @abstractmethod
    def identify(self) -> RequestContext:
        """Return the request ID and trace context sent beside the message."""

    @abstractmethod
    def address(self) -> str:
        """Return the client's address without its port; empty if unknown."""

    def remaining_s(self) -> float | None:
        """Return the seconds until the client's deadline; None without one."""
        return None

    def enter(self, caller: str) -> None:
        """Count the request against its client's limits, until it succeeds or fails.

        The client is the ``caller``, or its address without authentication. Raises ``TooManyRequests``.
        """
        if (clients := self.port.clients) is not None:
            client = caller or self.address()
            clients.enter(client)
            self._client = client

    def admit(self, size: int) -> Overloaded | None:
        """Return the error of a request of ``size`` bytes if the admission queue would reject it, else None.

        A request that takes long gets a reservation: without it, requests that arrive while it is decoded
        could fill the queue, and the decoding would be wasted.
        """
        assert self.entry is not None
        endpoint = self.entry.endpoint
        if not endpoint.is_long:
            return endpoint.rejection(size) if endpoint.is_saturated else None
        rejection = endpoint.reserve(size)
        if rejection is None:
            self._reserved = size
        return rejection

    def redirect(self, entry: ServedEndpoint, size: int) -> None:
        """Admit an admitted request of ``size`` bytes to another version; raise its rejection."""
        if entry is self.entry:
            return
        self._cancel_reservation()
        self.entry = entry
        rejection = self.admit(size)
        try:
            if rejection is not None:
                raise rejection
        finally:
            del rejection  # break the reference cycle: the error's traceback refers to this frame

    def submit(self, call: InferenceRequest) -> None:
        """Start answering the decoded request; sets ``future``. Raises the request's fault."""
        assert self.entry is not None
        self.call = call
        if call.form.memory_refs is not None:
            self._read_shared_memory(call)
        call.id = self.mark_decoded(call.id, call.form.timeout_us * 1e-6)
        call.origin = self.origin
        reserved, self._reserved = self._reserved, None
        self.future = self.entry.endpoint.submit(call, self.deadline, reserved=reserved)
        if (shadow := self.entry.shadow) is not None:
            shadow.mirror(call, self.future)

    def mark_decoded(self, request_id: str = "", timeout_s: float = 0.0) -> str:
        """Record the end of decoding, set the deadline, and begin a trace if the request has an ID or is
        observed.

        The deadline is ``timeout_s`` from now (0: the server's default), or the client's if that is earlier.
        Returns the request's ID: the one in the message, else the one sent beside it.
        """
        self._parsed = perf_counter_ns()
        identity, observer = self.identify(), self.port.state.observer
        request_id = request_id or identity.request_id
        if request_id or identity is not NO_IDENTITY or observer.watches:
            assert self.entry is not None
            self.origin = observer.begin(self.entry.name, self.started, request_id, identity)
        allowed_s = timeout_s or self.port.timeout_s
        remaining_s = self.remaining_s()
        if remaining_s is not None and remaining_s < allowed_s:
            allowed_s = remaining_s
        self.deadline = time.monotonic() + allowed_s
        return request_id

    def _read_shared_memory(self, call: InferenceRequest) -> None:
        refs = call.form.memory_refs
        assert refs is not None
        assert self.entry is not None
        if self._reserved is not None:
            self.entry.endpoint.require_bytes(refs.size, self._reserved)
        elif self.entry.endpoint.is_saturated:
            self.entry.endpoint.require_capacity(refs.size)
        inputs, call.targets = self.port.state.regions.take(refs, self.address())
        call.add(inputs)

    def mark_inferred(self, result: Any) -> int:
        """Record the end of the inference; return the age in seconds of the rows to report, 0 if fresh."""
        self._inferred = perf_counter_ns()
        assert self.entry is not None
        freshness = self.entry.freshness
        return freshness.flag() if freshness.stale_s else int(result.stale_s)

    def encode(self, encoder: ResponseEncoder[Answer], result: Any) -> Answer:
        """Encode the answer with ``result``; write its outputs in shared memory.

        Raises ``BadRequest`` or ``NotFound`` if an output cannot be written or sent as requested.
        """
        assert self.entry is not None
        call, stale_s = self.call, self.mark_inferred(result)
        outputs = self.entry.endpoint.outputs(call, result)
        if call.targets:
            self.port.state.regions.put(outputs, call.targets)
        return encoder.encode(call, result.defaulted, result.degraded, stale_s, outputs)

    def observed_inputs(self) -> Mapping[str, NDArray[Any]]:
        """Return the inputs for `succeed`; empty if nothing reports them: they may not be arrays yet."""
        return {} if self.origin is None else self.call.inputs

    def succeed(
        self,
        result: Any,
        future: Future[Any],
        observe: Callable[[float], None],
        batch: int,
        inputs: Mapping[str, NDArray[Any]],
    ) -> Stages:
        """Count, log and trace an answer that is ready to be sent; ``future`` held its ``result``."""
        assert self.entry is not None
        done, started = perf_counter_ns(), self.started
        stages = started, self._parsed, self._inferred, done
        queued, execution = queued_ns(future), execution_samples(future)
        self.entry.statistics.succeeded(batch, stages, queued, execution)
        observe((done - started) * 1e-9)
        if (watch := self.entry.watch) is not None:
            watch.answered((done - started) * 1e-9, result)
        if (origin := self.origin) is not None:
            if origin.is_recorded:
                end_span(origin, batch, result.defaulted, stages)
            self.port.state.observer.log_answered(
                self.port.protocol, origin, self.entry.endpoint, inputs, result.defaulted, stages
            )
        if self._client is not None:
            self.leave()
        return stages

    def fail(self, error: BaseException) -> HpsError:
        """Count, log and trace the failure; return the error for the client."""
        self._cancel_reservation()
        self.leave(error)
        return self.port.fail(error, self.started, self.identify, self.entry, self.origin)

    def _cancel_reservation(self) -> None:
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            assert self.entry is not None
            self.entry.endpoint.cancel_reservation(reserved)

    def leave(self, error: BaseException | None = None) -> None:
        """End the count of the client's request; further calls have no effect."""
        client, self._client = self._client, None
        if client is not None and self.port.clients is not None:
            self.port.clients.leave(client, error)

    def undo(self) -> None:
        """Undo `enter` and `admit`: the caller handles the request again from its start."""
        self._cancel_reservation()
        client, self._client = self._client, None
        if client is not None and self.port.clients is not None:
            self.port.clients.undo(client)
