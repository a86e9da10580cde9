"""NumPy twin of single flight's table (include/hps/in_flight.hpp): the keys that fetches are reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock

import numpy as np

from hps.types import IndexArray, KeyArray

FEW_KEYS, FEW_SHARE, ALWAYS_FOLLOWED, FOLLOWED_RATIO = 32, 8, 1000, 8
Share = tuple[int, int, int, IndexArray, IndexArray]


@dataclass(slots=True, eq=False)
class _TwinFlight:
    """A fetch; ``wanted``: per request, the positions that other fetches wait for, ordered by place."""

    number: int
    wanted: list[list[int]]
    own: list[tuple[int, int]] = field(default_factory=list)
    reading: int = 0
    followers: int = 0
    landed: bool = False
    until: float = 0.0


@dataclass(slots=True)
class _Read:
    """The fetch that reads a key, the position in its request, and the place in its result (-1: unused)."""

    flight: _TwinFlight
    request: int
    position: int
    place: int = -1

    def keep(self) -> int:
        """Have the fetch keep the key's row; return the row's place in its result."""
        if self.place < 0:
            wanted = self.flight.wanted[self.request]
            self.place = len(wanted)
            wanted.append(self.position)
        return self.place


@dataclass(slots=True)
class _Claim:
    """A fetch that starts at the time ``now``; ``misses``: per request, (table, key, position)."""

    flight: _TwinFlight
    misses: list[list[tuple[int, int, int]]]
    now: float
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.misses))

    def may_follow(self, other: _TwinFlight) -> bool:
        if other.landed:
            return self.now < other.until
        return other.reading <= max(ALWAYS_FOLLOWED, FOLLOWED_RATIO * self.size)


class InFlight:
    """Keys that fetches in flight are reading, so that other fetches wait for those. Thread-safe.

    Of several fetches with few keys in common, fewer than 32 and than an eighth of its own misses, a fetch
    follows only the oldest; and none that reads more than 1,000 keys and eight times its own misses.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._flights: dict[int, _TwinFlight] = {}  # oldest first
        self._reads: dict[tuple[int, int], _Read] = {}

    def claim(
        self,
        number: int,
        tables: Sequence[int],
        keys: Sequence[KeyArray],
        missing: Sequence[IndexArray],
        now: float,
    ) -> tuple[list[IndexArray], list[Share]]:
        """Start fetch ``number``, which misses ``keys[i][missing[i]]`` of ``tables[i]``, an unsigned
        64-bit number.

        Returns the positions, per request, that it must read; and the keys that it leaves to earlier
        fetches, which are reading them or hold them at the time ``now``.

        The latter is a list of ``(number, request, source_request, positions (m,), places (m,))``: the rows
        of these positions in its request ``request`` will be at ``places`` of the rows that fetch
        ``number`` keeps of its request ``source_request``. It must `leave` each of these fetches in the
        end. Raises ValueError if the number is in use.
        """
        misses = [
            list(zip([table] * len(at), some[at].tolist(), at.tolist(), strict=True))
            for table, some, at in zip(tables, keys, missing, strict=True)
        ]
        claim = _Claim(_TwinFlight(number, [[] for _ in misses]), misses, now)
        with self._lock:
            if number in self._flights:
                raise ValueError("this fetch number is in use")
            followed = self._choose_followed(claim)
            self._flights[number] = claim.flight
            return self._divide(claim, followed)

    def land(self, number: int, until: float) -> list[IndexArray]:
        """End the fetch; return, per request, the positions that others wait for, ordered by place.

        Until the time ``until`` further fetches may join, as long as one is copying. An empty list if no
        fetch waits: then it is removed. Raises ValueError if there is no such fetch.
        """
        with self._lock:
            if number not in self._flights:
                raise ValueError("no such fetch is in flight")
            flight = self._flights[number]
            if not flight.followers:
                self._erase(flight)
                return []
            flight.landed, flight.until = True, until
            self._remove(flight, unwanted_only=True)
            return [np.array(each, np.int64) for each in flight.wanted]

    def leave(self, number: int) -> bool:
        """Release a fetch that this one followed. True for the last follower after its end, which removes
        it.

        Raises ValueError if no fetch follows it.
        """
        with self._lock:
            flight = self._flights.get(number)
            if flight is None or not flight.followers:
                raise ValueError("no fetch follows this number")
            flight.followers -= 1
            last = not flight.followers and flight.landed
            if last:
                self._erase(flight)
            return last

    def __len__(self) -> int:
        """The number of keys that a claim could find now."""
        return len(self._reads)

    def _choose_followed(self, claim: _Claim) -> set[int]:
        """Return the fetches that the claim's follows, and count it among their followers."""
        common = dict.fromkeys(self._flights, 0)
        for table, key, _ in chain.from_iterable(claim.misses):
            read = self._reads.get((table, key))
            if read is not None and claim.may_follow(read.flight):
                common[read.flight.number] += 1
        few = min(FEW_KEYS, claim.size // FEW_SHARE)
        followed = set()
        follows_one_of_few = False
        for other, count in common.items():
            if count and (count >= few or not follows_one_of_few):
                followed.add(other)
                self._flights[other].followers += 1
            follows_one_of_few |= 0 < count < few
        return followed

    def _divide(self, claim: _Claim, followed: set[int]) -> tuple[list[IndexArray], list[Share]]:
        """Divide the misses into those to read, per request, and those left to ``followed`` fetches."""
        flight = claim.flight
        own: list[IndexArray] = []
        shares: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for request, misses in enumerate(claim.misses):
            positions = []
            for table, key, position in misses:
                read = self._reads.get((table, key))
                if read is not None and read.flight.number in followed:
                    name = (read.flight.number, request, read.request)
                    shares.setdefault(name, []).append((position, read.keep()))
                    continue
                positions.append(position)
                if read is None or (
                    read.flight is not flight and not claim.may_follow(read.flight)
                ):
                    self._reads[table, key] = _Read(flight, request, position)
                    flight.own.append((table, key))
            own.append(np.array(positions, np.int64))
        flight.reading = sum(map(len, own))
        left = [(*name, *np.array(pairs, np.int64).T.copy()) for name, pairs in shares.items()]
        return own, left

    def _remove(self, flight: _TwinFlight, *, unwanted_only: bool) -> None:
        for name in flight.own:
            read = self._reads.get(name)
            if (
                read is not None
                and read.flight is flight
                and not (unwanted_only and read.place >= 0)
            ):
                del self._reads[name]

    def _erase(self, flight: _TwinFlight) -> None:
        self._remove(flight, unwanted_only=False)
        del self._flights[flight.number]
