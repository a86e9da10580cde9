"""Tiers around a tier: Metered tells what each fetch found, Guarded keeps a broken tier from breaking
the answer."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Semaphore
from typing import Protocol

from hps.errors import TierError, TierTimeout, Unavailable
from hps.threads import BoundedThreadPool
from hps.tiers.base import FetchContext, Part, Tier, TierInfo
from hps.tiers.breaker import CircuitBreaker, State
from hps.tiers.checks import check_part
from hps.tiers.part_operations import copy_answer, new_part_for_misses
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

# A fetch waits for a thread of a guarded tier for this share of the tier's deadline: long enough for one
# that is merely busy, and a slow tier soon holds up nobody beyond its own threads.
_WAIT_FOR_THREAD = 0.1


# A deadline is meant for so many keys; larger fetches have more time in proportion.
DEADLINE_KEYS = 10_000


class FetchObserver(Protocol):
    """Told of each fetch that took ``seconds``: one ``(table, asked, found)`` per part.

    ``found`` counts the keys that need not be asked for further down: rows and tombstones. ``skipped``:
    the tier was passed over, so that the others were not looked for.
    """

    def __call__(
        self,
        counts: list[tuple[EmbeddingTable, int, int]],
        seconds: float,
        skipped: bool = False,
        /,
    ) -> None: ...


class TierWrapper:
    """A tier that passes everything on to ``inner``."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    @property
    def info(self) -> TierInfo:
        return self.inner.info

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
    """Calls ``observe`` once after each fetch that did not raise. As safe beside other
    threads as ``inner`` and ``observe`` are."""

    def __init__(self, inner: Tier, observe: FetchObserver) -> None:
        super().__init__(inner)
        self.observe = observe

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        asked = [len(part.missing) for part in parts]
        before = len(ctx.degraded)
        start = time.perf_counter()
        part = None if ctx.origin is None else ctx.origin.begin(self.info.name)
        try:
            self.inner.fetch(parts, ctx)
        except BaseException as error:
            if part is not None:
                part.end(error)
            raise
        seconds = time.perf_counter() - start
        counts = [(p.table, n, n - len(p.missing)) for p, n in zip(parts, asked, strict=True)]
        if part is not None:
            part.note(asked=sum(asked), found=sum(found for _, _, found in counts))
            part.end()
        self.observe(counts, seconds, self.info.name in ctx.degraded[before:])


class GuardedTier(TierWrapper):
    """A tier that is skipped while it is broken, late or busy, and named in ``ctx.degraded`` then.

    A fetch that raises TierError, or that isn't done within ``deadline_s`` (longer in proportion beyond
    ``DEADLINE_KEYS``) or the request's own deadline, leaves the parts as they were. Other errors are
    faults of the program or the request and pass through. Only what is the tier's own fault counts
    towards opening the circuit: a request that allows less than that can't open it, unless its call
    turns out to take longer.

    A blocking call can't be interrupted, so it runs on one of ``threads`` threads of this wrapper, into
    arrays of its own, which are copied to the caller's when it is done in time. A late answer is
    dropped, and the thread is free again when the call returns. While all threads stay busy, further
    fetches skip the tier, so that a slow one holds up ``threads`` callers at most; that is a
    failure of the tier only when every one of its calls has been given up. A tier that does not block
    is called in place, into arrays of its own too, because a tier that fails half-way may have
    written some rows.

    ``skipped(reason)`` is told why: ``open`` (circuit), ``failed``, ``late``, ``full``, ``no_time`` (the
    request had none left), or ``refused`` (the tier itself passed over some of the tables). The mutating
    verbs pass through unguarded: a write must be done or raise, never be skipped.
    """

    def __init__(
        self,
        inner: Tier,
        deadline_s: float,
        failures_to_open: int,
        retry_after_s: float,
        *,
        threads: int = 8,
        skipped: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        super().__init__(inner)
        self._deadline_s = deadline_s
        self._breaker = CircuitBreaker(failures_to_open, retry_after_s)
        self._threads = threads
        self._free = Semaphore(threads)
        self._workers = BoundedThreadPool(threads, threads, name=inner.info.name)
        self._skipped = skipped
        self._given_up: deque[_GuardedCall] = deque()

    @property
    def state(self) -> State:
        """The circuit's state."""
        return self._breaker.state

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
        self._judge_given_up()
        now = time.monotonic()
        keys = sum(len(part.missing) for part in parts)
        longest = self._deadline_s * max(1.0, keys / DEADLINE_KEYS)
        own = ctx.deadline is None or ctx.deadline >= now + longest
        limit = now + longest if own or ctx.deadline is None else ctx.deadline
        if limit <= now:
            self._skip(ctx, "no_time")
            return
        permit = self._breaker.admit()
        if permit is None:
            self._skip(ctx, "open")
            return
        answer = [new_part_for_misses(part) for part in parts]
        call = _GuardedCall(self.inner, answer, FetchContext(limit, ctx.stream), permit, longest)
        try:
            self._call(call, limit)
        except TierError as error:
            self._skip(ctx, self._judge(error, call, own=own))
            return
        except BaseException:
            self._breaker.undecided(permit)
            raise
        self._breaker.succeeded(permit)
        if self.info.name in call.ctx.degraded:
            self._skipped("refused")
        for mine, part in zip(call.parts, parts, strict=True):
            copy_answer(mine, part)
        ctx.degraded.extend(name for name in call.ctx.degraded if name not in ctx.degraded)

    def close(self) -> None:
        """Close the tier once no call is in it any more. Waits ``deadline_s`` for that; a call that
        hangs for longer closes the tier when it returns. Idempotent."""
        self._workers.close(self._deadline_s, self.inner.close)

    def _call(self, call: _GuardedCall, limit: float) -> None:
        if not self.inner.info.blocking:
            call.run()
            return
        left = max(0.0, limit - time.monotonic())
        if not self._free.acquire(timeout=min(left, self._deadline_s * _WAIT_FOR_THREAD)):
            raise _GuardFull(self.info.name, "every thread is busy")
        try:
            future = self._workers.submit(partial(self._run, call))
        except Unavailable as error:  # closed
            self._free.release()
            raise _GuardFull(self.info.name, str(error)) from None
        try:
            raised = future.exception(max(0.0, limit - time.monotonic()))
        except TimeoutError:
            if future.cancel():
                self._free.release()
            else:
                self._given_up.append(call)
            message = f"no answer within {call.longest_s:g} s"
            raise TierTimeout(self.info.name, message) from None
        if raised is not None:
            raise raised

    def _run(self, call: _GuardedCall) -> None:
        try:
            call.run()
        finally:
            self._free.release()

    def _judge(self, error: TierError, call: _GuardedCall, *, own: bool) -> str:
        """Tell the breaker what ``error`` says of the tier, and return why the tier is skipped.
        ``own``: the call had all of the tier's deadline."""
        if isinstance(error, _GuardFull):
            failed, reason = len(self._given_up) >= self._threads, "full"
        elif isinstance(error, TierTimeout):
            failed, reason = own, "late"
        else:
            failed, reason = True, "failed"
        call.judged = failed
        (self._breaker.failed if failed else self._breaker.undecided)(call.permit)
        return reason

    def _judge_given_up(self) -> None:
        """Forget calls that ended. Those that impatient requests gave up count as failures once they
        exceed their time."""
        if not self._given_up:
            return
        now = time.monotonic()
        for _ in range(len(self._given_up)):
            try:
                call = self._given_up.popleft()
            except IndexError:  # another thread is judging too
                return
            if call.ended:
                continue
            if not call.judged and now > call.started + call.longest_s:
                call.judged = True
                self._breaker.failed(call.permit)
            self._given_up.append(call)

    def _skip(self, ctx: FetchContext, reason: str) -> None:
        self._skipped(reason)
        if self.info.name not in ctx.degraded:
            ctx.degraded.append(self.info.name)


class _GuardFull(TierError):
    """No thread of the guard became free."""


class _GuardedCall:
    """One fetch on a thread of its own, which whoever asked for it may have given up."""

    __slots__ = ("_tier", "ctx", "ended", "judged", "longest_s", "parts", "permit", "started")

    def __init__(
        self,
        tier: Tier,
        parts: Sequence[Part],
        ctx: FetchContext,
        permit: int,
        longest_s: float,
    ) -> None:
        self._tier = tier
        self.longest_s = longest_s
        self.parts = parts
        self.ctx = ctx
        self.permit = permit
        self.started = math.inf
        self.ended = False
        self.judged = False

    def run(self) -> None:
        self.started = time.monotonic()
        try:
            self._tier.fetch(self.parts, self.ctx)
        finally:
            self.ended = True
