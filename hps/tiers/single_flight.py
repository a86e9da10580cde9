"""SingleFlight: rows that many lookups miss at the same time are asked for once.

For lookups only: the cache writer must read rows as they are now, and asks the stores itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event, Lock

import numpy as np

from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.checks import check_part
from hps.tiers.flight import Flight, Followed
from hps.tiers.parts import hand_over, share
from hps.tiers.wrappers import Wrapper

# To leave keys to another fetch costs as much as to read some thirty of them from RocksDB. Fewer, unless they
# are an eighth of what it lacks, a fetch leaves to one other at most.
_FEW, _SHARE = 32, 8
# Nobody waits for a read of more keys than this and so many times its own: a lookup of few keys would
# wait for the whole of a large one.
_ENOUGH, _LARGER = 1_000, 8


class SingleFlight(Wrapper):
    """Takes out of a fetch the keys that earlier ones are reading, and copies their rows when those have
    them.

    A fetch reads what nobody else does, hands that on, and only then waits for others. So what it
    waits for is a read that began before its own, never somebody else's waiting; and nobody waits in a
    circle. What both lack is read twice only where that is cheaper: of several fetches that it has
    few keys in common with, it follows the oldest (``_FEW``); and it does not wait for a read much larger
    than its own (``_ENOUGH``, ``_LARGER``).

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
        self._lock = Lock()
        # Oldest first, at most one per thread that fetches; then those whose answer is still being copied.
        self._flying: list[Flight] = []
        self._landed: list[Flight] = []

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
        flight, followed = Flight(parts), list[Followed]()
        with self._lock:
            earlier = [each for each in self._landed if flight.begun < each.until]
            earlier += self._flying
            self._flying.append(flight)
        try:
            if earlier:
                followed = self._follow(earlier, flight)
            if reads := [part for part in flight.reads if len(part.missing)]:
                self.inner.fetch(reads, ctx)
            self._land(flight, ctx)
            if followed:
                lacking = [self._copy(each, ctx) for each in followed]
                if again := [part for part in lacking if len(part.missing)]:
                    self.inner.fetch(again, ctx)
                _note_missing(parts, [*flight.reads, *(each.part for each in followed), *lacking])
        finally:
            if not flight.ended:
                self._land(flight, None)
            if followed:
                self._leave(followed)

    def _follow(self, earlier: Sequence[Flight], flight: Flight) -> list[Followed]:
        """Leave to ``earlier`` fetches what they are reading."""
        followed: list[Followed] = []
        rest = np.arange(flight.size)
        few, least = min(_FEW, flight.size // _SHARE), 1
        most = max(_ENOUGH, _LARGER * flight.size)
        for other in earlier:
            if not len(rest) or not 0 < other.reading <= most:
                continue
            shares = flight.in_common(other, rest, least)
            if shares and self._join(other, shares):
                followed += shares
                taken = np.zeros(flight.size, bool)
                for each in shares:
                    taken[each.numbers] = True
                left = rest[~taken[rest]]
                if len(rest) - len(left) < few:
                    least = few
                rest = left
        if followed:
            flight.keep(rest)
            self._count(flight.size - len(rest))
        return followed

    def _join(self, flight: Flight, shares: list[Followed]) -> bool:
        """Have ``flight`` keep its answer for ``shares``; False when it has ended without."""
        with self._lock:
            if flight.ended and flight not in self._landed:
                return False
            flight.landed = flight.landed or Event()
            flight.followers += 1
            flight.wanted += [(each.of, each.at) for each in shares]
            return True

    def _land(self, flight: Flight, ctx: FetchContext | None) -> None:
        """End ``flight``; ``ctx`` is what it met, None when it raised."""
        with self._lock:
            self._flying.remove(flight)
            flight.ended = True
        if flight.landed is None:
            return
        try:
            if ctx is not None:
                flight.keep_answer(ctx)
                with self._lock:
                    if flight.followers:
                        self._landed.append(flight)
        finally:
            flight.landed.set()

    def _leave(self, followed: list[Followed]) -> None:
        """Forget answers that nobody copies any more."""
        with self._lock:
            for flight in {each.flight for each in followed}:
                flight.followers -= 1
                if not flight.followers and flight in self._landed:
                    self._landed.remove(flight)

    def _copy(self, followed: Followed, ctx: FetchContext) -> Part:
        """Wait for the fetch that was followed and copy its answer; what is to be asked for again."""
        flight, part = followed.flight, followed.part
        assert flight.landed is not None
        wait = None if ctx.deadline is None else max(0.0, ctx.deadline - time.monotonic())
        if not flight.landed.wait(wait):
            if self.info.name not in ctx.degraded:
                ctx.degraded.append(self.info.name)
            return share(part, part.missing[:0])
        answer = flight.answers.get(followed.of)
        at = np.full(len(followed.at), -1) if answer is None else answer.places[followed.at]
        known = at >= 0
        again, part.missing = part.missing[~known], part.missing[known]
        if answer is not None:
            hand_over(answer.part, part, at[known])
            ctx.degraded.extend(name for name in flight.degraded if name not in ctx.degraded)
        return share(part, again)


def _note_missing(parts: Sequence[Part], shares: Sequence[Part]) -> None:
    """Of each of ``parts`` what any of its ``shares`` still lacks."""
    for part in parts:
        lacking = [each.missing for each in shares if each.out is part.out]
        part.missing = np.sort(np.concatenate(lacking))
