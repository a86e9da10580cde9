"""A table split over GPUs, with twins of their caches: rows, copies and changes; no GPU is needed."""

import numpy as np
import pytest

from hps.cuda.owners import MOST_OWNERS, owner_of
from hps.errors import BadRequest, ConfigError
from hps.tiers.base import FetchContext, Part
from hps.tiers.gpu import split as split_module
from hps.tiers.gpu.split import GpuSplit
from hps.types import EmbeddingTable, Source, make_version
from tests.support import twin_device
from tests.support.memory_tier import MemoryTier
from tests.support.rows import distinct_rows

TABLE, OTHER = EmbeddingTable.make("t", 4), EmbeddingTable.make("other", 8)
NOW = make_version(1_790_000_000_000)


def clock():
    return 1_790_000_000.0


@pytest.fixture(params=[1, 2, 3])
def split(request, monkeypatch):
    return split_over(request.param, monkeypatch)


def split_over(devices, monkeypatch, rows=1000):
    asked = []
    monkeypatch.setattr(split_module, "enable_peer_access", asked.append)
    caches = [twin_device.Cache(device) for device in range(devices)]
    for cache in caches:
        cache._clock = clock
        cache.space.number = cache.number
        for table in (TABLE, OTHER):
            cache.add_table(table, rows)
    made = GpuSplit(caches)
    assert asked == [list(range(devices))]
    for cache in caches:
        assert cache.peers == set(range(devices)) - {cache.number}
    return made


def versions_of(keys, sequence=0):
    return np.full(len(keys), NOW + sequence, np.uint64)


def owned(keys, split, device):
    return [key for key in keys if owner_of(np.array([key]), len(split.caches))[0] == device]


def fetch(split, keys, table=TABLE):
    part = Part.make(table, np.asarray(keys))
    split.fetch([part], FetchContext())
    return part


def test_rows_are_on_their_owner_alone(split):
    keys = np.arange(300)
    split.insert(TABLE, keys, distinct_rows(TABLE, keys), versions_of(keys))
    for device, cache in enumerate(split.caches):
        assert cache.keys_of(TABLE) == owned(range(300), split, device)
    assert split.rows(TABLE) == 300
    assert split.capacity(TABLE) == 1000 * len(split.caches)


def test_any_device_answers_all_keys_and_asks_only_owners(split):
    keys = np.arange(300)
    split.insert(TABLE, keys, distinct_rows(TABLE, keys), versions_of(keys))
    for _ in split.caches:
        before = [sum(cache.fetched) for cache in split.caches]
        parts = [Part.make(TABLE, np.arange(250, 350)), Part.make(OTHER, np.arange(5))]
        parts[0].missing = np.arange(10, 100)
        split.fetch(parts, FetchContext())
        assert parts[0].missing.tolist() == list(range(50, 100))
        assert parts[1].missing.tolist() == list(range(5))
        assert parts[0].source.tolist() == [0] * 10 + [Source.GPU] * 40 + [0] * 50
        np.testing.assert_array_equal(
            parts[0].out[10:50], distinct_rows(TABLE, np.arange(260, 300))
        )
        asked = [sum(c.fetched) - n for c, n in zip(split.caches, before, strict=True)]
        home = int(np.argmax(asked))
        assert asked[home] == 95
        for device in range(len(split.caches)):
            if device != home:
                count = len(owned(range(260, 350), split, device))
                assert asked[device] == count + len(owned(range(5), split, device))
    assert all(cache.space.lent == 0 for cache in split.caches)


def test_split_answers_like_one_tier_under_random_changes(split):
    model, rng = MemoryTier(clock=clock), np.random.default_rng(len(split.caches))
    for step in range(150):
        keys = rng.permutation(np.arange(-60, 60))[: rng.integers(1, 40)]
        rows = distinct_rows(TABLE, keys, step)
        versions = (NOW + rng.integers(0, step + 2, len(keys))).astype(np.uint64)
        verb = rng.choice(["insert", "insert", "update", "delete", "evict", "copy"])
        for tier in (model, split):
            if verb in ("insert", "update"):
                getattr(tier, verb)(TABLE, keys, rows, versions)
            elif verb == "delete":
                tier.delete(TABLE, keys, versions)
            elif verb == "evict":
                tier.evict(TABLE, keys)
        if verb == "copy":
            split.copy_hottest(TABLE, 20)
        asked = np.arange(-70, 70)
        expected = Part.make(TABLE, asked)
        model.fetch([expected], FetchContext())
        for _ in split.caches:
            found = fetch(split, asked)
            np.testing.assert_array_equal(found.missing, expected.missing)
            np.testing.assert_array_equal(found.versions, expected.versions)
            there = expected.source != 0
            np.testing.assert_array_equal(found.source != 0, there)
            np.testing.assert_array_equal(found.out[there], expected.out[there])


def test_hottest_rows_are_copied_and_their_copies_follow_changes(monkeypatch):
    split = split_over(2, monkeypatch)
    keys = np.arange(100)
    split.insert(TABLE, keys, distinct_rows(TABLE, keys), versions_of(keys))
    hot = [owned(range(100), split, device)[-10:] for device in range(2)]
    assert split.copy_hottest(TABLE, 10) == 20
    for device, cache in enumerate(split.caches):
        mine = owned(range(100), split, device)
        assert cache.keys_of(TABLE) == sorted({*mine, *hot[1 - device]})
    changed = np.array(sorted(hot[0] + hot[1]))
    one, two, three = changed[:6], changed[6:12], changed[12:]
    split.update(TABLE, one, distinct_rows(TABLE, one, 1), versions_of(one, 1))
    split.insert(TABLE, two, distinct_rows(TABLE, two, 1), versions_of(two, 1))
    split.delete(TABLE, three, versions_of(three, 1))
    for _ in range(2):
        found = fetch(split, changed)
        assert len(found.missing) == 0
        assert (found.versions == NOW + 1).all()
        assert (found.source != 0).tolist() == [True] * 12 + [False] * 8
        np.testing.assert_array_equal(found.out[:12], distinct_rows(TABLE, changed[:12], 1))
    split.insert(TABLE, three, distinct_rows(TABLE, three, 2), versions_of(three, 2))
    split.evict(TABLE, one)
    for _ in range(2):
        assert fetch(split, changed).missing.tolist() == list(range(6))


def test_hottest_keys_are_those_of_all_owners(split):
    keys = np.arange(60)
    split.insert(TABLE, keys, distinct_rows(TABLE, keys), versions_of(keys))
    split.copy_hottest(TABLE, 5)
    found, scores = split.top_k(TABLE, 40)
    assert len(set(found.tolist())) == len(found) == len(scores) == 40
    assert len(split.top_k(TABLE, 0)[0]) == 0


def test_static_table_is_filled_by_owner_and_never_changes(split):
    keys = np.arange(50)
    split.insert(TABLE, keys, distinct_rows(TABLE, keys), versions_of(keys))
    assert split.seal(TABLE) == 0
    assert split.rows(TABLE) == 50
    assert split.copy_hottest(TABLE, 10) == 0
    assert len(split.top_k(TABLE, 10)[0]) == 0
    split.insert(TABLE, keys, distinct_rows(TABLE, keys, 1), versions_of(keys, 1))
    for verb in (
        lambda: split.update(TABLE, keys, distinct_rows(TABLE, keys), versions_of(keys)),
        lambda: split.delete(TABLE, keys, versions_of(keys)),
    ):
        with pytest.raises(BadRequest, match="is static in the GPU cache"):
            verb()
    np.testing.assert_array_equal(fetch(split, keys).out, distinct_rows(TABLE, keys))


def test_rows_evicted_by_version_are_scored_on_owners_and_as_copies(monkeypatch):
    split = split_over(2, monkeypatch)
    split.add_by_version([TABLE])
    keys = np.arange(20)
    split.insert(TABLE, keys, distinct_rows(TABLE, keys), versions_of(keys))
    split.copy_hottest(TABLE, 4)
    for cache in split.caches:
        scores = [given for table, given in cache.scored if table == TABLE]
        assert len(scores) == 2
        assert all((given == NOW).all() for given in scores)


def test_dropped_table_has_no_copies(monkeypatch):
    split = split_over(2, monkeypatch)
    keys = np.arange(20)
    split.insert(TABLE, keys, distinct_rows(TABLE, keys), versions_of(keys))
    split.copy_hottest(TABLE, 4)
    split.drop_table(TABLE)
    assert TABLE not in split._copied
    assert split.capacity(TABLE) == 0
    assert len(fetch(split, keys).missing) == 20


def test_too_many_devices_are_rejected():
    caches = [twin_device.Cache(0) for _ in range(MOST_OWNERS + 1)]
    with pytest.raises(ConfigError, match="at most 16 GPUs, not 17"):
        GpuSplit(caches)
