"""Differences between two runs, with their statistical significance.

The requests of a run are not independent: a pause of the server makes many slow together. So whole slices
of the run are resampled, not single requests (a block bootstrap; Künsch, The Jackknife and the Bootstrap
for General Stationary Observations, 1989). A ratio of two quantiles counts as a difference if 1 is outside
its 95 % interval, corrected for all compared quantities (Bonferroni), and if it exceeds the error that
buckets of the histogram may cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import ConfigError
from hps.tools.bench.histogram import LatencyHistogram, highest
from hps.tools.bench.report import QUANTILES, slices_of

_DRAWS = 4000
LEVEL = 0.05
# With fewer slices with answers, their variation is unknown.
_FEWEST = 10
# Largest error that buckets may cause: the width of two.
_HIDDEN = 0.002
# A quantile needs this many durations beyond it.
_BEYOND = 10
_SAME = (
    *("model", "protocol", "batch", "keys", "different_requests", "concurrency", "connections"),
    *("rate", "arrivals"),
)


@dataclass(frozen=True, slots=True)
class BenchDifference:
    """One quantity before and after; the ratio lies between ``low`` and ``high``.

    ``verdict``: ``faster``, ``slower``, or ``none``: no significant difference."""

    name: str
    before: float
    after: float
    low: float
    high: float
    verdict: str


def unlike(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Differences in the settings of two runs, a sentence each."""
    return [
        f"{name} was {before.get(name)}, is {after.get(name)}"
        for name in _SAME
        if before.get(name) != after.get(name)
    ]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[BenchDifference]:
    """Compare the quantiles, and the throughput of closed loops.

    Raises ConfigError for runs without answers, or with too few of them."""
    runs = [_LatencySlices(before), _LatencySlices(after)]
    total = min(run.total for run in runs)
    names = [n for n, share in QUANTILES.items() if n == "p50" or total * (1 - share) >= _BEYOND]
    throughput = before.get("rate") is None and after.get("rate") is None
    level = LEVEL / (len(names) + throughput)
    random = np.random.default_rng(1)
    drawn = [run.drawn(random, [QUANTILES[name] for name in names]) for run in runs]
    found = []
    for name, ratios in zip(names, (drawn[1][0] / drawn[0][0]).T, strict=True):
        was, is_now = (run.quantile(QUANTILES[name]) for run in runs)
        found.append(_judged(name, was, is_now, ratios, level, 1))
    if throughput:
        was, is_now = (float(each["requests_per_s"]) for each in (before, after))
        found.append(_judged("requests/s", was, is_now, drawn[1][1] / drawn[0][1], level, -1))
    return found


def _judged(
    name: str, before: float, after: float, ratios: NDArray[Any], level: float, worse: int
) -> BenchDifference:
    """Judge one quantity; ``worse``: 1 if more is slower (latency), -1 if more is faster (throughput)."""
    low, high = (float(value) for value in np.quantile(ratios, [level / 2, 1 - level / 2]))
    if low <= 1 <= high or abs(after / before - 1) <= _HIDDEN:
        return BenchDifference(name, before, after, low, high, "none")
    more = low > 1
    return BenchDifference(
        name, before, after, low, high, "slower" if more == (worse > 0) else "faster"
    )


class _LatencySlices:
    """A run's histograms as a table: slices down, durations across."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        """Slices without answers count, too."""
        slices = slices_of(report)
        filled = sum(1 for _, each in slices if each.counts)
        if not filled:
            raise ConfigError("a run without an answer cannot be compared; see its errors")
        if filled < _FEWEST:
            raise ConfigError(
                f"a run cannot be compared that has answers in {filled} of its {len(slices)} parts, since "
                "the differences between parts show how significant a difference is; send for longer"
            )
        numbers = sorted(LatencyHistogram.summed(each for _, each in slices).counts)
        self._seconds = np.array([highest(number) * 1e-9 for number in numbers])
        # float64 is exact for counts and fast in matrix products.
        self._counts = np.array(
            [[each.counts.get(n, 0) for n in numbers] for _, each in slices], np.float64
        )
        self._spans = np.array([seconds for seconds, _ in slices])
        self.total = int(self._counts.sum())

    def quantile(self, share: float) -> float:
        return float(self._at(self._counts.sum(axis=0)[None].cumsum(axis=1), share)[0])

    def drawn(
        self, random: np.random.Generator, shares: Sequence[float]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Quantiles ``(draws, shares)`` and requests a second ``(draws,)`` of slices drawn with
        replacement."""
        n = len(self._counts)
        times = random.multinomial(n, np.full(n, 1 / n), _DRAWS)
        ranks = (times @ self._counts).cumsum(axis=1)
        quantiles = np.stack([self._at(ranks, share) for share in shares], axis=1)
        return quantiles, ranks[:, -1] / (times @ self._spans)

    def _at(self, ranks: NDArray[np.float64], share: float) -> NDArray[np.float64]:
        """The quantile of each row of ``ranks (rows, durations)``, the counts of durations up to each one."""
        reached = ranks >= share * ranks[:, -1:]
        return np.asarray(self._seconds[reached.argmax(axis=1)])
