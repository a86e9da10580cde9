"""Hit-rate curves against direct simulations with the CPU cache."""

import numpy as np
import pytest

from hps.lookup.key_sampling import KeySampler
from hps.tools.plan.curves import TableCurve, simulate

ROWS, ACCESSES, REQUEST = 20_000, 160_000, 64
WARM_UP = 0.25


def zipf(s=0.9):
    random = np.random.default_rng(5)
    weights = 1 / np.arange(1, ROWS + 1) ** s
    ranks = random.choice(ROWS, ACCESSES, p=weights / weights.sum())
    return random.permutation(ROWS)[ranks].astype(np.int64)


def scanning():
    """Half of the accesses scan all rows in turn, half are Zipf's."""
    keys = zipf()
    keys[::2] = np.arange(len(keys[::2])) % ROWS
    return keys


def sample_of(keys, max_keys=1 << 18):
    sampler = KeySampler(max_keys)
    sampler.add(keys, np.arange(len(keys)) // REQUEST)
    return sampler.sample()


TRACES = {"zipf": zipf(), "scanning": scanning()}


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize(
    ("eviction", "max_keys", "tolerance"),
    [
        *((eviction, 1 << 18, 0.01) for eviction in ("lru", "lfu", "random", "fifo")),
        *((eviction, 12_000, 0.02) for eviction in ("lru", "lfu")),
    ],
)
def test_curve_is_that_of_the_cpu_cache(trace, eviction, max_keys, tolerance):
    keys = TRACES[trace]
    sample = sample_of(keys, max_keys)
    assert (sample.rate == 1) == (max_keys > ROWS)
    curve = TableCurve(sample, ROWS, eviction, warm_up=WARM_UP)
    assert curve.touched_rows == pytest.approx(len(np.unique(keys)), rel=0.03)
    first = int(WARM_UP * len(keys))
    for share in (0.05, 0.1, 0.2, 0.5):
        rows = int(share * ROWS)
        simulated = 1 - simulate(keys, rows, eviction)[first:].mean()
        assert curve.at(rows) == pytest.approx(simulated, abs=tolerance), share


def test_curve_ends_with_all_rows():
    curve = TableCurve(sample_of(TRACES["zipf"]), 10 * ROWS)
    assert curve.at(0) < 0.2  # keys that their request asks for again
    assert TableCurve(sample_of(TRACES["zipf"]), ROWS).reached < 1
    assert curve.at(10 * ROWS) == curve.at(11 * ROWS) == 1
    rates = [point.hit_rate for point in curve.points]
    assert rates == sorted(rates)
    assert curve.reached < 1  # rows that are asked for once miss, if the cache starts empty


def test_unknown_keys_miss_in_every_cache():
    keys = TRACES["zipf"].copy()
    keys[::4] += 10 * ROWS
    sample = sample_of(keys)
    curve = TableCurve(sample, ROWS, known=sample.keys < ROWS)
    assert curve.unknown_share == pytest.approx(0.25, abs=0.01)
    assert curve.at(ROWS) == pytest.approx(0.75, abs=0.01)
    misses = np.bincount(curve.missed(ROWS), minlength=sample.requests[-1] + 1)
    assert misses[len(misses) // 2] >= REQUEST // 4


def test_request_reads_a_repeated_row_once():
    keys = np.repeat(np.arange(1_000), 4)
    sampler = KeySampler()
    sampler.add(keys, np.repeat(np.arange(1_000), 4))
    curve = TableCurve(sampler.sample(), 10_000, warm_up=0)
    assert curve.at(1) == pytest.approx(0.75)
    assert np.bincount(curve.missed(0)).tolist() == [1] * 1_000
