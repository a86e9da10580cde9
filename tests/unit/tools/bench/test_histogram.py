"""The buckets of latencies."""

from __future__ import annotations

import numpy as np
import pytest

from hps.tools.bench.histogram import LatencyHistogram, bucket, highest

EDGES = [0, 1, 1023, 1024, 2047, 2048, 2049, 4095, 4096, 10**6, 10**9, 2**40, 3600 * 10**9]


@pytest.mark.parametrize("ns", EDGES)
def test_bucket_is_at_most_a_thousandth_of_its_value_wide(ns: int) -> None:
    top = highest(bucket(ns))
    assert ns <= top <= ns * (1 + 1 / 1024)
    assert bucket(top) == bucket(ns)
    assert bucket(top + 1) == bucket(ns) + 1


def test_quantiles_match_recorded_values() -> None:
    values = np.random.default_rng(3).lognormal(13, 1, 5000).astype(int)
    halves = LatencyHistogram(), LatencyHistogram()
    for i, value in enumerate(values.tolist()):
        halves[i % 2].record(value)
    whole = LatencyHistogram.summed(halves)
    assert whole.total == 5000
    for share in (0.5, 0.9, 0.99, 1.0):
        exact = np.quantile(values, share, method="inverted_cdf") * 1e-9
        assert exact <= (whole.quantile(share) or 0) <= exact * 1.001
    assert whole.mean == pytest.approx(values.mean() * 1e-9, rel=1e-3)


def test_empty_histogram_has_no_quantiles() -> None:
    assert LatencyHistogram().quantile(0.5) is None
    assert LatencyHistogram().mean is None
