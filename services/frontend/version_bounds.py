"""Judge a version's counts against those of the version that it is to replace.

Each bound is left only if that is no chance: the measured value must be beyond it by what random requests
explain at the 99 % level. Scores are compared by the population stability index over the deciles of the
compared version (Siddiqi, "Credit Risk Scorecards", 2006: below 0.1 no change, above 0.25 a significant one).
Without a change, the index is distributed as chi-squared with 9 degrees of freedom times ``1/n + 1/m``
(Yurdakul and Naranjo, "Statistical properties of the population stability index", 2020)."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.config.traffic_settings import RollbackBounds
from services.frontend.version_watch import VersionCounts, latency_s

# One-sided 99 % quantile of the normal distribution.
_Z = 2.326
_GROUPS = 10
_FEWEST_COMPARED = 100


def violation(
    new: VersionCounts, compared: VersionCounts | None, bounds: RollbackBounds
) -> tuple[str, str] | None:
    """Return the reason (``errors``, ``latency`` or ``scores``) and a sentence if ``new`` leaves the bounds.

    ``compared`` is None if there is no version to compare with: then only failures are judged."""
    if new.requests < bounds.min_requests:
        return None
    if compared is not None and compared.requests < _FEWEST_COMPARED:
        compared = None
    if (found := _errors(new, compared, bounds)) is not None:
        return "errors", found
    if compared is None:
        return None
    if (found := _latency(new, compared, bounds)) is not None:
        return "latency", found
    if (found := _scores(new, compared, bounds)) is not None:
        return "scores", found
    return None


def _errors(
    new: VersionCounts, compared: VersionCounts | None, bounds: RollbackBounds
) -> str | None:
    if bounds.max_error_rate is None:
        return None
    rate, variance = _rate(new)
    before, others = (0.0, 0.0) if compared is None else _rate(compared)
    if rate - before - _Z * math.sqrt(variance + others) <= bounds.max_error_rate:
        return None
    return (
        f"{100 * rate:.2g} % of {new.requests} requests failed, against {100 * before:.2g} % "
        f"(max_error_rate {bounds.max_error_rate:g})"
    )


def _rate(counts: VersionCounts) -> tuple[float, float]:
    """Return the share of failures and its variance."""
    rate = counts.failures / counts.requests
    return rate, rate * (1 - rate) / counts.requests


def _latency(new: VersionCounts, compared: VersionCounts, bounds: RollbackBounds) -> str | None:
    answers, others = new.latencies.total(), compared.latencies.total()
    if bounds.max_p99_ratio is None or not answers or not others:
        return None
    low = _quantile_s(new.latencies, 0.99 - _Z * math.sqrt(0.0099 / answers))
    high = _quantile_s(compared.latencies, 0.99 + _Z * math.sqrt(0.0099 / others))
    if low <= bounds.max_p99_ratio * high:
        return None
    p99, before = _quantile_s(new.latencies, 0.99), _quantile_s(compared.latencies, 0.99)
    return (
        f"the p99 latency of {answers} requests is {1e3 * p99:.3g} ms, against {1e3 * before:.3g} ms "
        f"(max_p99_ratio {bounds.max_p99_ratio:g})"
    )


def _quantile_s(latencies: Counter[int], share: float) -> float:
    wanted, seen = min(share, 1.0) * latencies.total(), 0
    for each in sorted(latencies):
        seen += latencies[each]
        if seen >= wanted:
            break
    return latency_s(each)


def _scores(new: VersionCounts, compared: VersionCounts, bounds: RollbackBounds) -> str | None:
    if bounds.max_psi is None or not new.scores or not compared.scores:
        return None
    found = stability_index(compared.scores, new.scores)
    # Scores of one request are alike, so requests are counted as the independent samples.
    freedom = _GROUPS - 1
    chance = freedom + _Z * math.sqrt(2 * freedom)
    if found - chance * (1 / new.requests + 1 / compared.requests) <= bounds.max_psi:
        return None
    return (
        f"the scores of {new.requests} requests have a population stability index of {found:.3g} "
        f"(max_psi {bounds.max_psi:g})"
    )


def stability_index(expected: Counter[int], actual: Counter[int]) -> float:
    """Return the population stability index of counts by class, over the deciles of ``expected``."""
    classes = sorted(expected.keys() | actual.keys())
    was = np.array([expected[each] for each in classes], float)
    now = np.array([actual[each] for each in classes], float)
    middle = (np.cumsum(was) - was / 2) / was.sum()
    group = np.minimum((middle * _GROUPS).astype(int), _GROUPS - 1)
    shares = [_shares(np.bincount(group, counts, _GROUPS)) for counts in (was, now)]
    return float(np.sum((shares[1] - shares[0]) * np.log(shares[1] / shares[0])))


def _shares(counts: NDArray[Any]) -> NDArray[Any]:
    """Return the share of each group; the half keeps an empty group above 0."""
    shares: NDArray[Any] = (counts + 0.5) / (counts.sum() + 0.5 * counts.size)
    return shares
