"""Flight: what one fetch under way reads, how another one tells what they have in common, and the answer
that it leaves to those who wait for it. Used by `hps.tiers.single_flight`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event

import numpy as np
from numpy.typing import NDArray

from hps.tiers.base import FetchContext, Part
from hps.tiers.parts import copied, share
from hps.types import IndexArray

# A fetch that ended degraded this close to its own deadline was cut short by it: the tier may be well.
_SHORT_S = 0.005
# Of the places for its keys' hashes a flight takes one in so many at most.
_SPARSE = 32
_NONE = np.empty(0, np.int64)
_ODD, _TABLES_ODD, _MOD = np.uint64(0x9E3779B97F4A7C15), 0xC2B2AE3D27D4EB4F, 1 << 64
Hashes = NDArray[np.uint64]


class Flight:
    """One fetch under way. What its parts lack is numbered through, from 0 to ``size``. It reads
    ``reads`` itself, ``reading`` keys.

    ``landed``, ``ended``, ``followers`` and ``wanted`` are changed under its owner's lock. The rest is
    changed by the thread that fetches, and may be looked at by others.
    """

    __slots__ = (
        "_asked",
        "_hashes",
        "_index",
        "_keys",
        "_own",
        "_starts",
        "_tables",
        "answers",
        "begun",
        "degraded",
        "ended",
        "followers",
        "landed",
        "reading",
        "reads",
        "size",
        "until",
        "wanted",
    )

    def __init__(self, parts: Sequence[Part]) -> None:
        self.reads = list(parts)
        self._tables = {part.table: i for i, part in enumerate(parts)}
        self._asked = [part.missing for part in parts]
        # The caller may write to its own arrays while others still look.
        self._keys = [part.keys[part.missing] for part in parts]
        self._starts = [0]
        for asked in self._asked:
            self._starts.append(self._starts[-1] + len(asked))
        self.size = self.reading = self._starts[-1]
        self._own: IndexArray | None = None
        self._hashes: Hashes | None = None
        self._index: _Index | None = None
        self.landed: Event | None = None
        self.ended = False
        self.followers = 0
        self.begun = time.monotonic()
        self.until = self.begun
        self.wanted: list[tuple[int, IndexArray]] = []
        self.answers: dict[int, Answer] = {}
        self.degraded: tuple[str, ...] = ()

    def in_common(self, other: Flight, rest: IndexArray, least: int) -> list[Followed]:
        """What ``other`` reads of the keys with the ascending numbers ``rest``, if ``least`` or more."""
        hashes = self._all_hashes()
        at, theirs = other._find(hashes if len(rest) == self.size else hashes[rest], least)
        if len(at) < least:
            return []
        numbers, found = rest[at], []
        cuts = np.searchsorted(numbers, self._starts).tolist()
        for i, part in enumerate(self.reads):
            of = other._tables.get(part.table)
            if cuts[i] == cuts[i + 1] or of is None:
                continue
            mine, there = numbers[cuts[i] : cuts[i + 1]], theirs[cuts[i] : cuts[i + 1]]
            # Keys of other tables may have the same hash.
            same = (there >= other._starts[of]) & (there < other._starts[of + 1])
            mine, there = mine[same], there[same] - other._starts[of]
            if len(mine):
                wanted = share(part, self._asked[i][mine - self._starts[i]])
                found.append(Followed(other, wanted, mine, of, there))
        return found

    def keep(self, rest: IndexArray) -> None:
        """Leave all but the numbers ``rest`` to others."""
        cuts = np.searchsorted(rest, self._starts).tolist()
        self.reads = [
            share(part, self._asked[i][rest[cuts[i] : cuts[i + 1]] - self._starts[i]])
            for i, part in enumerate(self.reads)
        ]
        self.reading = len(rest)
        self._own = rest
        self._index = None

    def keep_answer(self, ctx: FetchContext) -> None:
        """Copy what others want of what was read, unless a deadline of its own cut the fetch short."""
        now = time.monotonic()
        late = ctx.deadline is not None and now > ctx.deadline - _SHORT_S
        if ctx.degraded and late:
            return
        self.degraded = tuple(ctx.degraded)
        self.until = now + (now - self.begun)
        kept = []
        for of in {of for of, _ in self.wanted}:
            wanted = np.zeros(len(self._asked[of]), bool)
            for _, at in (each for each in self.wanted if each[0] == of):
                wanted[at] = True
            if self._own is not None:
                own = np.zeros(self.size, bool)
                own[self._own] = True
                wanted &= own[self._starts[of] : self._starts[of + 1]]
            at = wanted.nonzero()[0]
            places = np.full(len(wanted), -1)
            places[at] = np.arange(len(at))
            self.answers[of] = Answer(copied(self.reads[of], self._asked[of][at]), places)
            kept.append(at + self._starts[of])
        self._own = np.concatenate(kept)
        self._index = None

    def _all_hashes(self) -> Hashes:
        """(size,) of each key and its table; of one table's keys no two have the same."""
        if self._hashes is None:
            mixed = [
                (keys.view(np.uint64) ^ np.uint64(hash(part.table) * _TABLES_ODD % _MOD)) * _ODD
                for part, keys in zip(self.reads, self._keys, strict=True)
            ]
            self._hashes = mixed[0] if len(mixed) == 1 else np.concatenate(mixed)
        return self._hashes

    def _find(self, hashes: Hashes, least: int) -> tuple[IndexArray, IndexArray]:
        """Which of ``hashes`` are read here, ascending, and their numbers here; none when they are fewer
        than ``least``."""
        index = self._index
        if index is None:  # two threads may make the same
            index = self._index = _Index(self._all_hashes(), self._own)
        return index.find(hashes, least)


@dataclass(frozen=True, slots=True)
class Followed:
    """What is left to ``flight``: the key ``part.missing[i]``, number ``numbers[i]`` of its own flight, is
    the ``at[i]``-th that part ``of`` there lacks."""

    flight: Flight
    part: Part
    numbers: IndexArray
    of: int
    at: IndexArray


@dataclass(frozen=True, slots=True)
class Answer:
    """What was read of a part: the i-th key that it lacked is in ``part`` at ``places[i]``, -1: not there."""

    part: Part
    places: IndexArray


class _Index:
    """Finds a few hashes among many: a look at places tells most of the others apart."""

    __slots__ = ("_hashes", "_numbers", "_places", "_shift", "_sorted")

    def __init__(self, hashes: Hashes, own: IndexArray | None) -> None:
        """``own``: the numbers that count, None: all."""
        self._hashes = hashes if own is None else hashes[own]
        self._numbers = own
        bits = (_SPARSE * max(1, len(self._hashes))).bit_length()
        self._shift = np.uint64(64 - bits)
        self._places = np.zeros(1 << bits, bool)
        self._places[self._hashes >> self._shift] = True
        self._sorted: tuple[Hashes, IndexArray] | None = None

    def find(self, hashes: Hashes, least: int) -> tuple[IndexArray, IndexArray]:
        """See `Flight._find`."""
        maybe = self._places[hashes >> self._shift].nonzero()[0]
        if len(maybe) < least:
            return _NONE, _NONE
        if self._sorted is None:
            order = self._hashes.argsort()
            numbers = order if self._numbers is None else self._numbers[order]
            self._sorted = self._hashes[order], numbers
        known, numbers = self._sorted
        wanted = hashes[maybe]
        at = known.searchsorted(wanted)
        at[at == len(known)] = 0
        same = known[at] == wanted
        return maybe[same], numbers[at[same]]
