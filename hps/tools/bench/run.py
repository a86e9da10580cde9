"""A run: send requests for a while; measure latencies and count errors.

Closed loop: a number of callers, each of which sends when it has its answer. Open loop: requests become
due by the clock, whatever the server does, and latency counts from then: a request that a slow server
delays is measured with its wait (Gil Tene: no coordinated omission)."""

from __future__ import annotations

import asyncio
import gc
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import numpy as np

from hps.client.errors import RetryLater
from hps.errors import HpsError
from hps.tools.bench.histogram import LatencyHistogram
from hps.tools.bench.senders import Sender

SLICES = 20
"""Slices of a run, of equal time or, with a number of requests, of equal number, each with a histogram: their
variation shows whether a difference between two runs is significant."""
_WARMING_UP = -1
_KINDS_KEPT = 50


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Settings of a run.

    ``concurrency``: callers of a closed loop, or the limit of requests in flight of an open one. ``rate``
    None: closed loop. ``requests``: limit on measured requests; None: no limit."""

    duration_s: float
    warmup_s: float
    concurrency: int
    rate: float | None = None
    arrivals: Literal["poisson", "constant"] = "poisson"
    requests: int | None = None
    timeout_s: float = 10.0
    seed: int = 1


@dataclass
class BenchResult:
    """Measurements of a run.

    ``seconds``: duration of the measurement. ``slices``: latencies of successes, by due time; ``spans``: the
    seconds of each slice, 0 for one that was not reached. ``answered``: answers during the measurement,
    whenever they were requested. ``late``: delays between the due time and the sending; ``full``: requests
    that waited because the limit was in flight. ``errors``: count of each kind, and its first text.
    ``own_cpu``: the share of a core that this process used."""

    seconds: float = 0.0
    slices: list[LatencyHistogram] = field(
        default_factory=lambda: [LatencyHistogram() for _ in range(SLICES)]
    )
    spans: list[float] = field(default_factory=lambda: [0.0] * SLICES)
    answered: int = 0
    late: LatencyHistogram = field(default_factory=LatencyHistogram)
    full: int = 0
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    warmed_up: int = 0
    own_cpu: float = 0.0
    interrupted: bool = False

    def failed(self, error: HpsError) -> None:
        kind = "Unavailable" if isinstance(error, RetryLater) else type(error).__name__
        number, first = self.errors.get(kind, (0, str(error)))
        if number or len(self.errors) < _KINDS_KEPT:
            self.errors[kind] = number + 1, first


def run(
    make: Callable[[], Sender], prepare: Callable[[Sender], Sequence[Any]], plan: BenchPlan
) -> BenchResult:
    """Send the messages of ``prepare`` in turn with the sender of ``make``, by ``plan``.

    SIGINT ends the run with the results so far."""

    async def whole() -> BenchResult:
        sender = make()
        try:
            return await _BenchRun(sender, prepare(sender), plan).go()
        finally:
            await sender.close()

    # Only the select selector waits for less than a millisecond, which due times need.
    def loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(selectors.SelectSelector())

    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(whole())
    finally:
        gc.unfreeze()


class _BenchRun:
    def __init__(self, sender: Sender, messages: Sequence[Any], plan: BenchPlan) -> None:
        self._sender, self._messages, self._plan = sender, messages, plan
        self._outcome = BenchResult()
        self._numbers: Iterator[int] = count()
        self._begin = self._from = self._to = 0  # of the run and of the measurement, ns
        self._slice_ns = 1
        self._begun: dict[int, int] = {}  # due time of the first request of each slice
        self._last = self._taken = 0

    async def go(self) -> BenchResult:
        plan, outcome = self._plan, self._outcome
        self._begin = time.perf_counter_ns()
        self._from = self._last = self._begin + round(plan.warmup_s * 1e9)
        self._to = self._from + round(plan.duration_s * 1e9)
        self._slice_ns = max(1, (self._to - self._from) // SLICES)
        own = asyncio.create_task(self._own_cpu())
        load = asyncio.create_task(self._closed() if plan.rate is None else self._open(plan.rate))
        loop = asyncio.get_running_loop()
        with suppress(ValueError, RuntimeError, NotImplementedError):  # not the main thread
            loop.add_signal_handler(signal.SIGINT, load.cancel)
        try:
            await load
        except asyncio.CancelledError:
            outcome.interrupted = True
        finally:
            own.cancel()
            with suppress(ValueError, RuntimeError, NotImplementedError):
                loop.remove_signal_handler(signal.SIGINT)
        ended = self._last if outcome.interrupted or plan.requests else self._to
        outcome.seconds = max(0, ended - self._from) * 1e-9
        outcome.spans = self._spans(ended)
        return outcome

    def _spans(self, ended: int) -> list[float]:
        """Seconds of each slice."""
        if self._plan.requests is None:
            marks = [self._from + number * self._slice_ns for number in range(SLICES)]
        else:  # a slice without requests ends where it begins
            begun, marks = ended, []
            for number in reversed(range(SLICES)):
                begun = self._begun.get(number, begun)
                marks.insert(0, begun)
        ends = [min(mark, ended) for mark in (*marks[1:], ended)]
        return [max(0, end - mark) * 1e-9 for mark, end in zip(marks, ends, strict=True)]

    async def _own_cpu(self) -> None:
        """Updated repeatedly: the run may end at any time."""
        await asyncio.sleep(self._plan.warmup_s)
        cpu, wall = time.process_time(), time.perf_counter()
        while True:
            await asyncio.sleep(0.1)
            self._outcome.own_cpu = (time.process_time() - cpu) / (time.perf_counter() - wall)

    async def _closed(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.concurrency):
                group.create_task(self._caller())

    async def _caller(self) -> None:
        while (now := time.perf_counter_ns()) < self._to:
            if (place := self._slice(now)) is None:
                return
            await self._one(now, place)

    async def _open(self, rate: float) -> None:
        free, held_until = asyncio.Semaphore(self._plan.concurrency), 0
        give_up = self._to + round(self._plan.timeout_s * 1e9)

        async def one(due: int, place: int) -> None:
            try:
                await self._one(due, place)
            finally:
                free.release()

        async with asyncio.TaskGroup() as group:
            for due in self._due(rate):
                if (place := self._slice(due)) is None:
                    break
                if (ahead := due - time.perf_counter_ns()) > 0:
                    await asyncio.sleep(ahead * 1e-9)
                waits = free.locked()
                await free.acquire()
                if waits:
                    held_until = time.perf_counter_ns()
                self._outcome.full += place != _WARMING_UP and due < held_until
                if time.perf_counter_ns() > give_up:
                    self._never_sent(due, rate)
                    break
                group.create_task(one(due, place))

    def _due(self, rate: float) -> Iterator[int]:
        """Due times of requests, ns."""
        random = np.random.default_rng(self._plan.seed)
        due = float(self._begin)
        while True:
            if self._plan.arrivals == "constant":
                gaps = np.full(1024, 1e9 / rate)
            else:
                gaps = random.exponential(1e9 / rate, 1024)
            for gap in gaps.tolist():
                due += gap
                if due >= self._to:
                    return
                yield int(due)

    def _never_sent(self, due: int, rate: float) -> None:
        left = max(1, round((self._to - due) * 1e-9 * rate))
        words = "the server was so far behind that they were given up; ask for a lower --rate"
        self._outcome.errors["NotSent"] = left, words

    def _slice(self, due: int) -> int | None:
        """The slice of a request by its due time; None when no more are sent."""
        if due < self._from:
            return _WARMING_UP
        if self._plan.requests is None:
            return min((due - self._from) // self._slice_ns, SLICES - 1)
        if self._taken == self._plan.requests:
            return None
        place = self._taken * SLICES // self._plan.requests
        self._taken += 1
        self._begun.setdefault(place, due)
        return place

    async def _one(self, due: int, place: int) -> None:
        """Send a request that is due."""
        message = self._messages[next(self._numbers) % len(self._messages)]
        sent, error = time.perf_counter_ns(), None
        try:
            await self._sender.send(message, time.monotonic() + self._plan.timeout_s)
        except HpsError as raised:
            error = raised
        done = time.perf_counter_ns()
        outcome = self._outcome
        counts = self._plan.requests is None and self._from <= done < self._to
        outcome.answered += error is None and counts
        if place == _WARMING_UP:
            outcome.warmed_up += 1
            return
        self._last = max(self._last, done)
        if error is not None:
            outcome.failed(error)
            if self._plan.rate is None:
                await asyncio.sleep(0.001)  # do not flood a server that rejects immediately
            return
        outcome.answered += self._plan.requests is not None
        outcome.slices[place].record(done - due)
        outcome.late.record(sent - due)
