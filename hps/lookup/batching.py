"""Dynamic batching: requests that wait at the same time are answered as one.

While ``max_in_flight`` batches are in flight, requests are queued; those of one merge key form the next
batch. So an idle server adds no delay, and batches grow with the load. With ``delay_s``, each request waits
that long for others, like Triton's ``max_queue_delay_microseconds``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from hps.errors import DeadlineExceeded, TierError, Unavailable

Request = TypeVar("Request")
RequestIn = TypeVar("RequestIn", contravariant=True)
Result = TypeVar("Result")
# The timer thread exits after this long without work.
_TIMER_IDLE_S = 10.0


def is_server_error(error: BaseException) -> bool:
    """True if the error comes from the server's state, not from the request."""
    return isinstance(error, Unavailable | DeadlineExceeded | TierError)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a batch: ``rows`` samples, ``keys`` keys, ``delay_s`` to wait, ``max_in_flight`` batches.

    A request larger than ``rows`` or ``keys`` is a batch by itself."""

    rows: int
    keys: int
    delay_s: float = 0.0
    max_in_flight: int = 1


class BatchSize(NamedTuple):
    """Size of one request, as `BatchLimits` counts it. ``samples`` is for statistics only."""

    rows: int
    keys: int
    samples: int


class BatchWork(Protocol[RequestIn, Result]):
    """Interface of the work that a `Batcher` batches. Thread-safe."""

    def merge_key(self, request: RequestIn) -> tuple[Hashable, Any] | None:
        """Return the merge key (equal for requests that one batch may hold) and the request to merge.

        None for a request that must run alone. Raises ``BadRequest`` for an invalid request.
        """
        ...

    def size(self, request: RequestIn) -> BatchSize: ...

    def deadline(self, request: RequestIn) -> float | None: ...

    def submit_one(self, request: RequestIn) -> Future[Result]:
        """Start one request; its future may be done already."""
        ...

    def submit_batch(self, requests: Sequence[RequestIn]) -> Future[list[Result]]:
        """Start several requests of one merge key; the future has a result for each."""
        ...


class Batcher(Generic[Request, Result]):
    """Batches ``work`` within ``limits``; passes each batch's number of requests to ``observe``.
    Thread-safe.

    An error of the server's state (overload, deadline, a store) fails the whole batch. After any other
    error the batch is split in halves, which run one after the other, recursively: only the invalid request
    fails.
    """

    def __init__(
        self,
        work: BatchWork[Request, Result],
        limits: BatchLimits,
        observe: Callable[[float], None] = lambda _requests: None,
    ) -> None:
        self._work = work
        self._limits = limits
        self._observe = observe
        self._in_flight = 0
        self._queues: dict[Hashable, _BatchQueue] = {}
        self._changed = threading.Condition()
        self._timer: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """True if a request may start alone, now."""
        limits = self._limits
        return not (limits.delay_s or self._queues) and self._in_flight < limits.max_in_flight

    def submit(self, request: Request) -> Future[Result]:
        """Start ``request``, alone or in a batch.

        Raises what ``BatchWork.merge_key`` and ``BatchWork.submit_one`` raise."""
        if self.is_idle:
            return self.track(self._work.submit_one(request))
        joined = self._work.merge_key(request)
        if joined is None:
            return self._work.submit_one(request)
        key, request = joined
        size, deadline = self._work.size(request), self._work.deadline(request)
        item = _QueuedItem(request, size, deadline, self._limits.delay_s)
        with self._changed:
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = _BatchQueue(self._limits)
            queue.add(item)
            if self._limits.delay_s:
                self._wake_timer()
        item.future.add_done_callback(lambda future: self._drop_cancelled(key, item, future))
        self._begin_batches()
        return item.future

    def track(self, future: Future[Result]) -> Future[Result]:
        """Count a request that started alone as in flight until its ``future`` is done."""
        if not future.done():
            with self._changed:
                self._in_flight += 1
            future.add_done_callback(self._finish)
        return future

    def _finish(self, _: Future[Any] | None = None) -> None:
        with self._changed:
            self._in_flight -= 1
            self._changed.notify()
        self._begin_batches()

    def _begin_batches(self) -> None:
        """Start all batches that may start. A loop, not recursion: a batch may finish as it starts."""
        while batch := self._next():
            self._observe(len(batch))
            if self._advance(self._answer(batch)):
                with self._changed:
                    self._in_flight -= 1
                    self._changed.notify()

    def _advance(self, answers: Iterator[Future[Any]]) -> bool:
        """Run ``answers`` up to the next pending future; True if the whole batch is answered.

        Otherwise it resumes when that future is done."""
        for pending in answers:
            if not pending.done():
                pending.add_done_callback(lambda _: self._resume(answers))
                return False
        return True

    def _resume(self, answers: Iterator[Future[Any]]) -> None:
        if self._advance(answers):
            self._finish()

    def _next(self) -> list[_QueuedItem]:
        """Dequeue the next batch and count it as in flight; empty if none may start."""
        now = time.monotonic()
        with self._changed:
            while self._in_flight < self._limits.max_in_flight:
                key = self._due_key(now)
                if key is None:
                    break
                queue = self._queues[key]
                batch = [each for each in queue.take() if each.try_start(now)]
                if not queue.items:
                    del self._queues[key]
                if batch:
                    self._in_flight += 1
                    return batch
        return []

    def _due_key(self, now: float) -> Hashable | None:
        """Return the merge key of the oldest queue that may start; None if none may."""
        longest_waiting, since = None, float("inf")
        for key, queue in self._queues.items():
            if queue.due < since and (queue.due <= now or queue.is_full):
                longest_waiting, since = key, queue.due
        return longest_waiting

    def _answer(self, batch: list[_QueuedItem]) -> Iterator[Future[Any]]:
        """Answer ``batch``; yield the futures to wait for, one after another."""
        alone = len(batch) == 1
        error: BaseException | None
        run: Future[Any]
        try:
            requests = [each.request for each in batch]
            run = self._work.submit_one(*requests) if alone else self._work.submit_batch(requests)
        except BaseException as fault:  # any error must reach the callers
            error = fault
        else:
            yield run
            cancelled = run.cancelled()
            error = Unavailable("the batch was cancelled") if cancelled else run.exception()
        if error is None:
            results = [run.result()] if alone else run.result()
            execution = iter((sum([each.size.samples for each in batch]),))
            for each, result in zip(batch, results, strict=True):
                each.future.execution = execution
                each.future.set_result(result)
        elif alone or is_server_error(error) or not isinstance(error, Exception):
            for each in batch:
                each.future.set_exception(error)
        else:
            # Halves run one after the other: in parallel they could exceed `max_in_flight`.
            half = len(batch) // 2
            yield from self._answer(batch[:half])
            yield from self._answer(batch[half:])

    def _drop_cancelled(self, key: Hashable, item: _QueuedItem, future: Future[Any]) -> None:
        """Dequeue a cancelled request."""
        if not future.cancelled():
            return
        with self._changed:
            queue = self._queues.get(key)
            if queue is not None and item in queue.items:
                queue.remove(item)
                if not queue.items:
                    del self._queues[key]

    def _wake_timer(self) -> None:
        if self._timer is None:
            self._timer = threading.Thread(target=self._time, name="hps-batches", daemon=True)
            self._timer.start()
        else:
            self._changed.notify()

    def _time(self) -> None:
        """Start batches when they are due; return after `_TIMER_IDLE_S` without work."""
        while True:
            with self._changed:
                due = min((queue.due for queue in self._queues.values()), default=None)
                left_s = _TIMER_IDLE_S if due is None else due - time.monotonic()
                if left_s <= 0 and self._in_flight >= self._limits.max_in_flight:
                    left_s = _TIMER_IDLE_S  # a batch that finishes starts the next ones
                if left_s > 0 and not self._changed.wait(left_s) and not self._queues:
                    self._timer = None
                    return
            self._begin_batches()


class _BatchQueue:
    """Requests of one merge key, in order of arrival."""

    __slots__ = ("_limits", "items", "keys", "rows")

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self.items: deque[_QueuedItem] = deque()
        self.rows = self.keys = 0

    @property
    def due(self) -> float:
        """Instant (``time.monotonic()``) at which the first request starts even if the batch is not full."""
        return self.items[0].due

    @property
    def is_full(self) -> bool:
        """True if the requests fill a batch."""
        return self.rows >= self._limits.rows or self.keys >= self._limits.keys

    def add(self, item: _QueuedItem) -> None:
        self.items.append(item)
        self._count(item, 1)

    def remove(self, item: _QueuedItem) -> None:
        self.items.remove(item)
        self._count(item, -1)

    def take(self) -> list[_QueuedItem]:
        """Dequeue the next batch: as many requests as fit, at least one."""
        batch: list[_QueuedItem] = []
        rows = keys = 0
        while self.items:
            size = self.items[0].size
            rows, keys = rows + size.rows, keys + size.keys
            if batch and (rows > self._limits.rows or keys > self._limits.keys):
                break
            batch.append(self.items.popleft())
            self._count(batch[-1], -1)
        return batch

    def _count(self, item: _QueuedItem, sign: int) -> None:
        self.rows += sign * item.size.rows
        self.keys += sign * item.size.keys


class _BatchedFuture(Future[Any]):
    """The future of a request that waited for its batch, with values for statistics."""

    queued_ns = 0
    """Nanoseconds that the request waited for its batch."""
    execution: Iterator[int] | None = None
    """Yields the samples of the whole batch once, to the first of its requests whose statistics are
    recorded."""


@dataclass(slots=True, eq=False)
class _QueuedItem:
    """A request that waits for its batch, ``delay_s`` at least unless the batch is full."""

    request: Any
    size: BatchSize
    deadline: float | None
    delay_s: float
    since: float = field(default_factory=time.monotonic)
    future: _BatchedFuture = field(default_factory=_BatchedFuture)

    @property
    def due(self) -> float:
        """Instant (``time.monotonic()``) at which it starts even if the batch is not full."""
        return self.since + self.delay_s

    def try_start(self, now: float) -> bool:
        """Mark the request as started; False if it was cancelled or its deadline has passed.

        In the latter case its future fails here."""
        if not self.future.set_running_or_notify_cancel():
            return False
        # The request may have arrived after `now`.
        self.future.queued_ns = max(0, int((now - self.since) * 1e9))
        if self.deadline is None or now <= self.deadline:
            return True
        self.future.set_exception(
            DeadlineExceeded("deadline exceeded while the request was queued for a batch")
        )
        return False
