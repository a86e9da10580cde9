"""Per-model admission queue: run N requests, queue the others, reject overflow.

A request that would wait longer than it may, judging by the recent duration of requests, is rejected when
it arrives instead of after the wait: that costs least, and its client can still try another replica."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from hps.config.admission_settings import AdmissionSettings
from hps.errors import DeadlineExceeded
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from services.frontend.admission.byte_budget import ByteBudget, raise_rejection
from services.frontend.admission.queued_request import QueuedRequest, QueueTimeout
from services.frontend.admission.wait_bound import WaitBound, WaitEstimate
from services.frontend.datatypes import InputRule
from services.frontend.endpoints import Endpoint, Output
from services.frontend.errors import Overloaded
from services.frontend.inference_request import InferenceRequest

# Share of a request's remaining time that it may spend queued: running it may take longer than expected.
_MAX_DEADLINE_SHARE = 0.5


class AdmissionQueue:
    """An `Endpoint` with a bounded number of running requests; further ones are queued. Thread-safe."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: AdmissionSettings,
        running: int,
        byte_budget: ByteBudget,
        timeout: QueueTimeout,
        metrics: Metrics,
    ) -> None:
        self.name = endpoint.name
        self.version = endpoint.version
        self.raw_input = endpoint.raw_input
        self.is_long = endpoint.is_long
        self._endpoint = endpoint
        self.max_running = running
        self._max_queued = settings.queue
        self._max_wait_s = settings.max_wait_ms / 1e3
        self._byte_budget = byte_budget
        self._timeout = timeout
        self._observe = metrics.histogram(m.QUEUE_SECONDS, endpoint.name).observe
        self._queue: deque[QueuedRequest] = deque()
        self._lock = threading.Lock()
        self.running = 0
        self._reserved = 0
        self.estimate = WaitEstimate(running)
        self._bound = WaitBound(self._max_wait_s, self.estimate)

    @property
    def queued(self) -> int:
        """Number of queued requests."""
        return len(self._queue)

    @property
    def is_saturated(self) -> bool:
        """True if running and reserved requests take all slots."""
        return self.running + self._reserved >= self.max_running

    @property
    def rules(self) -> Mapping[str, InputRule]:
        return self._endpoint.rules

    def outputs(self, call: InferenceRequest, result: Any) -> list[Output]:
        """See ``Endpoint.outputs``."""
        return self._endpoint.outputs(call, result)

    def require_capacity(self, size: int = 0) -> None:
        """Raise ``Overloaded`` if a request of ``size`` bytes would be rejected now."""
        raise_rejection(self.rejection(size))

    def reserve(self, size: int) -> Overloaded | None:
        """Reserve a slot for a request of ``size`` bytes; return the error if it is rejected.

        Another thread decodes the request first, and then passes ``size`` to `submit` as ``reserved``, or
        calls `cancel_reservation`. Without a reservation, requests that arrive meanwhile could fill the
        queue, and the decoding would be wasted."""
        with self._lock:
            if (rejection := self.rejection(size)) is None:
                self._reserved += 1
                self._byte_budget.add(size)
            return rejection

    def require_bytes(self, size: int, reserved: int) -> None:
        """Raise ``Overloaded`` if ``size`` more bytes do not fit; ``reserved`` bytes are reserved already."""
        self._byte_budget.require(size, reserved)

    def cancel_reservation(self, size: int) -> None:
        """Cancel a reservation of ``size`` bytes."""
        with self._lock:
            self._release_reservation(size)

    def _release_reservation(self, size: int | None) -> None:
        """Release the reservation of a request that has arrived, if it had one."""
        if size is not None:
            self._reserved -= 1
            self._byte_budget.add(-size)

    def rejection(self, size: int = 0) -> Overloaded | None:
        """Return the error that `require_capacity` would raise, or None; costs less than raising it."""
        ahead = len(self._queue) + self._reserved
        queued = ahead - max(0, self.max_running - self.running)
        if queued >= self._max_queued and self.is_saturated:
            # In Triton's words, which clients look for.
            return Overloaded(
                f"Exceeds maximum queue size ({queued} requests to '{self.name}' are queued, "
                "server.admission.queue)",
                "queue_full",
            )
        bound_s = self._bound.now_s
        if not self._bound.allows(self.estimate.wait_s(ahead)):
            limit = "server.admission.max_wait_ms"
            if bound_s < self._max_wait_s:
                limit += ", shortened during an overload"
            return self._wait_rejection(f"longer than {round(bound_s * 1e3, 1):g} ms ({limit})")
        return self._byte_budget.rejection(size)

    def _wait_rejection(self, too_long: str) -> Overloaded:
        return Overloaded(f"a request to '{self.name}' would wait {too_long}", "queue_wait")

    def _require_time(self, deadline: float) -> None:
        """Raise ``Overloaded`` if a request would spend too much of its time until ``deadline`` queued."""
        left_s = deadline - time.monotonic()
        wait_s = self.estimate.wait_s(len(self._queue))
        if 0 < _MAX_DEADLINE_SHARE * left_s < wait_s:
            self._bound.shrink(wait_s)
            raise self._wait_rejection("for more than half of the time until its deadline")

    def submit(
        self, call: InferenceRequest, deadline: float, *, reserved: int | None = None
    ) -> Future[Any]:
        """See ``Endpoint.submit``. Raises ``Overloaded`` if the request may not be queued.

        ``reserved``: the bytes that `reserve` reserved for it; it may need more by now."""
        if self.running < self.max_running and not self._queue:
            if reserved is None and not self._endpoint.is_long:
                return self._track(self._endpoint.submit(call, deadline))
            if self._take_free_slot(reserved):
                return self._submit_running(call, deadline)
        size = call.size
        start = partial(self._endpoint.submit, call, deadline)
        return self._enqueue(start, size, deadline, reserved=reserved)

    def submit_unadmitted(self, call: InferenceRequest, deadline: float) -> Future[Any]:
        """Submit a request that takes no slot: its caller bounds such requests."""
        return self._endpoint.submit(call, deadline)

    def admit(self, start: Callable[[], Future[Any]], size: int, deadline: float) -> Future[Any]:
        """Admit a request of another kind, of ``size`` bytes, which ``start`` begins; see ``submit``."""
        if self.running < self.max_running and not self._queue:
            return self._track(start())
        return self._enqueue(start, size, deadline)

    def _take_free_slot(self, reserved: int | None) -> bool:
        with self._lock:
            if self._queue or self.running >= self.max_running:
                return False
            self._release_reservation(reserved)
            self._count_start()
            return True

    def _submit_running(self, call: InferenceRequest, deadline: float) -> Future[Any]:
        """Submit a request that counts as running to the endpoint."""
        try:
            work = self._endpoint.submit(call, deadline)
        except BaseException:
            self._count_immediate_end()
            self._start_queued()
            raise
        work.add_done_callback(self._finish)
        return work

    def _track(self, work: Future[Any]) -> Future[Any]:
        if not work.done():
            with self._lock:
                self._count_start()
            work.add_done_callback(self._finish)
        return work

    def _count_start(self) -> None:
        self.running += 1
        self.estimate.begin()

    def _count_end(self) -> None:
        self.running -= 1
        self.estimate.end()

    def _count_immediate_end(self) -> None:
        """End a request that took no time."""
        with self._lock:
            self.running -= 1
            self.estimate.end_immediately()

    def _enqueue(
        self,
        start: Callable[[], Future[Any]],
        size: int,
        deadline: float,
        *,
        reserved: int | None = None,
    ) -> Future[Any]:
        with self._lock:
            try:
                if reserved is None:
                    self.require_capacity(size)
                else:
                    self._byte_budget.require(size - reserved, reserved)
                self._require_time(deadline)
            finally:
                self._release_reservation(reserved)
            request = QueuedRequest(self.expire, start, deadline, size)
            self._queue.append(request)
            self._byte_budget.add(size)
        request.add_done_callback(self._on_done)
        self._timeout.add(request)
        self._start_queued()  # a slot may have become free meanwhile
        return request

    def _finish(self, _: Future[Any]) -> None:
        with self._lock:
            self._count_end()
        self._start_queued()

    def _complete(self, request: QueuedRequest, work: Future[Any]) -> None:
        """Complete ``request``. Free its slot first: its client may send the next request immediately."""
        with self._lock:
            self._count_end()
        request.copy(work)
        self._start_queued()

    def _start_queued(self) -> None:
        """Start queued requests while slots are free. A loop, since a request may end as it starts."""
        while (request := self._dequeue()) is not None:
            work = self._start(request)
            if work.done():
                self._count_immediate_end()
                request.copy(work)
            else:
                work.add_done_callback(partial(self._complete, request))

    def _dequeue(self) -> QueuedRequest | None:
        """Remove the next request from the queue; it counts as running."""
        with self._lock:
            while self._queue and self.running < self.max_running:
                request = self._queue.popleft()
                self._byte_budget.add(-request.size)
                if request.set_running_or_notify_cancel():
                    self._count_start()
                    break
            else:
                if not self._queue and not self.is_saturated:
                    self._bound.relax()
                return None
        self._record_wait(request)
        return request

    def _record_wait(self, request: QueuedRequest) -> None:
        waited_s = time.monotonic() - request.since
        request.queued_ns = int(waited_s * 1e9)
        self._observe(waited_s)

    def _start(self, request: QueuedRequest) -> Future[Any]:
        """Start a queued request; return the future of its work, failed if it could not start."""
        try:
            if time.monotonic() > request.deadline:
                self._bound.shrink(request.queued_ns * 1e-9)
                raise DeadlineExceeded("the deadline passed while the request was queued")
            request.work = work = request.start()
            return work
        except BaseException as error:  # any error must reach the caller
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _on_done(self, future: Future[Any]) -> None:
        """Remove a cancelled request from the queue."""
        assert isinstance(future, QueuedRequest)
        if future.cancelled() and self._remove(future):
            self._bound.shrink(time.monotonic() - future.since)

    def _remove(self, request: QueuedRequest) -> bool:
        with self._lock:
            try:
                self._queue.remove(request)
            except ValueError:
                return False
            self._byte_budget.add(-request.size)
            return True

    def expire(self, request: QueuedRequest) -> None:
        """Fail ``request``: its wait has timed out."""
        if self._remove(request) and request.set_running_or_notify_cancel():
            self._record_wait(request)
            self._bound.shrink(self._max_wait_s)
            request.set_exception(
                Overloaded(
                    f"the request to '{self.name}' has waited for {self._max_wait_s * 1e3:g} ms "
                    "(server.admission.max_wait_ms)",
                    "queue_wait",
                )
            )
