"""Rare keys stay out of the caches: estimates of frequency, and promotions by them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hps
from hps.tiers.base import FetchContext, Part
from hps.types import EmbeddingTable
from hps.updates.admission import MOST_SIGHTINGS, Admission, FrequencySketch
from tests.support import twin_device
from tests.support.small_models import write_models
from tests.support.waiting import until

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


def test_keys_left_out_are_counted():
    admission, counted = Admission(lambda _table: 2, lambda _table: 1000), []
    keys = np.array([1, 2, 3])
    admit = lambda times: admission.filter(TABLE, keys, times, lambda *n: counted.append(n))  # noqa: E731
    assert admit(np.array([1, 2, 1])).tolist() == [2]
    assert admit(ones(keys)).tolist() == [1, 2, 3]
    assert counted == [("not_admitted", 2)]


class Opened:
    """A node with a GPU's twin beside the model's mapped files in memory."""

    def __init__(self, tmp_path, monkeypatch, after, **tiers):
        gpus = twin_device.install(monkeypatch)
        write_models(tmp_path / "models")
        self.node = hps.open(
            {
                "models": {
                    "repository": str(tmp_path / "models"),
                    "serve": {"clicks": {"tables": {"users": {"cache_admit_after": after}}}},
                    "warm_up_s": 0,
                },
                "tiers": {
                    "cpu_cache": {"warm": False},
                    "rocksdb": {"path": str(tmp_path / "db")},
                    **tiers,
                },
            }
        )
        (self.gpu,) = gpus
        self.table = self.node.model("clicks").tables["users"]
        (self.cpu,) = (
            each.tier for each in self.node.tiers if each.tier.info.source is hps.Source.CPU
        )

    def ask(self, *keys):
        found = self.node.lookup("clicks", {"users": keys}, by_table=True)
        return found.vectors["users"][:, 0].tolist()

    def predict(self, key):
        features = {"user": [key], "item": [1], "history": [[1]]}
        self.node.predict("clicks", features, {"dense": np.zeros((1, 3), np.float32)})

    def promoted(self, tier, result):
        """Keys whose promotion into a tier had this ``result``."""
        labels = [f'tier="{tier}"', f'result="{result}"']
        return sum(
            float(line.rpartition(" ")[2])
            for line in self.node.metrics.render().decode().splitlines()
            if line.startswith("hps_promotions_total") and all(each in line for each in labels)
        )

    def in_cpu_cache(self, *keys):
        part = Part.make(self.table, np.array(keys))
        self.cpu.fetch([part], FetchContext())
        return [source > 0 for source in part.source.tolist()]


@pytest.fixture
def opened(tmp_path, monkeypatch):
    nodes = []

    def make(after, **tiers):
        nodes.append(Opened(tmp_path, monkeypatch, after, **tiers))
        return nodes[-1]

    yield make
    for each in nodes:
        each.node.close()


@pytest.mark.parametrize("after", [1, 3])
def test_rows_of_files_in_memory_enter_the_gpu_after_so_many_lookups(opened, after):
    """The CPU cache, which reads the file, answers every one of them."""
    one = opened(after)
    until(lambda: one.cpu.is_mapped(one.table))
    for lookup in range(1, after):
        one.predict(7)
        until(lambda lookup=lookup: one.promoted("gpu", "not_admitted") == lookup)
        assert one.gpu.keys_of(one.table) == []
    one.predict(7)
    until(lambda: one.gpu.keys_of(one.table) == [7])
    assert one.promoted("gpu", "not_admitted") == after - 1


def test_streams_bring_no_rows_into_the_caches(opened):
    """Only rows that are in a cache are refreshed; a written row enters like any other."""
    one = opened(2, mapped={"memory_bytes": 0})
    for _ in range(2):
        one.ask(5)
        one.node.writer.flush(60)
    assert one.in_cpu_cache(5, 6, 500) == [True, False, False]
    one.node.write("clicks", "users", [5, 6, 500], np.full((3, 4), 9, np.float32))
    assert one.in_cpu_cache(5, 6, 500) == [True, False, False]
    assert one.gpu.keys_of(one.table) == [5]
    assert one.ask(5, 6, 500) == [9.0, 9.0, 9.0]
    one.node.writer.flush(60)
    assert one.in_cpu_cache(5, 6, 500) == [True, False, False]
    assert one.ask(6, 500) == [9.0, 9.0]
    one.node.writer.flush(60)
    assert one.in_cpu_cache(5, 6, 500) == [True, True, True]


@pytest.mark.parametrize("after", [1, 2])
def test_changed_rows_of_files_in_memory_enter_the_cpu_cache_if_they_are_in_use(opened, after):
    one = opened(after)
    until(lambda: one.cpu.is_mapped(one.table))
    one.cpu._use_counts[one.table].add(np.array([5]))
    one.node.write("clicks", "users", [5, 6], np.full((2, 4), 9, np.float32))
    assert one.cpu.size(one.table) == (2 if after == 1 else 1)
    assert one.in_cpu_cache(5, 6) == [True, after == 1]
    assert one.promoted("cpu", "not_admitted") == after - 1
    assert one.ask(5, 6) == [9.0, 9.0]
