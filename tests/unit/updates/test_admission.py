"""Rare keys stay out of the caches: estimates of frequency, and promotions by them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hps
from hps.types import EmbeddingTable
from hps.updates.admission import MOST_SIGHTINGS, Admission, FrequencySketch
from tests.support.small_models import write_models

TABLE, OTHER = EmbeddingTable.make("t", 2), EmbeddingTable.make("o", 2)


def ones(keys):
    return np.ones(len(keys), np.int64)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(-50, 50), unique=True, max_size=40), max_size=40))
def test_an_estimate_is_never_too_low(batches):
    sketch, seen = FrequencySketch(4096), {}
    for batch in batches:
        keys = np.array(batch, np.int64)
        estimates = sketch.add(keys, ones(keys))
        for key, estimate in zip(batch, estimates.tolist(), strict=True):
            seen[key] = seen.get(key, 0) + 1
            assert min(seen[key], MOST_SIGHTINGS) <= estimate <= MOST_SIGHTINGS


def test_few_keys_seem_more_frequent_than_they_are():
    sketch = FrequencySketch(10_000)
    often = np.arange(2_000)
    for _ in range(5):
        sketch.add(often, ones(often))
    once = np.arange(10_000, 18_000)
    assert np.mean(sketch.add(once, ones(once)) > 1) < 0.02


def test_repeated_keys_count_as_often():
    sketch = FrequencySketch(100)
    keys = np.array([5, 6])
    assert sketch.add(keys, np.array([3, 1])).tolist() == [3, 1]
    assert sketch.add(keys, np.array([40, 1])).tolist() == [MOST_SIGHTINGS, 2]


def test_old_sightings_fade():
    sketch = FrequencySketch(1)
    key = np.array([7])
    assert sketch.add(key, np.array([8])).tolist() == [8]
    others = np.arange(100, 25_000)
    for start in range(0, len(others), 1000):
        some = others[start : start + 1000]
        sketch.add(some, ones(some))
    assert sketch.add(key, np.array([1]))[0] < 8


def test_keys_are_admitted_after_so_many_sightings():
    admission = Admission(lambda table: 3 if table is TABLE else 1, lambda _table: 1000)
    keys = np.array([1, 2])
    assert admission.admitted(OTHER, keys, ones(keys)) is None
    assert admission.admitted(TABLE, keys, np.array([1, 2])).tolist() == [False, False]
    assert admission.admitted(TABLE, keys, ones(keys)).tolist() == [False, True]
    assert admission.admitted(TABLE, keys, ones(keys)).tolist() == [True, True]


def test_counts_of_tables_that_are_gone_are_dropped():
    served = {TABLE}
    admission = Admission(lambda _table: 2, lambda _table: 1000, served.__contains__)
    keys = np.array([1])
    admission.admitted(TABLE, keys, ones(keys))
    served.clear()
    admission.admitted(OTHER, keys, ones(keys))
    assert list(admission._sketches) == [OTHER]


@pytest.mark.parametrize("after", [1, 3])
def test_a_node_caches_rows_that_were_missed_often_enough(tmp_path, after):
    write_models(tmp_path / "models")
    settings_of_table = {"users": {"cache_admit_after": after}}
    config = {
        "models": {
            "repository": str(tmp_path / "models"),
            "serve": {"clicks": {"tables": settings_of_table}},
        },
        "tiers": {
            "cpu_cache": {"warm": False},
            "mapped": {"memory_bytes": 0},
            "rocksdb": {"path": str(tmp_path / "db")},
        },
    }
    with hps.open(config) as node:
        cached = []
        for _ in range(4):
            found = node.lookup("clicks", {"users": [7]}, by_table=True, want_source=True)
            np.testing.assert_array_equal(found.vectors["users"][0], 7 + np.arange(4) / 8)
            cached.append(found.sources["users"].tolist() == [hps.Source.CPU])
            assert node.writer.flush(60)
    assert cached == [miss >= after for miss in range(4)]
