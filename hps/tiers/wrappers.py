"""Tiers around a tier: Metered tells what each fetch found, Guarded keeps a broken tier from breaking
the answer."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from hps.errors import TierError, TierTimeout, Unavailable
from hps.tiers.base import FetchContext, Part, Tier, TierInfo
from hps.tiers.breaker import CircuitBreaker, State
from hps.tiers.checks import check_part
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray
from hps.workers import Workers

Observe = Callable[[list[tuple[EmbeddingTable, int, int]], float], None]
"""``observe([(table, asked, found), ...], seconds)``: one entry per part of a fetch that took ``seconds``.
``found`` counts the keys that need not be asked for further down: rows and tombstones."""

# Calls that wait for a thread of a guarded tier. More can only come once every thread hangs, and before
# the circuit opens.
_QUEUED = 1_024


class _Wrapper:
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


class Metered(_Wrapper):
    """Calls ``observe`` once after each fetch that did not raise. As safe beside other
    threads as ``inner`` and ``observe`` are."""

    def __init__(self, inner: Tier, observe: Observe) -> None:
        super().__init__(inner)
        self.observe = observe

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        asked = [len(part.missing) for part in parts]
        start = time.perf_counter()
        self.inner.fetch(parts, ctx)
        seconds = time.perf_counter() - start
        counts = [(p.table, n, n - len(p.missing)) for p, n in zip(parts, asked, strict=True)]
        self.observe(counts, seconds)


class Guarded(_Wrapper):
    """A tier that is skipped while it is broken or late, and named in ``ctx.degraded`` then.

    A fetch that raises TierError, or that isn't done within ``deadline_s`` or the request's own
    deadline, leaves the parts as they were. Other errors are faults of the program or the request and
    pass through. Only what is the tier's own fault counts towards opening the circuit: a request that
    allows less than ``deadline_s`` can't open it, unless its call turns out to take longer than that.

    A blocking call can't be interrupted, so it runs on one of ``threads`` threads of this wrapper, into
    arrays of its own, which are copied to the caller's when it is done in time. A late answer is
    dropped, and the thread is free again when the call returns. A tier that does not block is called in
    place, into arrays of its own too, because a tier that fails half-way may have written some rows.

    The mutating verbs pass through unguarded: a write must be done or raise, never be skipped.
    """

    def __init__(
        self,
        inner: Tier,
        deadline_s: float,
        failures_to_open: int,
        retry_after_s: float,
        *,
        threads: int = 8,
    ) -> None:
        super().__init__(inner)
        self._deadline_s = deadline_s
        self._breaker = CircuitBreaker(failures_to_open, retry_after_s)
        self._workers = Workers(threads, _QUEUED, name=inner.info.name)
        self._late: deque[tuple[_Call, int]] = deque()

    @property
    def state(self) -> State:
        """The circuit's state."""
        return self._breaker.state

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
        self._judge_late_calls()
        now = time.monotonic()
        own = ctx.deadline is None or ctx.deadline >= now + self._deadline_s
        limit = now + self._deadline_s if own or ctx.deadline is None else ctx.deadline
        permit = self._breaker.admit() if limit > now else None
        if permit is None:
            self._skip(ctx)
            return
        answer = [_private(part) for part in parts]
        private = FetchContext(limit, ctx.stream)
        try:
            self._call(answer, private, permit, own=own)
        except TierError as error:
            if own or not isinstance(error, TierTimeout):
                self._breaker.failed(permit)
            else:
                self._breaker.undecided(permit)
            self._skip(ctx)
            return
        except BaseException:
            self._breaker.undecided(permit)
            raise
        self._breaker.succeeded(permit)
        for mine, part in zip(answer, parts, strict=True):
            _hand_over(mine, part)
        ctx.degraded.extend(name for name in private.degraded if name not in ctx.degraded)

    def close(self) -> None:
        """Close the tier once no call is in it any more. Waits ``deadline_s`` for that; a call that
        hangs for longer closes the tier when it returns. Idempotent."""
        self._workers.close(self._deadline_s, self.inner.close)

    def _call(
        self, answer: Sequence[Part], private: FetchContext, permit: int, *, own: bool
    ) -> None:
        if not self.inner.info.blocking:
            self.inner.fetch(answer, private)
            return
        assert private.deadline is not None
        call = _Call(self.inner, answer, private)
        try:
            future = self._workers.submit(call.run)
        except Unavailable as error:  # closed, or every thread hangs
            raise TierError(self.info.name, str(error)) from None
        try:
            raised = future.exception(private.deadline - time.monotonic())
        except TimeoutError:
            if not future.cancel() and not own:
                self._late.append((call, permit))
            raise TierTimeout(self.info.name, f"no answer within {self._deadline_s:g} s") from None
        if raised is not None:
            raise raised

    def _judge_late_calls(self) -> None:
        """Calls that impatient requests gave up count as failures once they exceed ``deadline_s``."""
        if not self._late:
            return
        longest = time.monotonic() - self._deadline_s
        for _ in range(len(self._late)):
            try:
                call, permit = self._late.popleft()
            except IndexError:  # another thread is judging too
                return
            if call.ended:
                continue
            if call.started < longest:
                self._breaker.failed(permit)
            else:
                self._late.append((call, permit))

    def _skip(self, ctx: FetchContext) -> None:
        if self.info.name not in ctx.degraded:
            ctx.degraded.append(self.info.name)


class _Call:
    """One fetch on a thread of its own, which whoever asked for it may have given up."""

    __slots__ = ("_ctx", "_parts", "_tier", "ended", "started")

    def __init__(self, tier: Tier, parts: Sequence[Part], ctx: FetchContext) -> None:
        self._tier = tier
        self._parts = parts
        self._ctx = ctx
        self.started = math.inf
        self.ended = False

    def run(self) -> None:
        self.started = time.monotonic()
        try:
            self._tier.fetch(self._parts, self._ctx)
        finally:
            self.ended = True


def _private(part: Part) -> Part:
    """A part of its own for what ``part`` lacks."""
    return Part.make(part.table, part.keys[part.missing])


def _hand_over(answer: Part, part: Part) -> None:
    """Copy what ``answer``, made by ``_private(part)``, holds."""
    asked = part.missing
    done = np.ones(len(asked), bool)
    done[answer.missing] = False
    rows = answer.source != 0
    part.out[asked[rows]] = answer.out[rows]
    part.versions[asked[done]] = answer.versions[done]
    part.source[asked[done]] = answer.source[done]
    part.missing = asked[answer.missing]
