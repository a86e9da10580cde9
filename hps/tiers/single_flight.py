"""SingleFlight: rows that many lookups miss at the same time are asked for once.

For lookups only: the cache writer must read rows as they are now, and asks the stores itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Lock

import numpy as np
from numpy.typing import NDArray

from hps.native import dedup
from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.checks import check_part
from hps.tiers.parts import copied, hand_over, share
from hps.tiers.wrappers import Wrapper
from hps.types import IndexArray, KeyArray

# A fetch that ended degraded this close to its own deadline was cut short by it: the tier may be well.
_SHORT_S = 0.005
# A fetch that could leave a smaller share of a table's keys to another one asks for all of them: to wait for
# others would cost it more.
_LEAST = 0.125
# Keys that are looked at to tell whether another fetch asks for so many of them.
_SAMPLE = 64
_ODD, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
Hashes = NDArray[np.uint64]


class SingleFlight(Wrapper):
    """Takes out of a fetch the keys that an earlier one is asking for, if they are a good part of a
    table's (``_LEAST``), and copies their rows when that one has ended.

    It waits for another fetch no longer than its own deadline allows, and then skips the tier: the keys
    stay missing, ``ctx.degraded`` names it. What the other fetch met holds for its followers too: rows,
    tombstones, misses, tiers that were skipped. But when the other one raised, or a deadline of its
    own cut it short, they ask themselves. Each waits only for fetches that began before it, so that
    they can't wait in a circle; and asks for what nobody else does before it waits.

    ``count(keys)`` is told how many keys were left to other fetches. Safe from any thread if ``inner``
    is. A row may be as old as the start of the fetch it comes from.
    """

    def __init__(self, inner: Tier, count: Callable[[int], None] = lambda _keys: None) -> None:
        super().__init__(inner)
        self._count = count
        self._lock = Lock()
        self._flying: list[_Flight] = []  # oldest first; at most one per thread that fetches

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
        flight = _Flight(parts)
        with self._lock:
            earlier = self._flying[:]
            self._flying.append(flight)
        try:
            if earlier:
                self._fetch_beside(earlier, parts, ctx)
            else:
                self.inner.fetch(parts, ctx)
        except BaseException:
            self._land(flight, None)
            raise
        self._land(flight, ctx)

    def _fetch_beside(
        self, earlier: list[_Flight], parts: Sequence[Part], ctx: FetchContext
    ) -> None:
        left = [share(part, part.missing) for part in parts]
        followed = self._follow(earlier, left)
        if not followed:
            self.inner.fetch(parts, ctx)
            return
        self._ask([own for own in left if len(own.missing)], ctx)
        self._ask([each.part for each in followed if not self._answered(each, ctx)], ctx)
        for part, own in zip(parts, left, strict=True):
            rest = [each.part.missing for each in followed if each.part.out is part.out]
            part.missing = np.sort(np.concatenate([own.missing, *rest]))

    def _ask(self, parts: list[Part], ctx: FetchContext) -> None:
        if parts:
            self.inner.fetch(parts, ctx)

    def _follow(self, earlier: list[_Flight], left: list[Part]) -> list[_Followed]:
        """Take out of ``left`` what ``earlier`` fetches ask for."""
        followed = []
        samples = [
            _hashes(own.keys[own.missing[:: 1 + len(own.missing) // _SAMPLE]]) for own in left
        ]
        for flight in earlier:
            for own, sample in zip(left, samples, strict=True):
                at = flight.places(own, sample)
                if at is None or not self._join(flight):
                    continue
                same = at >= 0
                followed.append(_Followed(flight, share(own, own.missing[same]), at[same]))
                own.missing = own.missing[~same]
        self._count(sum(len(each.at) for each in followed))
        return followed

    def _join(self, flight: _Flight) -> bool:
        """Have ``flight`` keep its answer; False when it has ended without."""
        with self._lock:
            if flight.landed is None and not flight.ended:
                flight.landed = Event()
            return flight.landed is not None

    def _land(self, flight: _Flight, ctx: FetchContext | None) -> None:
        """End ``flight``; ``ctx`` is what it met, None when it raised."""
        with self._lock:
            self._flying.remove(flight)
            flight.ended = True
        if flight.landed is not None:
            try:
                if ctx is not None:
                    flight.keep_answer(ctx)
            finally:
                flight.landed.set()

    def _answered(self, followed: _Followed, ctx: FetchContext) -> bool:
        """Wait for the fetch that was followed and copy its answer; False when there is none."""
        flight = followed.flight
        assert flight.landed is not None
        wait = None if ctx.deadline is None else max(0.0, ctx.deadline - time.monotonic())
        if not flight.landed.wait(wait):
            if self.info.name not in ctx.degraded:
                ctx.degraded.append(self.info.name)
            return True
        answer = flight.answer.get(followed.part.table)
        if answer is None:
            return False
        hand_over(answer, followed.part, followed.at)
        ctx.degraded.extend(name for name in flight.degraded if name not in ctx.degraded)
        return True


class _Flight:
    """One fetch under way. Its answer is copied only for followers, because the caller may write to its
    own arrays as soon as it has them."""

    __slots__ = ("_asked", "_marks", "answer", "degraded", "ended", "landed")

    def __init__(self, parts: Sequence[Part]) -> None:
        self._asked = {part.table: (part, part.missing, part.keys[part.missing]) for part in parts}
        self._marks: dict[object, NDArray[np.bool_]] = {}
        self.landed: Event | None = None
        self.ended = False
        self.answer: dict[object, Part] = {}
        self.degraded: tuple[str, ...] = ()

    def places(self, own: Part, sample: Hashes) -> IndexArray | None:
        """Where each key of ``own.missing`` stands among the keys asked for here, -1 where it does not;
        None when it is not worth following. ``sample``: hashes of some of these keys."""
        asked = self._asked.get(own.table)
        if asked is None or not len(own.missing):
            return None
        keys = asked[2]
        marks = self._marks.get(own.table)
        if marks is None:
            marks = self._marks[own.table] = _marked(keys)
        if np.count_nonzero(marks[sample & np.uint64(len(marks) - 1)]) < _LEAST * len(sample):
            return None
        at = dedup(np.concatenate([keys, own.keys[own.missing]]))[1][len(keys) :]
        other = at >= len(keys)
        if len(at) - np.count_nonzero(other) < _LEAST * len(at):
            return None
        at[other] = -1
        return at

    def keep_answer(self, ctx: FetchContext) -> None:
        """Copy what was found, unless a deadline of its own cut the fetch short."""
        late = ctx.deadline is not None and time.monotonic() > ctx.deadline - _SHORT_S
        if ctx.degraded and late:
            return
        self.degraded = tuple(ctx.degraded)
        self.answer = {
            table: copied(part, missing) for table, (part, missing, _) in self._asked.items()
        }


@dataclass(frozen=True, slots=True)
class _Followed:
    """What is left to ``flight``: the key ``part.missing[i]`` stands at ``at[i]`` of its answer."""

    flight: _Flight
    part: Part
    at: IndexArray


def _hashes(keys: KeyArray) -> Hashes:
    """(n,) uint64 whose low bits tell keys apart, however alike they are."""
    return (keys.view(np.uint64) * _ODD) >> _SHIFT


def _marked(keys: KeyArray) -> NDArray[np.bool_]:
    """A place for each hash, true for those of ``keys``: one in sixteen at most, so that a look at few
    places tells whether two calls have much in common."""
    marks = np.zeros(1 << (16 * len(keys)).bit_length(), bool)
    marks[_hashes(keys) & np.uint64(len(marks) - 1)] = True
    return marks
