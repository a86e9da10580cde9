"""Wrappers of a tier: count its hits, promote its rows, skip it while it is broken."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Semaphore
from typing import Protocol

from hps.errors import TierError, TierTimeout, Unavailable
from hps.threads import BoundedThreadPool
from hps.tiers.base import FetchContext, Part, Tier, copy_answer, new_part_for_misses
from hps.tiers.breaker import CircuitBreaker, State
from hps.tiers.checks import check_part
from hps.types import EmbeddingTable, KeyArray, Source, VectorArray, VersionArray

# The share of the tier's deadline for which a fetch waits for a free thread: long enough for a busy tier,
# short enough that a slow tier does not block many callers for long.
_WAIT_FOR_THREAD = 0.1
_DEFAULT = int(Source.DEFAULT)  # NumPy compares it faster than the enumeration's member

# The deadline is for up to this many keys; larger fetches get proportionally more time.
DEADLINE_KEYS = 10_000

Promote = Callable[[EmbeddingTable, KeyArray], None]
"""``promote(table, keys)`` receives the keys of rows to copy into another tier; it must not block.

It reads the rows again when it copies them, so that no row that was deleted meanwhile is copied."""


class FetchObserver(Protocol):
    """Receives ``(table, keys, hits)`` per part of each fetch, and the fetch's duration ``seconds``.

    ``hits`` counts rows and tombstones: keys that no further tier is asked for. ``skipped``: the tier was
    skipped, so the other keys were not searched."""

    def __call__(
        self,
        counts: list[tuple[EmbeddingTable, int, int]],
        seconds: float,
        skipped: bool = False,
        /,
    ) -> None: ...


class TierWrapper:
    """A tier that passes every call to ``inner``."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.info = inner.info

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self.inner.insert(table, keys, vectors, versions)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self.inner.update(table, keys, vectors, versions)

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        self.inner.delete(table, keys, versions)

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        self.inner.evict(table, keys)

    def close(self) -> None:
        self.inner.close()


class MeteredTier(TierWrapper):
    """Calls ``observe`` once after each fetch that did not raise.

    As thread-safe as ``inner`` and ``observe``."""

    def __init__(self, inner: Tier, observe: FetchObserver) -> None:
        super().__init__(inner)
        self.observe = observe

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        requested = [len(part.missing) for part in parts]
        before = len(ctx.degraded)
        start = time.perf_counter()
        span = None if ctx.origin is None else ctx.origin.begin(self.info.name)
        try:
            self.inner.fetch(parts, ctx)
        except BaseException as error:
            if span is not None:
                span.end(error)
            raise
        seconds = time.perf_counter() - start
        counts = [(p.table, n, n - len(p.missing)) for p, n in zip(parts, requested, strict=True)]
        if span is not None:
            span.note(asked=sum(requested), found=sum(hits for _, _, hits in counts))
            span.end()
        self.observe(counts, seconds, self.info.name in ctx.degraded[before:])


class PromotingTier(TierWrapper):
    """Calls ``promote`` with the keys whose rows ``inner`` returned, so that a faster tier gets a copy.

    Keys without a row (absent, deleted) are not promoted. Nothing is promoted if the fetch skipped
    ``target``, the tier that gets the copies: it may hold the rows already, and could not accept them now.
    On the way to a GPU cache, ``inner`` is the CPU cache and ``promote`` is `GpuPromotion.promote`. As
    thread-safe as ``inner`` and ``promote``."""

    def __init__(self, inner: Tier, promote: Promote, target: str) -> None:
        super().__init__(inner)
        self._promote = promote
        self._target = target

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        requested = [part.missing for part in parts]
        self.inner.fetch(parts, ctx)
        if self._target in ctx.degraded:
            return
        for part, positions in zip(parts, requested, strict=True):
            hits = positions[part.source[positions] != _DEFAULT]
            if len(hits):
                self._promote(part.table, part.keys[hits])


class GuardedTier(TierWrapper):
    """A tier that is skipped, and named in ``ctx.degraded``, while it is broken, late or busy.

    A fetch leaves the parts unchanged if it raises TierError or exceeds ``deadline_s`` (proportionally
    longer beyond ``DEADLINE_KEYS`` keys) or the request's own deadline. Other errors are faults of the
    program or the request and pass through. Only faults of the tier open the circuit. A call that a
    request's shorter deadline cut short is no fault, unless it then runs for longer than ``deadline_s``.

    A blocking call can't be interrupted, so it runs on one of this wrapper's ``threads`` threads, into
    separate arrays. An answer in time is copied to the caller's arrays; a late one is dropped, and its
    thread is free when the call returns. While all threads are busy, further fetches skip the tier, so a
    slow tier blocks at most ``threads`` callers. Such a skip is a fault of the tier only if every thread is
    in a call that was given up. A tier that does not block is called on the caller's thread, also into
    separate arrays, because a tier that fails half-way may have written some rows.

    ``on_skip(reason)`` receives ``open`` (circuit), ``failed``, ``late``, ``full``, ``no_time`` (the
    request had none left), or ``refused`` (the tier itself skipped some of the tables). The mutating
    verbs pass through unguarded: a write must succeed or raise, never be skipped."""

    def __init__(
        self,
        inner: Tier,
        deadline_s: float,
        failures_to_open: int,
        retry_after_s: float,
        *,
        threads: int = 8,
        on_skip: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        super().__init__(inner)
        self._deadline_s = deadline_s
        self._breaker = CircuitBreaker(failures_to_open, retry_after_s)
        self._threads = threads
        self._free = Semaphore(threads)
        self._workers = BoundedThreadPool(threads, threads, name=inner.info.name)
        self._on_skip = on_skip
        self._given_up: deque[_GuardedCall] = deque()

    @property
    def state(self) -> State:
        """State of the circuit breaker."""
        return self._breaker.state

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
        self._check_given_up()
        now = time.monotonic()
        keys = sum(len(part.missing) for part in parts)
        max_s = self._deadline_s * max(1.0, keys / DEADLINE_KEYS)
        full_time = ctx.deadline is None or ctx.deadline >= now + max_s
        limit = now + max_s if full_time or ctx.deadline is None else ctx.deadline
        if limit <= now:
            self._skip(ctx, "no_time")
            return
        permit = self._breaker.admit()
        if permit is None:
            self._skip(ctx, "open")
            return
        copies = [new_part_for_misses(part) for part in parts]
        call = _GuardedCall(self.inner, copies, FetchContext(limit, ctx.stream), permit, max_s)
        try:
            self._call(call, limit)
        except TierError as error:
            self._skip(ctx, self._report(error, call, full_time=full_time))
            return
        except BaseException:
            self._breaker.inconclusive(permit)
            raise
        self._breaker.succeeded(permit)
        if self.info.name in call.ctx.degraded:
            self._on_skip("refused")
        for answer_part, part in zip(call.parts, parts, strict=True):
            copy_answer(answer_part, part)
        ctx.degraded.extend(name for name in call.ctx.degraded if name not in ctx.degraded)

    def close(self) -> None:
        """Stop fetches, and close ``inner`` after the last call in it. Waits at most ``deadline_s``.

        If a call takes longer, ``inner`` is closed when that call returns. Idempotent."""
        self._workers.close(self._deadline_s, self.inner.close)

    def _call(self, call: _GuardedCall, limit: float) -> None:
        if not self.inner.info.blocking:
            call.run()
            return
        left_s = max(0.0, limit - time.monotonic())
        if not self._free.acquire(timeout=min(left_s, self._deadline_s * _WAIT_FOR_THREAD)):
            raise _GuardFull(self.info.name, "every thread is busy")
        try:
            future = self._workers.submit(partial(self._run, call))
        except Unavailable as error:  # the pool is closed
            self._free.release()
            raise _GuardFull(self.info.name, str(error)) from None
        try:
            failure = future.exception(max(0.0, limit - time.monotonic()))
        except TimeoutError:
            if future.cancel():
                self._free.release()
            else:
                self._given_up.append(call)
            message = f"no answer within {call.max_s:g} s"
            raise TierTimeout(self.info.name, message) from None
        if failure is not None:
            raise failure

    def _run(self, call: _GuardedCall) -> None:
        try:
            call.run()
        finally:
            self._free.release()

    def _report(self, error: TierError, call: _GuardedCall, *, full_time: bool) -> str:
        """Report to the breaker whether ``error`` is a fault of the tier; return the reason for the skip.

        ``full_time``: the call had all of the tier's deadline."""
        if isinstance(error, _GuardFull):
            is_failure, reason = len(self._given_up) >= self._threads, "full"
        elif isinstance(error, TierTimeout):
            is_failure, reason = full_time, "late"
        else:
            is_failure, reason = True, "failed"
        call.reported = is_failure
        (self._breaker.failed if is_failure else self._breaker.inconclusive)(call.permit)
        return reason

    def _check_given_up(self) -> None:
        """Remove given-up calls that have ended; report a failure for each that exceeds ``max_s``."""
        if not self._given_up:
            return
        now = time.monotonic()
        for _ in range(len(self._given_up)):
            try:
                call = self._given_up.popleft()
            except IndexError:  # another thread removed the last one
                return
            if call.ended:
                continue
            if not call.reported and now > call.started + call.max_s:
                call.reported = True
                self._breaker.failed(call.permit)
            self._given_up.append(call)

    def _skip(self, ctx: FetchContext, reason: str) -> None:
        self._on_skip(reason)
        if self.info.name not in ctx.degraded:
            ctx.degraded.append(self.info.name)


class _GuardFull(TierError):
    """No thread of the guard became free."""


@dataclass(slots=True, eq=False)
class _GuardedCall:
    """One guarded fetch with its private parts; its caller may have given it up."""

    tier: Tier
    parts: Sequence[Part]
    ctx: FetchContext
    permit: int
    max_s: float
    started: float = math.inf
    ended: bool = False
    reported: bool = False

    def run(self) -> None:
        self.started = time.monotonic()
        try:
            self.tier.fetch(self.parts, self.ctx)
        finally:
            self.ended = True
