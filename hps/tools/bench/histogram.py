"""Histogram of durations; buckets are at most a thousandth of their value wide.

The layout is HdrHistogram's (Gil Tene, https://hdrhistogram.org) with 1,024 buckets for each doubling:
there is no upper limit, and histograms are added by adding their counts. HdrHistogram's Python package is
not used, since this module is all that is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_BITS = 10


def bucket(ns: int) -> int:
    """The number of the bucket that ``ns`` (>= 0) falls into."""
    shift = ns.bit_length() - _BITS - 1
    return ns if shift <= 0 else (shift << _BITS) + (ns >> shift)


def highest(number: int) -> int:
    """The longest duration, ns, that falls into a bucket."""
    shift = (number >> _BITS) - 1
    if shift <= 0:
        return number
    return ((number - (shift << _BITS) + 1) << shift) - 1


class LatencyHistogram:
    """``counts`` by bucket. Used by one thread."""

    __slots__ = ("counts",)

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: dict[int, int] = dict(counts or {})

    def record(self, ns: int) -> None:
        number = bucket(ns)
        self.counts[number] = self.counts.get(number, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """Seconds that ``share`` of the durations did not exceed, at most 0.1 % too long; None when empty."""
        wanted, seen = share * self.total, 0
        for number in sorted(self.counts):
            seen += self.counts[number]
            if seen >= wanted:
                return highest(number) * 1e-9
        return None

    @property
    def mean(self) -> float | None:
        """Mean in seconds; None when empty."""
        total = self.total
        return (
            sum(highest(n) * count for n, count in self.counts.items()) / total * 1e-9
            if total
            else None
        )

    @staticmethod
    def summed(histograms: Iterable[LatencyHistogram]) -> LatencyHistogram:
        whole = LatencyHistogram()
        for each in histograms:
            for number, count in each.counts.items():
                whole.counts[number] = whole.counts.get(number, 0) + count
        return whole
