"""Requests that wait at the same time, answered as one: dynamic batching.

While as many batches are under way as may be, requests wait; those of one kind that do are the next batch. So
a request meets no delay where nothing else is under way, and batches grow with the load. With a delay, each
request waits that long for others to come, as with Triton's ``max_queue_delay_microseconds``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from hps.errors import DeadlineExceeded, TierError, Unavailable

Request = TypeVar("Request")
Taken = TypeVar("Taken", contravariant=True)
Result = TypeVar("Result")
# A timer that nothing needs for so long ends.
_TIMER_IDLE_S = 10.0


def is_of_the_server(error: BaseException) -> bool:
    """Whether a request failed by the server's state, as others would; else it may be at fault itself."""
    return isinstance(error, Unavailable | DeadlineExceeded | TierError)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """At most ``rows`` samples and ``keys`` keys a batch, a larger request being one alone; ``delay_s`` to
    wait for others; ``at_once`` batches under way."""

    rows: int
    keys: int
    delay_s: float = 0.0
    at_once: int = 1


class BatchSize(NamedTuple):
    """What a request adds to a batch. ``samples`` are what it counts as where batches are told of; they bound
    nothing."""

    rows: int
    keys: int
    samples: int


class BatchWork(Protocol[Taken, Result]):
    """What is batched. Any thread may call it."""

    def kind(self, request: Taken) -> tuple[Hashable, Any] | None:
        """What is equal for requests that may be in one batch, and the request as it is joined to others;
        None for one that must be alone. Raises ``BadRequest`` for one at fault."""
        ...

    def size(self, request: Taken) -> BatchSize: ...

    def deadline(self, request: Taken) -> float | None: ...

    def alone(self, request: Taken) -> Future[Result]:
        """Begin one request; it may be done already."""
        ...

    def together(self, requests: Sequence[Taken]) -> Future[list[Result]]:
        """Begin several of one kind: an answer for each."""
        ...


class Batcher(Generic[Request, Result]):
    """Batches ``work`` within ``bounds``; ``observe`` is told of the requests in each batch. Any number of
    threads may call it.

    What fails a batch fails all of it when it is the server's state (overload, deadline, a store); else its
    halves are tried one after the other, and theirs, so that only the request at fault fails.
    """

    def __init__(
        self,
        work: BatchWork[Request, Result],
        bounds: BatchLimits,
        observe: Callable[[float], None] = lambda _requests: None,
    ) -> None:
        self._work = work
        self._bounds = bounds
        self._observe = observe
        self._under_way = 0
        self._lines: dict[Hashable, _BatchQueue] = {}
        self._changed = threading.Condition()
        self._timer: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether a request may begin alone, at once."""
        bounds = self._bounds
        return not (bounds.delay_s or self._lines) and self._under_way < bounds.at_once

    def submit(self, request: Request) -> Future[Result]:
        """Begin ``request``, alone or with others. Raises as ``BatchWork.kind`` and ``BatchWork.alone``
        do."""
        if self.is_idle:
            return self.began(self._work.alone(request))
        joined = self._work.kind(request)
        if joined is None:
            return self._work.alone(request)
        kind, request = joined
        size, deadline = self._work.size(request), self._work.deadline(request)
        waiting = _QueuedItem(request, size, deadline, self._bounds.delay_s)
        with self._changed:
            line = self._lines.get(kind)
            if line is None:
                line = self._lines[kind] = _BatchQueue(self._bounds)
            line.add(waiting)
            if self._bounds.delay_s:
                self._wake_timer()
        waiting.future.add_done_callback(lambda future: self._forget(kind, waiting, future))
        self._begin_batches()
        return waiting.future

    def began(self, future: Future[Result]) -> Future[Result]:
        """``future``, of a request that began alone; others wait until it is done."""
        if not future.done():
            with self._changed:
                self._under_way += 1
            future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[Any] | None = None) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify()
        self._begin_batches()

    def _begin_batches(self) -> None:
        """Begin what may begin. Not recursive: a batch may be done when it has begun."""
        while batch := self._next():
            self._observe(len(batch))
            if self._go_on(self._answers(batch)):
                with self._changed:
                    self._under_way -= 1
                    self._changed.notify()

    def _go_on(self, answers: Iterator[Future[Any]]) -> bool:
        """Whether all of a batch is answered. If not, this is called again when more of it can be."""
        for awaited in answers:
            if not awaited.done():
                awaited.add_done_callback(lambda _: self._resume(answers))
                return False
        return True

    def _resume(self, answers: Iterator[Future[Any]]) -> None:
        if self._go_on(answers):
            self._ended()

    def _next(self) -> list[_QueuedItem]:
        """The requests of the next batch; it counts as under way. Empty when none may begin yet."""
        now = time.monotonic()
        with self._changed:
            while self._under_way < self._bounds.at_once:
                kind = self._ready(now)
                if kind is None:
                    break
                line = self._lines[kind]
                batch = [each for each in line.take() if each.starts(now)]
                if not line.waiting:
                    del self._lines[kind]
                if batch:
                    self._under_way += 1
                    return batch
        return []

    def _ready(self, now: float) -> Hashable | None:
        """The kind that may begin and has waited for longest."""
        found, since = None, float("inf")
        for kind, line in self._lines.items():
            if line.due < since and (line.due <= now or line.is_full):
                found, since = kind, line.due
        return found

    def _answers(self, batch: list[_QueuedItem]) -> Iterator[Future[Any]]:
        """Answer ``batch``; gives the futures it waits for, one after another."""
        alone = len(batch) == 1
        error: BaseException | None
        run: Future[Any]
        try:
            requests = [each.request for each in batch]
            run = self._work.alone(*requests) if alone else self._work.together(requests)
        except BaseException as fault:  # whatever it was, those who asked must hear of it
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
        elif alone or is_of_the_server(error) or not isinstance(error, Exception):
            for each in batch:
                each.future.set_exception(error)
        else:
            # In halves, one after the other: all at once would be more than there is room for.
            half = len(batch) // 2
            yield from self._answers(batch[:half])
            yield from self._answers(batch[half:])

    def _forget(self, kind: Hashable, waiting: _QueuedItem, future: Future[Any]) -> None:
        """A request that was given up makes room."""
        if not future.cancelled():
            return
        with self._changed:
            line = self._lines.get(kind)
            if line is not None and waiting in line.waiting:
                line.remove(waiting)
                if not line.waiting:
                    del self._lines[kind]

    def _wake_timer(self) -> None:
        if self._timer is None:
            self._timer = threading.Thread(target=self._time, name="hps-batches", daemon=True)
            self._timer.start()
        else:
            self._changed.notify()

    def _time(self) -> None:
        """Begin batches when they are due, as long as there are some now and then."""
        while True:
            with self._changed:
                due = min((line.due for line in self._lines.values()), default=None)
                left_s = _TIMER_IDLE_S if due is None else due - time.monotonic()
                if left_s <= 0 and self._under_way >= self._bounds.at_once:
                    left_s = _TIMER_IDLE_S  # what ends will begin them
                if left_s > 0 and not self._changed.wait(left_s) and not self._lines:
                    self._timer = None
                    return
            self._begin_batches()


class _BatchQueue:
    """Requests of one kind, in the order they came."""

    __slots__ = ("_bounds", "keys", "rows", "waiting")

    def __init__(self, bounds: BatchLimits) -> None:
        self._bounds = bounds
        self.waiting: deque[_QueuedItem] = deque()
        self.rows = self.keys = 0

    @property
    def due(self) -> float:
        """When the first may begin, though the batch is not full."""
        return self.waiting[0].due

    @property
    def is_full(self) -> bool:
        """Whether there is enough for a batch."""
        return self.rows >= self._bounds.rows or self.keys >= self._bounds.keys

    def add(self, waiting: _QueuedItem) -> None:
        self.waiting.append(waiting)
        self._count(waiting, 1)

    def remove(self, waiting: _QueuedItem) -> None:
        self.waiting.remove(waiting)
        self._count(waiting, -1)

    def take(self) -> list[_QueuedItem]:
        """The next batch: as many as fit, at least one."""
        taken: list[_QueuedItem] = []
        rows = keys = 0
        while self.waiting:
            size = self.waiting[0].size
            rows, keys = rows + size.rows, keys + size.keys
            if taken and (rows > self._bounds.rows or keys > self._bounds.keys):
                break
            taken.append(self.waiting.popleft())
            self._count(taken[-1], -1)
        return taken

    def _count(self, waiting: _QueuedItem, sign: int) -> None:
        self.rows += sign * waiting.size.rows
        self.keys += sign * waiting.size.keys


class _BatchedFuture(Future[Any]):
    """The answer to a request that waited for its batch, with what statistics are to know of it."""

    queued_ns = 0
    """How long it waited."""
    execution: Iterator[int] | None = None
    """Gives the samples of the whole batch, to the first of its requests for which it is asked: which of them
    are answered is not known before, as their time may be up by then."""


class _QueuedItem:
    """A request that waits for its batch. ``due``: when it may begin, though the batch is not full."""

    __slots__ = ("deadline", "due", "future", "request", "since", "size")

    def __init__(
        self, request: Any, size: BatchSize, deadline: float | None, delay_s: float
    ) -> None:
        self.request = request
        self.size = size
        self.deadline = deadline
        self.since = time.monotonic()
        self.due = self.since + delay_s
        self.future = _BatchedFuture()

    def starts(self, now: float) -> bool:
        """Whether anybody still waits for it. Those whose time is up are told so."""
        if not self.future.set_running_or_notify_cancel():
            return False
        # It may have come after `now`.
        self.future.queued_ns = max(0, int((now - self.since) * 1e9))
        if self.deadline is None or now <= self.deadline:
            return True
        self.future.set_exception(
            DeadlineExceeded("the deadline passed while the request waited for its batch")
        )
        return False
