"""SingleFlight: a row that several lookups miss at the same time is read once.

For lookups only: the cache writer must read rows as they are now, and calls the stores directly."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event

from hps.native import InFlight
from hps.tiers.base import (
    FetchContext,
    Part,
    Tier,
    copy_answer,
    copy_part,
    merge_misses,
    restrict_part,
)
from hps.tiers.checks import check_part
from hps.tiers.wrappers import TierWrapper
from hps.types import IndexArray

# A degraded fetch that ended this close to its deadline was cut short by it. The tier may be healthy, so
# followers read the keys themselves.
_SHORT_S = 0.005


@dataclass(slots=True, eq=False)
class _Flight:
    """A fetch in flight.

    Once ``landed`` is set, ``answer`` holds the results that followers want of each part; None if followers
    must read the keys themselves."""

    number: int
    started: float = field(default_factory=time.monotonic)
    landed: Event = field(default_factory=Event)
    answer: list[Part] | None = None
    degraded: tuple[str, ...] = ()


@dataclass(slots=True)
class _FollowedKeys:
    """Keys of ``part`` that another fetch, ``flight``, reads.

    The key ``part.missing[i]`` is at ``positions[i]`` in the answer to that fetch's part ``index``."""

    flight: _Flight
    part: Part
    index: int
    positions: IndexArray


class SingleFlight(TierWrapper):
    """Leaves keys that another fetch is reading to that fetch, and copies its rows.

    A fetch first reads the keys that no other fetch is reading, publishes their rows, and only then waits
    for the fetches that it follows. So it waits only for reads that began before its own, never for another
    fetch's wait, and a deadlock is impossible.

    A key is read twice where waiting would cost more: of several fetches that share few keys with it, a
    fetch follows only the oldest, and it follows none that reads much more than it does
    (`hps.native.InFlight` defines few and much more).

    A follower waits until its deadline at most; then it skips the tier: the keys stay missing, and
    ``ctx.degraded`` names the tier. Followers take the whole result: rows, tombstones, misses, skipped
    tiers. If the followed fetch raised, or its deadline cut it short, followers read the keys themselves.

    While followers copy an answer, new fetches may use it too, for as long again as the read took.
    Otherwise many lookups of the same rows would all start reading whenever one of them ends.

    ``count(keys)`` receives the number of keys left to other fetches. Thread-safe if ``inner`` is. A
    returned row may have been read before the fetch began, by up to twice the duration of the read."""

    def __init__(self, inner: Tier, count: Callable[[int], None] = lambda _keys: None) -> None:
        super().__init__(inner)
        self._count = count
        self._in_flight = InFlight()
        self._numbers = itertools.count()
        self._flights: dict[int, _Flight] = {}  # in flight, or ended and still copied by followers

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
        flight = _Flight(next(self._numbers))
        reads, followed = self._claim(flight, parts)
        try:
            if unread := [part for part in reads if len(part.missing)]:
                self.inner.fetch(unread, ctx)
            self._land(flight, reads, ctx)
            if followed:
                rest = [self._copy(each, ctx) for each in followed]
                if again := [part for part in rest if len(part.missing)]:
                    self.inner.fetch(again, ctx)
                _set_missing(parts, [*reads, *(each.part for each in followed), *rest])
        finally:
            if not flight.landed.is_set():
                self._land(flight, reads, None)
            self._leave(followed)

    def _claim(
        self, flight: _Flight, parts: Sequence[Part]
    ) -> tuple[Sequence[Part], list[_FollowedKeys]]:
        """Return the parts that this fetch must read, and the keys that it leaves to other fetches."""
        self._flights[flight.number] = flight
        try:
            own, shares = self._in_flight.claim(
                flight.number,
                [id(part.table) for part in parts],  # unique: the tables live as long as the fetch
                [part.keys for part in parts],
                [part.missing for part in parts],
                flight.started,
            )
        except BaseException:
            del self._flights[flight.number]
            raise
        if not shares:
            return parts, []
        self._count(sum(len(misses) for _, _, _, misses, _ in shares))
        return [restrict_part(part, left) for part, left in zip(parts, own, strict=True)], [
            _FollowedKeys(self._flights[number], restrict_part(parts[own_index], misses), index, at)
            for number, own_index, index, misses, at in shares
        ]

    def _land(self, flight: _Flight, reads: Sequence[Part], ctx: FetchContext | None) -> None:
        """End ``flight``, which has read ``reads``, and publish its answer.

        ``ctx``: the context of the read; None if the read raised."""
        now = time.monotonic()
        late = ctx is not None and ctx.deadline is not None and now > ctx.deadline - _SHORT_S
        complete = ctx is not None and not (ctx.degraded and late)
        until = now + (now - flight.started) if complete else now
        try:
            if not (wanted := self._in_flight.land(flight.number, until)):
                del self._flights[flight.number]
            elif ctx is not None and complete:
                flight.degraded = tuple(ctx.degraded)
                flight.answer = [copy_part(*each) for each in zip(reads, wanted, strict=True)]
        finally:
            flight.landed.set()

    def _leave(self, followed: Sequence[_FollowedKeys]) -> None:
        """Free answers that no fetch copies any more."""
        for number in {each.flight.number for each in followed}:
            if self._in_flight.leave(number):
                del self._flights[number]

    def _copy(self, followed: _FollowedKeys, ctx: FetchContext) -> Part:
        """Wait for the followed fetch and copy its answer; return the keys that must be read again."""
        flight, part = followed.flight, followed.part
        wait = None if ctx.deadline is None else max(0.0, ctx.deadline - time.monotonic())
        if not flight.landed.wait(wait):
            if self.info.name not in ctx.degraded:
                ctx.degraded.append(self.info.name)
            return restrict_part(part, part.missing[:0])
        if flight.answer is None:
            again, part.missing = part.missing, part.missing[:0]
            return restrict_part(part, again)
        copy_answer(flight.answer[followed.index], part, followed.positions)
        ctx.degraded.extend(name for name in flight.degraded if name not in ctx.degraded)
        return restrict_part(part, part.missing[:0])


def _set_missing(parts: Sequence[Part], shares: Sequence[Part]) -> None:
    """Set ``missing`` of each of ``parts`` to what any of its ``shares`` still misses."""
    for part in parts:
        part.missing = merge_misses([each for each in shares if each.out is part.out])
