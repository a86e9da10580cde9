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
from services.frontend.admission.byte_budget import ByteBudget, QueueTimeout
from services.frontend.admission.queued_request import QueuedRequest
from services.frontend.admission.wait_bound import WaitBound, WaitEstimate
from services.frontend.datatypes import InputRule
from services.frontend.endpoints import Endpoint, Output
from services.frontend.errors import Overloaded
from services.frontend.inference_request import InferenceRequest

# Share of a request's remaining time that it may spend queued: running it may take longer than expected.
_OF_DEADLINE = 0.5


class AdmissionQueue:
    """An `Endpoint` with a bounded number of running requests; further ones are queued. Thread-safe."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: AdmissionSettings,
        running: int,
        room: ByteBudget,
        expiry: QueueTimeout,
        metrics: Metrics,
    ) -> None:
        self.name = endpoint.name
        self.version = endpoint.version
        self.raw_input = endpoint.raw_input
        self.is_long = endpoint.is_long
        self._endpoint = endpoint
        self.most_running = running
        self._most_waiting = settings.queue
        self._max_wait_s = settings.max_wait_ms / 1e3
        self._too_long = (
            f"overloaded: a request to '{self.name}' would wait longer than {settings.max_wait_ms:g} ms "
            "(server.admission.max_wait_ms), than ten others take, or than its deadline allows; retry later, "
            "or ask another replica"
        )
        self._room = room
        self._expiry = expiry
        self._observe = metrics.histogram(m.QUEUE_SECONDS, endpoint.name).observe
        self._line: deque[QueuedRequest] = deque()
        self._lock = threading.Lock()
        self.running = 0
        self._expected = 0
        self._estimate = WaitEstimate(running)
        self._bound = WaitBound(self._max_wait_s, self._estimate)

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._line)

    @property
    def is_busy(self) -> bool:
        """True if running and expected (reserved) requests take all slots."""
        return self.running + self._expected >= self.most_running

    @property
    def rules(self) -> Mapping[str, InputRule]:
        return self._endpoint.rules

    def outputs(self, call: InferenceRequest, result: Any) -> list[Output]:
        """See ``Endpoint.outputs``."""
        return self._endpoint.outputs(call, result)

    def require_room(self, size: int = 0) -> None:
        """Raise ``Overloaded`` if a request of ``size`` bytes would be rejected now."""
        refusal = self.refusal(size)
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal  # break the reference cycle: the error's traceback refers to this frame

    def expect(self, size: int) -> Overloaded | None:
        """Reserve a slot for a request of ``size`` bytes; return the error if it is rejected.

        Another thread decodes the request first, and then passes ``size`` to `submit` as ``expected``, or
        calls `forget`. Without a reservation, requests that arrive meanwhile could fill the queue, and the
        decoding would be wasted."""
        with self._lock:
            if (refusal := self.refusal(size)) is None:
                self._expected += 1
                self._room.add(size)
            return refusal

    def require_bytes(self, size: int, expected: int) -> None:
        """Raise ``Overloaded`` if ``size`` more bytes do not fit; ``expected`` bytes are reserved already."""
        self._room.require(size, expected)

    def forget(self, size: int) -> None:
        """Cancel a reservation of ``size`` bytes."""
        with self._lock:
            self._release_reservation(size)

    def _release_reservation(self, size: int | None) -> None:
        """Release the reservation of a request that has arrived, if it had one."""
        if size is not None:
            self._expected -= 1
            self._room.add(-size)

    def refusal(self, size: int = 0) -> Overloaded | None:
        """The error that `require_room` would raise, or None: cheaper than an exception."""
        ahead = len(self._line) + self._expected
        waiting = ahead - max(0, self.most_running - self.running)
        if waiting >= self._most_waiting and self.is_busy:
            return Overloaded(
                f"overloaded: Exceeds maximum queue size ({waiting} requests to '{self.name}' are queued, "
                "server.admission.queue); retry later, or ask another replica",
                "queue_full",
            )
        if not self._bound.allows(self._estimate.wait_s(ahead)):
            return Overloaded(self._too_long, "queue_wait")
        return self._room.refusal(size)

    def _require_time(self, deadline: float) -> None:
        """Raise ``Overloaded`` if a request would spend too much of its time until ``deadline`` queued."""
        left_s = deadline - time.monotonic()
        wait_s = self._estimate.wait_s(len(self._line))
        if 0 < _OF_DEADLINE * left_s < wait_s:
            self._bound.shrink(wait_s)
            raise Overloaded(self._too_long, "queue_wait")

    def submit(
        self, call: InferenceRequest, deadline: float, *, expected: int | None = None
    ) -> Future[Any]:
        """See ``Endpoint.submit``. Raises ``Overloaded`` if the request may not be queued.

        ``expected``: the bytes that were reserved for it by `expect`; it may need more by now."""
        if self.running < self.most_running and not self._line:
            if expected is None and not self._endpoint.is_long:
                return self._began(self._endpoint.submit(call, deadline))
            if self._has_entered(expected):
                return self._submitted(call, deadline)
        size = sum(array.nbytes for array in call.inputs.values())
        start = partial(self._endpoint.submit, call, deadline)
        return self._wait(start, size, deadline, expected=expected)

    def admit(self, start: Callable[[], Future[Any]], size: int, deadline: float) -> Future[Any]:
        """Admit a request of another kind, of ``size`` bytes, which ``start`` begins; see ``submit``."""
        if self.running < self.most_running and not self._line:
            return self._began(start())
        return self._wait(start, size, deadline)

    def _has_entered(self, expected: int | None) -> bool:
        with self._lock:
            if self._line or self.running >= self.most_running:
                return False
            self._release_reservation(expected)
            self._enter()
            return True

    def _submitted(self, call: InferenceRequest, deadline: float) -> Future[Any]:
        """Submit a request that counts as running to the endpoint."""
        try:
            work = self._endpoint.submit(call, deadline)
        except BaseException:
            self._leave_at_once()
            self._begin()
            raise
        work.add_done_callback(self._end)
        return work

    def _began(self, work: Future[Any]) -> Future[Any]:
        if not work.done():
            with self._lock:
                self._enter()
            work.add_done_callback(self._end)
        return work

    def _enter(self) -> None:
        self.running += 1
        self._estimate.begin()

    def _leave(self) -> None:
        self.running -= 1
        self._estimate.end()

    def _leave_at_once(self) -> None:
        """End a request that took no time."""
        with self._lock:
            self.running -= 1
            self._estimate.end_at_once()

    def _wait(
        self,
        start: Callable[[], Future[Any]],
        size: int,
        deadline: float,
        *,
        expected: int | None = None,
    ) -> Future[Any]:
        with self._lock:
            try:
                if expected is None:
                    self.require_room(size)
                else:
                    self._room.require(size - expected, expected)
                self._require_time(deadline)
            finally:
                self._release_reservation(expected)
            waiting = QueuedRequest(self.expire, start, deadline, size)
            self._line.append(waiting)
            self._room.add(size)
        waiting.add_done_callback(self._give_up)
        self._expiry.add(waiting)
        self._begin()  # a slot may have become free meanwhile
        return waiting

    def _end(self, _: Future[Any]) -> None:
        with self._lock:
            self._leave()
        self._begin()

    def _end_of(self, waiting: QueuedRequest, work: Future[Any]) -> None:
        """Complete ``waiting``. Free its slot first: its client may send the next request immediately."""
        with self._lock:
            self._leave()
        waiting.copy(work)
        self._begin()

    def _begin(self) -> None:
        """Start queued requests while slots are free. A loop, since a request may end as it starts."""
        while (waiting := self._next()) is not None:
            work = self._start(waiting)
            if work.done():
                self._leave_at_once()
                waiting.copy(work)
            else:
                work.add_done_callback(partial(self._end_of, waiting))

    def _next(self) -> QueuedRequest | None:
        """Remove the next request from the queue; it counts as running."""
        with self._lock:
            while self._line and self.running < self.most_running:
                waiting = self._line.popleft()
                self._room.add(-waiting.size)
                if waiting.set_running_or_notify_cancel():
                    self._enter()
                    break
            else:
                if not self._line and not self.is_busy:
                    self._bound.relax()
                return None
        self._learn(waiting)
        return waiting

    def _learn(self, waiting: QueuedRequest) -> None:
        waited_s = time.monotonic() - waiting.since
        waiting.queued_ns = int(waited_s * 1e9)
        self._observe(waited_s)

    def _start(self, waiting: QueuedRequest) -> Future[Any]:
        """Start a queued request; return the future of its work, failed if it could not start."""
        try:
            if time.monotonic() > waiting.deadline:
                self._bound.shrink(waiting.queued_ns * 1e-9)
                raise DeadlineExceeded("the deadline passed while the request was queued")
            waiting.work = work = waiting.start()
            return work
        except BaseException as error:  # any error must reach the caller
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _give_up(self, future: Future[Any]) -> None:
        """Remove a cancelled request from the queue."""
        assert isinstance(future, QueuedRequest)
        if future.cancelled() and self._remove(future):
            self._bound.shrink(time.monotonic() - future.since)

    def _remove(self, waiting: QueuedRequest) -> bool:
        with self._lock:
            try:
                self._line.remove(waiting)
            except ValueError:
                return False
            self._room.add(-waiting.size)
            return True

    def expire(self, waiting: QueuedRequest) -> None:
        """Fail ``waiting``: its wait has timed out."""
        if self._remove(waiting) and waiting.set_running_or_notify_cancel():
            self._learn(waiting)
            self._bound.shrink(self._max_wait_s)
            waiting.set_exception(
                Overloaded(
                    f"overloaded: the request to '{self.name}' has waited for {self._max_wait_s * 1e3:g} ms "
                    "(server.admission.max_wait_ms); retry later, or ask another replica",
                    "queue_wait",
                )
            )
