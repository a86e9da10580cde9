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

from hps import native
from hps.observability.metric_spec import SECONDS_BUCKETS

# Single observations that a histogram has not yet sorted into buckets.
_MAX_OBSERVATIONS = 512
# Values of an array that are counted without releasing the interpreter lock: a tenth of a millisecond.
_PART_VALUES = 1 << 15


# One lock for all counters: it is held for a fraction of a microsecond, and never while waiting.
_counter_lock = threading.Lock()


class Counter:
    """A monotonic number. Thread-safe."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        with _counter_lock:
            self.value += amount


def add_all(amounts: Iterable[tuple[Counter, float]]) -> None:
    """Add to many counters at half the cost of single additions."""
    with _counter_lock:
        for counter, amount in amounts:
            counter.value += amount


Amounts = Sequence[tuple[Counter, int]]


class BatchedCounters:
    """Adds the same amounts to many counters repeatedly, at the cost of one addition. Thread-safe.

    It counts the additions; the counters are updated when their values are read."""

    __slots__ = ("_amounts", "_entry", "_is_used", "_registry")

    def __init__(self, amounts: Amounts, registry: BatchRegistry) -> None:
        self._amounts = amounts
        self._registry = registry
        self._entry: _BatchEntry | None = None
        self._is_used = False

    def add(self) -> None:
        entry = self._entry
        if entry is None:
            if not self._is_used:  # many are used only once
                self._is_used = True
                add_all(self._amounts)
                return
            entry = self._registry.enter(self)
        with _counter_lock:
            entry.times += 1

    def __del__(self) -> None:
        # Without the lock, which this thread may hold.
        if self._entry is not None:
            self._registry.closed.append(self._entry)


class _BatchEntry:
    """Number of additions since the counters were last updated."""

    __slots__ = ("amounts", "times")

    def __init__(self, amounts: Amounts) -> None:
        self.amounts = amounts
        self.times = 0

    def flush(self) -> None:
        with _counter_lock:
            times, self.times = self.times, 0
            for counter, amount in self.amounts if times else ():
                counter.value += amount * times


class BatchRegistry:
    """Entries of `BatchedCounters` in use, and of deleted ones until their counters are updated."""

    def __init__(self) -> None:
        self.closed: deque[_BatchEntry] = deque()
        self._entries: set[_BatchEntry] = set()
        self._lock = threading.Lock()

    def enter(self, counters: BatchedCounters) -> _BatchEntry:
        """Return the entry of ``counters``; create it if it has none."""
        with self._lock:
            if counters._entry is None:
                entry = _BatchEntry(counters._amounts)
                self._entries.add(entry)
                counters._entry = entry
            self._close()
            return counters._entry

    def flush(self) -> None:
        with self._lock:
            self._close()
            entries = list(self._entries)
        for entry in entries:
            entry.flush()

    def _close(self) -> None:
        with suppress(IndexError):
            while True:
                entry = self.closed.popleft()
                entry.flush()
                self._entries.discard(entry)


class MetricHistogram:
    """Observations in buckets up to each of ``bounds``, and one above. Thread-safe.

    A single observation is only appended to a list. Some hundreds at a time are sorted into buckets, and the
    rest when the values are read, so that no request pays for the sorting and its lock. Arrays are counted
    immediately, at a nanosecond or two per value: no request pays for those before it."""

    __slots__ = (
        "_counts",
        "_edges",
        "_lock",
        "_observations",
        "_sums",
        "_total",
        "bounds",
        "signed",
    )

    def __init__(self, bounds: tuple[float, ...] = SECONDS_BUCKETS) -> None:
        self.bounds = bounds
        self.signed: tuple[Counter, Counter] | None = None
        """Counters of the sums of positive and of negative values (without the sign). The histogram's sum
        decreases with negative values, so it has no rate in Prometheus."""
        self._edges = np.array(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sums = np.zeros(2)  # of positive and of other values since the last `read`
        self._total = 0.0
        self._observations: list[float] = []
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        self._observations.append(seconds)
        if len(self._observations) >= _MAX_OBSERVATIONS:
            self.read()

    def observe_all(self, seconds: Iterable[float]) -> None:
        self._observations.extend(seconds)
        if len(self._observations) >= _MAX_OBSERVATIONS:
            self.read()

    def observe_array(self, values: NDArray[Any]) -> None:
        """Add ``values``, floats of any shape, all finite."""
        flat = values.ravel()
        if flat.dtype.char not in "fd":
            flat = flat.astype(np.float64)
        with self._lock:  # held while a part is counted, some microseconds
            for start in range(0, flat.size, _PART_VALUES):
                self._count(flat[start : start + _PART_VALUES])

    def read(self) -> tuple[list[int], float]:
        """Return the observations per bucket, the last one without an upper bound, and their sum."""
        with self._lock:
            observations = self._observations[:]
            del self._observations[: len(observations)]  # others may append meanwhile, never remove
            self._count(np.array(observations, np.float64))
            above, below = self._sums.tolist()
            self._sums[:] = 0
            self._total += above + below
            if self.signed is not None:
                add_all(zip(self.signed, (above, -below), strict=True))
            return self._counts.tolist(), self._total

    def _count(self, values: NDArray[Any]) -> None:
        """Count ``values (n,)``. The caller holds the lock."""
        native.count_in_buckets(values, self._edges, self._counts, self._sums)
