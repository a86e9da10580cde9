"""SingleFlight: rows that many lookups miss at the same time are asked for once.

For lookups only: the cache writer must read rows as they are now, and asks the stores itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event

from hps.native import InFlight
from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.checks import check_part
from hps.tiers.part_operations import copy_answer, copy_part, merge_misses, restrict_part
from hps.tiers.wrappers import TierWrapper
from hps.types import IndexArray

# A fetch that ended degraded this close to its own deadline was cut short by it: the tier may be well.
_SHORT_S = 0.005


@dataclass(slots=True, eq=False)
class _Flight:
    """A fetch under way. Once it has ``landed``, ``answer`` holds what others want of each of its parts; None
    when they must ask themselves."""

    number: int
    begun: float = field(default_factory=time.monotonic)
    landed: Event = field(default_factory=Event)
    answer: list[Part] | None = None
    degraded: tuple[str, ...] = ()


@dataclass(slots=True)
class _FollowedKeys:
    """What is left to ``flight``: the key ``part.missing[i]`` will stand at ``places[i]`` of part ``of`` of
    its answer."""

    flight: _Flight
    part: Part
    of: int
    places: IndexArray


class SingleFlight(TierWrapper):
    """Takes out of a fetch the keys that earlier ones are reading, and copies their rows when those have
    them.

    A fetch reads what nobody else does, hands that on, and only then waits for others. So what it
    waits for is a read that began before its own, never somebody else's waiting; and nobody waits in a
    circle. What both lack is read twice only where that is cheaper: of several fetches that it has
    few keys in common with, it follows the oldest; and it does not wait for a read much larger
    than its own (`hps.native.InFlight` says how few, how much larger).

    It waits no longer than its own deadline allows, and then skips the tier: the keys stay missing,
    ``ctx.degraded`` names it. What the other fetch met holds for its followers too: rows, tombstones,
    misses, tiers that were skipped. But when the other one raised, or a deadline of its own cut it
    short, they ask themselves.

    While its followers copy it, an answer is there for those who come then as well, for as long as it took to
    read: so many lookups of the same rows do not begin anew each time that one of them ends.

    ``count(keys)`` is told how many keys were left to other fetches. Safe from any thread if ``inner``
    is. A row may be older than the start of the fetch, by twice the time that it took to read.
    """

    def __init__(self, inner: Tier, count: Callable[[int], None] = lambda _keys: None) -> None:
        super().__init__(inner)
        self._count = count
        self._in_flight = InFlight()
        self._numbers = itertools.count()
        self._flights: dict[int, _Flight] = {}  # those that can be followed are among them

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
        flight = _Flight(next(self._numbers))
        reads, followed = self._claim(flight, parts)
        try:
            if asked := [part for part in reads if len(part.missing)]:
                self.inner.fetch(asked, ctx)
            self._land(flight, reads, ctx)
            if followed:
                lacking = [self._copy(each, ctx) for each in followed]
                if again := [part for part in lacking if len(part.missing)]:
                    self.inner.fetch(again, ctx)
                _note_missing(parts, [*reads, *(each.part for each in followed), *lacking])
        finally:
            if not flight.landed.is_set():
                self._land(flight, reads, None)
            self._leave(followed)

    def _claim(
        self, flight: _Flight, parts: Sequence[Part]
    ) -> tuple[Sequence[Part], list[_FollowedKeys]]:
        """What is left to read, and what is left to fetches that are reading it."""
        self._flights[flight.number] = flight
        try:
            own, shares = self._in_flight.claim(
                flight.number,
                [id(part.table) for part in parts],  # it lives as long as it is in flight
                [part.keys for part in parts],
                [part.missing for part in parts],
                flight.begun,
            )
        except BaseException:
            del self._flights[flight.number]
            raise
        if not shares:
            return parts, []
        self._count(sum(len(positions) for _, _, _, positions, _ in shares))
        return [restrict_part(part, left) for part, left in zip(parts, own, strict=True)], [
            _FollowedKeys(self._flights[number], restrict_part(parts[mine], positions), of, places)
            for number, mine, of, positions, places in shares
        ]

    def _land(self, flight: _Flight, reads: Sequence[Part], ctx: FetchContext | None) -> None:
        """End ``flight``, which has read ``reads``; ``ctx`` is what it met, None when it raised."""
        now = time.monotonic()
        late = ctx is not None and ctx.deadline is not None and now > ctx.deadline - _SHORT_S
        good = ctx is not None and not (ctx.degraded and late)
        until = now + (now - flight.begun) if good else now
        try:
            if not (wanted := self._in_flight.land(flight.number, until)):
                del self._flights[flight.number]
            elif ctx is not None and good:
                flight.degraded = tuple(ctx.degraded)
                flight.answer = [copy_part(*each) for each in zip(reads, wanted, strict=True)]
        finally:
            flight.landed.set()

    def _leave(self, followed: Sequence[_FollowedKeys]) -> None:
        """Forget answers that nobody copies any more."""
        for number in {each.flight.number for each in followed}:
            if self._in_flight.leave(number):
                del self._flights[number]

    def _copy(self, followed: _FollowedKeys, ctx: FetchContext) -> Part:
        """Wait for the fetch that was followed and copy its answer; what is to be asked for again."""
        flight, part = followed.flight, followed.part
        wait = None if ctx.deadline is None else max(0.0, ctx.deadline - time.monotonic())
        if not flight.landed.wait(wait):
            if self.info.name not in ctx.degraded:
                ctx.degraded.append(self.info.name)
            return restrict_part(part, part.missing[:0])
        if flight.answer is None:
            again, part.missing = part.missing, part.missing[:0]
            return restrict_part(part, again)
        copy_answer(flight.answer[followed.of], part, followed.places)
        ctx.degraded.extend(name for name in flight.degraded if name not in ctx.degraded)
        return restrict_part(part, part.missing[:0])


def _note_missing(parts: Sequence[Part], shares: Sequence[Part]) -> None:
    """Of each of ``parts`` what any of its ``shares`` still lacks."""
    for part in parts:
        part.missing = merge_misses([each for each in shares if each.out is part.out])
