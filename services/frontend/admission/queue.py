"""One line: which requests to a name are worked at, which wait, and which are refused.

A request is refused when it comes rather than after a wait: where it would wait for longer than it may, if
those under way take as long as others have of late, it costs least then and its client can still ask
elsewhere.
"""

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

# Of the time that a request has left, the part for which it may wait: others may take longer than expected.
_OF_DEADLINE = 0.5


class AdmissionQueue:
    """An `Endpoint` whose requests wait while as many are worked at as may be. Any thread may call it."""

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
        """Requests in the line."""
        return len(self._line)

    @property
    def is_busy(self) -> bool:
        """Whether as many requests are worked at as may be, with those that are expected."""
        return self.running + self._expected >= self.most_running

    @property
    def rules(self) -> Mapping[str, InputRule]:
        return self._endpoint.rules

    def outputs(self, call: InferenceRequest, result: Any) -> list[Output]:
        """See ``Endpoint.outputs``."""
        return self._endpoint.outputs(call, result)

    def require_room(self, size: int = 0) -> None:
        """Raises ``Overloaded`` when a request of ``size`` bytes would be refused now."""
        refusal = self.refusal(size)
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal  # it knows this frame, and those that hold the request

    def expect(self, size: int) -> Overloaded | None:
        """Keep a place for a request of ``size`` bytes that another thread reads first, and then hands to
        `submit` as ``expected``, or `forget`s; or what it is refused with. Requests that came meanwhile would
        be read in vain."""
        with self._lock:
            if (refusal := self.refusal(size)) is None:
                self._expected += 1
                self._room.add(size)
            return refusal

    def require_bytes(self, size: int, expected: int) -> None:
        """Raises ``Overloaded`` when a request that is expected with ``expected`` bytes may not wait with
        ``size`` more."""
        self._room.require(size, expected)

    def forget(self, size: int) -> None:
        """One of ``size`` bytes that was expected does not come."""
        with self._lock:
            self._has_come(size)

    def _has_come(self, size: int | None) -> None:
        """One has that was expected, if it was."""
        if size is not None:
            self._expected -= 1
            self._room.add(-size)

    def refusal(self, size: int = 0) -> Overloaded | None:
        """What `require_room` raises, if it does: to be told costs less than to catch it."""
        ahead = len(self._line) + self._expected
        waiting = ahead - max(0, self.most_running - self.running)
        if waiting >= self._most_waiting and self.is_busy:
            return Overloaded(
                f"overloaded: Exceeds maximum queue size ({waiting} requests to '{self.name}' wait already, "
                "server.admission.queue); retry later, or ask another replica",
                "queue_full",
            )
        if not self._bound.allows(self._estimate.wait_s(ahead)):
            return Overloaded(self._too_long, "queue_wait")
        return self._room.refusal(size)

    def _require_time(self, deadline: float) -> None:
        """Raises ``Overloaded`` when a request with this deadline would wait for too much of its time."""
        left_s = deadline - time.monotonic()
        wait_s = self._estimate.wait_s(len(self._line))
        if 0 < _OF_DEADLINE * left_s < wait_s:
            self._bound.shrink(wait_s)
            raise Overloaded(self._too_long, "queue_wait")

    def submit(
        self, call: InferenceRequest, deadline: float, *, expected: int | None = None
    ) -> Future[Any]:
        """See ``Endpoint.submit``. Raises ``Overloaded`` when the request may not wait; one that was
        ``expected``, with so many bytes, has its place, but may have more bytes than its message had."""
        if self.running < self.most_running and not self._line:
            if expected is None and not self._endpoint.is_long:
                return self._began(self._endpoint.submit(call, deadline))
            if self._has_entered(expected):
                return self._submitted(call, deadline)
        size = sum(array.nbytes for array in call.inputs.values())
        start = partial(self._endpoint.submit, call, deadline)
        return self._wait(start, size, deadline, expected=expected)

    def admit(self, start: Callable[[], Future[Any]], size: int, deadline: float) -> Future[Any]:
        """As ``submit`` for another kind of request, of ``size`` bytes, which ``start`` begins."""
        if self.running < self.most_running and not self._line:
            return self._began(start())
        return self._wait(start, size, deadline)

    def _has_entered(self, expected: int | None) -> bool:
        with self._lock:
            if self._line or self.running >= self.most_running:
                return False
            self._has_come(expected)
            self._enter()
            return True

    def _submitted(self, call: InferenceRequest, deadline: float) -> Future[Any]:
        """What the endpoint makes of a request that counts as running."""
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
        """One that had entered took no time."""
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
                self._has_come(expected)
            waiting = QueuedRequest(self.expire, start, deadline, size)
            self._line.append(waiting)
            self._room.add(size)
        waiting.add_done_callback(self._give_up)
        self._expiry.add(waiting)
        self._begin()  # one may have ended meanwhile
        return waiting

    def _end(self, _: Future[Any]) -> None:
        with self._lock:
            self._leave()
        self._begin()

    def _end_of(self, waiting: QueuedRequest, work: Future[Any]) -> None:
        """Its place is given back before its client hears of it, which may ask again at once."""
        with self._lock:
            self._leave()
        waiting.copy(work)
        self._begin()

    def _begin(self) -> None:
        """Begin what may begin. Not recursive: it may be done when it has begun."""
        while (waiting := self._next()) is not None:
            work = self._start(waiting)
            if work.done():
                self._leave_at_once()
                waiting.copy(work)
            else:
                work.add_done_callback(partial(self._end_of, waiting))

    def _next(self) -> QueuedRequest | None:
        """The next request; it counts as running."""
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
        """What will answer, or has failed."""
        try:
            if time.monotonic() > waiting.deadline:
                self._bound.shrink(waiting.queued_ns * 1e-9)
                raise DeadlineExceeded("the deadline passed while the request waited for its turn")
            waiting.work = work = waiting.start()
            return work
        except BaseException as error:  # whatever it was, the caller must hear of it
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _give_up(self, future: Future[Any]) -> None:
        """A request whose client no longer waits leaves the line."""
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
        """``waiting`` has waited for as long as it may."""
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
