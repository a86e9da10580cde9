"""Counters and histograms, for hot paths.

Hot paths keep references to them: an update costs a few tenths of a microsecond."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.observability.metric_spec import SECONDS_BUCKETS

# Observations that a histogram has not yet sorted into buckets: single ones, and arrays.
_NOTES = 512
_VALUES = 4096


# One lock for all counters: it is held for a fraction of a microsecond, and never while waiting.
_counting = threading.Lock()


class Counter:
    """A monotonic number. Thread-safe."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        with _counting:
            self.value += amount


def add_all(amounts: Iterable[tuple[Counter, float]]) -> None:
    """Add to many counters at half the cost of single additions."""
    with _counting:
        for counter, amount in amounts:
            counter.value += amount


Amounts = Sequence[tuple[Counter, int]]


class BatchedCounters:
    """Adds the same amounts to many counters repeatedly, at the cost of one addition. Thread-safe.

    It counts the additions; the counters are updated when their values are read."""

    __slots__ = ("_amounts", "_book", "_entry", "_is_used")

    def __init__(self, amounts: Amounts, book: TallyRegistry) -> None:
        self._amounts = amounts
        self._book = book
        self._entry: _TallyEntry | None = None
        self._is_used = False

    def add(self) -> None:
        entry = self._entry
        if entry is None:
            if not self._is_used:  # many are used only once
                self._is_used = True
                add_all(self._amounts)
                return
            entry = self._book.enter(self)
        with _counting:
            entry.times += 1

    def __del__(self) -> None:
        # Without the lock, which this thread may hold.
        if self._entry is not None:
            self._book.closed.append(self._entry)


class _TallyEntry:
    """Number of additions since the counters were last updated."""

    __slots__ = ("amounts", "times")

    def __init__(self, amounts: Amounts) -> None:
        self.amounts = amounts
        self.times = 0

    def reckon(self) -> None:
        with _counting:
            times, self.times = self.times, 0
            for counter, amount in self.amounts if times else ():
                counter.value += amount * times


class TallyRegistry:
    """Entries of tallies in use, and of deleted ones until their counters are updated."""

    def __init__(self) -> None:
        self.closed: deque[_TallyEntry] = deque()
        self._entries: set[_TallyEntry] = set()
        self._lock = threading.Lock()

    def enter(self, tally: BatchedCounters) -> _TallyEntry:
        """Return the entry of ``tally``; create it if it has none."""
        with self._lock:
            if tally._entry is None:
                entry = _TallyEntry(tally._amounts)
                self._entries.add(entry)
                tally._entry = entry
            self._close()
            return tally._entry

    def reckon(self) -> None:
        with self._lock:
            self._close()
            entries = list(self._entries)
        for entry in entries:
            entry.reckon()

    def _close(self) -> None:
        with suppress(IndexError):
            while True:
                entry = self.closed.popleft()
                entry.reckon()
                self._entries.discard(entry)


class MetricHistogram:
    """Observations in buckets up to each of ``bounds``, and one above. Thread-safe.

    An observation is only appended to a list. Some hundreds at a time are sorted into buckets, and the
    rest when the values are read, so that no request pays for the sorting and its lock."""

    __slots__ = ("_arrays", "_counts", "_lock", "_noted", "_notes", "_total", "bounds", "signed")

    def __init__(self, bounds: tuple[float, ...] = SECONDS_BUCKETS) -> None:
        self.bounds = bounds
        self.signed: tuple[Counter, Counter] | None = None
        """Counters of what `observe_array` is given: the sum of the values above 0, and of those below
        without their sign. A histogram's own sum falls with these, and what falls has no rate."""
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0
        self._notes: list[float] = []
        self._arrays: list[NDArray[Any]] = []
        self._noted = 0
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        self._notes.append(seconds)
        if len(self._notes) >= _NOTES:
            self.read()

    def observe_all(self, seconds: Iterable[float]) -> None:
        self._notes.extend(seconds)
        if len(self._notes) >= _NOTES:
            self.read()

    def observe_array(self, values: NDArray[Any]) -> None:
        """Add ``values``, floats of any shape, all finite; they are copied."""
        self._arrays.append(values.flatten())
        self._noted += values.size  # unlocked: a race may lose an addition
        if self._noted >= _VALUES:
            self.read()

    def read(self) -> tuple[list[int], float]:
        """Observations per bucket, the last one without an upper bound, and their sum."""
        with self._lock:
            notes = self._notes[:]
            del self._notes[: len(notes)]  # others may append meanwhile, never remove
            if notes:
                buckets = np.searchsorted(self.bounds, notes)
                self._counts += np.bincount(buckets, minlength=len(self._counts))
                self._total += sum(notes)
            arrays = self._arrays[:]
            del self._arrays[: len(arrays)]
            self._noted = 0
            if arrays:
                # Sorting is fast; a search of the bucket of every value takes five times as long.
                values = np.sort(np.concatenate(arrays))
                upto = values.searchsorted(self.bounds, "right")
                self._counts[:-1] += upto
                self._counts[1:] -= upto
                self._counts[-1] += values.size
                negative = values.searchsorted(0)
                above = float(values[negative:].sum(dtype=np.float64))
                below = float(values[:negative].sum(dtype=np.float64))
                self._total += above + below
                if self.signed is not None:
                    add_all(zip(self.signed, (above, -below), strict=True))
            return self._counts.tolist(), self._total
