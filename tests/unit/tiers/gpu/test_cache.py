"""The GPU cache on a device: comparison with its twin, limits, concurrent readers and writer."""

import threading
import time
from functools import partial

import numpy as np
import pytest

from hps.cuda import fetch as fetch_module
from hps.cuda import launch, layout, loader, memory
from hps.cuda import table as table_module
from hps.cuda.fetch import FetchVariant
from hps.cuda.layout import (
    EMPTY,
    NO_ROW,
    ROOMY_LOAD,
    SLOT,
    TOMBSTONE,
    EvictionPolicy,
)
from hps.cuda.loader import cupy
from hps.cuda.reader_events import ReaderEvents
from hps.cuda.twin import TwinTable
from hps.errors import BadRequest, ConfigError, TierTimeout, Unavailable
from hps.native import COMPILED
from hps.tiers.base import FetchContext, Part
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.checks import DevicePooling
from hps.types import EmbeddingTable, JaggedKeys, Source, make_version
from tests.support.rows import distinct_rows

pytestmark = pytest.mark.gpu
NOW = make_version(time.time_ns() // 1_000_000)


def versions_of(keys, sequence=0):
    return np.full(len(keys), NOW + sequence, np.uint64)


def part_of(table, keys, fill=-1):
    cp = cupy()
    n = len(keys)
    return Part(
        table,
        keys,
        cp.full((n, table.dim), fill, table.dtype),
        cp.zeros(n, np.uint64),
        cp.zeros(n, np.uint8),
        np.arange(n),
    )


def fetch(cache, table, keys):
    part = part_of(table, keys)
    cache.fetch([part], FetchContext())
    return part


def slots_of(held):
    return held.lines.get().view(SLOT).reshape(-1, layout.HALF)


def scores_in(held, slots):
    return (
        slots["score"] if held.slot_scores is None else held.slot_scores.get().reshape(slots.shape)
    )


def scores_of(policy, rng):
    """Mostly alike in their low half or in their high one, where the caller says what a row is worth."""
    if policy is not EvictionPolicy.SCORE or rng.random() < 0.1:
        return None
    return np.array([rng.integers(0, 9) << 32 | rng.integers(0, 9)], np.uint64)


def check(held):
    """Check that each row has one owner, each key of a member one slot, and that none is claimed."""
    slots, mask = slots_of(held), np.uint32(held.shape.row_mask)
    numbers = (slots["word"] & mask).reshape(-1)
    if held.shape.roomy:
        empty = slots["word"].reshape(-1) >= EMPTY
        assert (numbers[empty] == mask).all()
        numbers = numbers[~empty]
    owned = np.concatenate([numbers, held.spare.get()[held.state.filled :]])
    np.testing.assert_array_equal(np.sort(owned), np.arange(held.shape.rows))
    assert not (slots["word"] & np.uint32(layout.CLAIMED)).any()
    for member in held.state.members:
        at = np.nonzero(slots["word"] & np.uint32(held.shape.hidden(member)) == 0)
        keys = slots["key"][at]
        assert len(np.unique(keys)) == len(keys)
        halves = layout.half_buckets(np.ascontiguousarray(keys), held.shape.buckets)
        assert (halves == at[0][:, None]).any(axis=1).all()


POLICIES = [EvictionPolicy.LRU, EvictionPolicy.LFU, EvictionPolicy.SCORE, EvictionPolicy.EPOCH_LRU]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_single_key_operations_match_twin(policy):
    table = EmbeddingTable.make("t", 4)
    cache = GpuCache({})
    cache.add_table(table, 80, policy=policy)
    held = cache.held(table)
    twin = TwinTable(held.shape, 4, policy=policy)
    twin.clock = held.clock.ticks = 2**32 - 10  # and so wraps on the way
    twin.epoch = held.clock.epoch = 2 ** (32 - layout.COUNT_BITS) - 2
    rng = np.random.default_rng(5)
    for step in range(1500):
        keys = rng.integers(-70, 70, 1)
        versions = versions_of(keys, rng.integers(0, 4) + step // 100)
        verb = rng.choice(["insert", "insert", "insert", "update", "delete", "evict", "fetch"])
        if verb == "evict":
            twin.evict(keys)
            cache.evict(table, keys)
        elif verb == "fetch":
            part = fetch(cache, table, keys)
            vectors, words, seen = twin.fetch(keys)
            assert len(part.missing) == (words[0] == EMPTY)
            if words[0] < TOMBSTONE:
                np.testing.assert_array_equal(part.out.get(), vectors)
            np.testing.assert_array_equal(part.versions.get(), seen)
        elif verb == "delete":
            twin.write(keys, None, versions)
            cache.delete(table, keys, versions)
        elif verb == "update":
            rows, scores = distinct_rows(table, keys, step), scores_of(policy, rng)
            twin.write(keys, rows, versions, update=True, scores=scores)
            cache.update(table, keys, rows, versions, scores)
        else:
            rows, scores = distinct_rows(table, keys, step), scores_of(policy, rng)
            twin.write(keys, rows, versions, scores=scores)
            cache.insert(table, keys, rows, versions, scores)
        if step % 500 == 499:
            twin.epoch = held.clock.epoch = twin.epoch + 1
        assert twin.clock == held.clock.ticks
        if step % 100 == 99:
            slots = slots_of(held)
            full = twin.words < EMPTY
            np.testing.assert_array_equal(slots["word"], twin.words)
            np.testing.assert_array_equal(slots["key"][full], twin.keys[full])
            np.testing.assert_array_equal(scores_in(held, slots)[full], twin.scores[full])
            np.testing.assert_array_equal(held.spare.get(), twin.spare)
    assert twin.evicted > 20
    assert (twin.evicted, twin.dropped) == (held.state.evicted, held.state.dropped)
    check(held)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("dim", [1, 3, 4, 8, 32, 64, 100, 128])
@pytest.mark.parametrize("keys_on_device", [False, True])
def test_rows_of_every_shape_round_trip(dim, dtype, keys_on_device):
    table = EmbeddingTable.make("t", dim, dtype=dtype)
    cache = GpuCache({table: 20_000})
    rng = np.random.default_rng(dim)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, 9000))
    held, absent = keys[::2].copy(), keys[1::2]
    cache.insert(table, held, distinct_rows(table, held), versions_of(held))
    assert cache.size(table) == len(held)
    part = part_of(table, cupy().asarray(keys) if keys_on_device else keys)
    cache.fetch([part], FetchContext())
    np.testing.assert_array_equal(part.missing, np.flatnonzero(np.isin(keys, absent)))
    out = part.out.get()
    np.testing.assert_array_equal(out[::2], distinct_rows(table, held))
    assert (out[1::2] == -1).all()
    assert (part.source.get()[::2] == Source.GPU).all()
    assert (part.versions.get()[::2] == NOW).all()
    check(cache.held(table))


@pytest.mark.parametrize("dim", [3, 32])
@pytest.mark.parametrize("keys", [70_000, 200_001])
@pytest.mark.parametrize("with_versions", [False, True])
def test_large_fetches_of_host_keys_are_complete_and_list_their_misses(dim, keys, with_versions):
    """They run in chunks, and share the list of misses."""
    table = EmbeddingTable.make("t", dim)
    cache, rng = GpuCache({table: 40_000}), np.random.default_rng(dim)
    held = np.arange(0, 20_000, 2)
    cache.insert(table, held, distinct_rows(table, held), versions_of(held))
    for _ in range(5):
        part = part_of(table, rng.integers(0, 20_000, keys))
        if not with_versions:
            part.versions = None
        cache.fetch([part], FetchContext())
        absent = part.keys % 2 == 1
        np.testing.assert_array_equal(part.missing, np.flatnonzero(absent))
        expected = distinct_rows(table, part.keys)
        expected[absent] = -1
        np.testing.assert_array_equal(part.out.get(), expected)
        np.testing.assert_array_equal(part.source.get() == Source.GPU, ~absent)
        if with_versions:
            np.testing.assert_array_equal(part.versions.get() == NOW, ~absent)


def test_highest_version_of_duplicates_wins_in_large_batch():
    """The highest version of a key counts, on equal versions the last."""
    table = EmbeddingTable.make("t", 8)
    cache = GpuCache({table: 400_000})
    rng = np.random.default_rng(2)
    for verb in ("insert", "update"):
        keys = rng.integers(0, 30_000, 200_000)
        keys[:30_000] = np.arange(30_000)
        sequence = rng.integers(0, 5, len(keys)) + (10 if verb == "update" else 0)
        versions = (NOW + sequence).astype(np.uint64)
        rows = distinct_rows(table, keys, np.arange(len(keys))[:, None])
        getattr(cache, verb)(table, keys, rows, versions)
        order = np.lexsort((np.arange(len(keys)), versions, keys))
        last = order[np.append(np.flatnonzero(np.diff(keys[order])), len(keys) - 1)]
        part = fetch(cache, table, keys[last])
        assert len(part.missing) == 0
        np.testing.assert_array_equal(part.out.get(), rows[last])
        np.testing.assert_array_equal(part.versions.get(), versions[last])
        check(cache.held(table))


def test_unique_keys_are_written_like_other_keys():
    table = EmbeddingTable.make("t", 8)
    cache = GpuCache({table: 20_000})
    keys = np.random.default_rng(4).permutation(10_000)
    for sequence, verb in enumerate((cache.insert, cache.update, cache.insert)):
        rows = distinct_rows(table, keys, sequence)
        verb(table, keys, rows, versions_of(keys, sequence), unique=True)
        part = fetch(cache, table, keys)
        assert len(part.missing) < 20
        found = np.setdiff1d(np.arange(len(keys)), part.missing)
        np.testing.assert_array_equal(part.out.get()[found], rows[found])
        check(cache.held(table))


def test_flood_of_rows_fills_table_and_keeps_it_consistent():
    table = EmbeddingTable.make("t", 16)
    cache = GpuCache({table: 50_000})
    keys = np.random.default_rng(3).permutation(400_000)
    cache.insert(table, keys, distinct_rows(table, keys), versions_of(keys))
    held = cache.held(table)
    check(held)
    assert cache.size(table) > 0.98 * cache.capacity(table)
    assert held.state.evicted + held.state.dropped >= len(keys) - cache.capacity(table)
    part = fetch(cache, table, keys)
    found = np.setdiff1d(np.arange(len(keys)), part.missing)
    assert len(found) == cache.size(table)
    np.testing.assert_array_equal(part.out.get()[found], distinct_rows(table, keys[found]))


def test_used_rows_are_kept():
    table = EmbeddingTable.make("t", 4)
    cache = GpuCache({table: 10_000})
    hot = np.arange(3000)
    cache.insert(table, hot, distinct_rows(table, hot), versions_of(hot))
    for start in range(10_000, 60_000, 1000):
        fetch(cache, table, hot)
        keys = np.arange(start, start + 1000)
        cache.insert(table, keys, distinct_rows(table, keys), versions_of(keys))
    # Of 1,000 buckets, one or two are crowded with hot keys: 10 to 17 keys, by the order of the inserts.
    assert len(fetch(cache, table, hot).missing) < 0.01 * len(hot)


@pytest.mark.parametrize("tile", [2, 4])
@pytest.mark.parametrize("form", [launch.ROWS, launch.NUMBERS])
def test_every_thread_count_finds_the_same_rows(tile, form):
    """Two threads a key are chosen for many keys only."""
    table = EmbeddingTable.make("t", 8)
    cache, cp = GpuCache({table: 8000}), cupy()
    keys = np.random.default_rng(6).permutation(12_000)
    cache.insert(
        table, keys[:6000].copy(), distinct_rows(table, keys[:6000]), versions_of(keys[:6000])
    )
    held, misses = cache.held(table), cp.zeros(4 + len(keys), np.uint32)
    out = cp.zeros(len(keys) if form else (len(keys), 8), np.uint32 if form else np.float32)
    cache.direct.fetch(held, cp.asarray(keys), out, misses, FetchVariant(form, tile))
    missing = len(fetch(cache, table, keys).missing)
    if form == launch.NUMBERS:
        numbers = out.get()
        found = numbers != NO_ROW
        out = cp.zeros((int(found.sum()), 8), np.float32)
        held.gather(cp.cuda.get_current_stream(), cp.asarray(numbers[found]), out)
        np.testing.assert_array_equal(out.get(), distinct_rows(table, keys[found]))
        assert len(keys) - found.sum() == missing
    else:
        misses = misses.get()
        assert misses[0] == missing
        found = np.setdiff1d(np.arange(len(keys)), misses[4 : 4 + missing])
        np.testing.assert_array_equal(out.get()[found], distinct_rows(table, keys[found]))


def test_many_tables_take_several_launches():
    tables = [EmbeddingTable.make(f"t{i}", 1 + i % 9) for i in range(70)]
    cache = GpuCache(dict.fromkeys(tables, 500))
    parts = []
    for i, table in enumerate(tables):
        keys = np.arange(i % 7, 40 + i)
        held = keys[:: 1 + i % 3].copy()
        cache.insert(table, held, distinct_rows(table, held), versions_of(held))
        part = part_of(table, keys)
        part.missing = part.missing[i % 2 :: 1 + i % 2].copy()
        parts.append((part, part.missing, np.isin(keys, held)))
    cache.fetch([part for part, _, _ in parts], FetchContext())
    for part, requested, is_held in parts:
        np.testing.assert_array_equal(part.missing, requested[~is_held[requested]])
        found = requested[is_held[requested]]
        np.testing.assert_array_equal(
            part.out.get()[found], distinct_rows(part.table, part.keys[found])
        )
        others = np.setdiff1d(np.arange(len(part.keys)), found)
        assert (part.out.get()[others] == -1).all()


def test_tables_of_batch_take_one_launch_and_one_wait(monkeypatch):
    tables = [EmbeddingTable.make(f"t{i}", 8 + i % 3) for i in range(26)]
    cache, keys, launched, waited = GpuCache(dict.fromkeys(tables, 500)), np.arange(100), [], []
    for table in tables:
        cache.insert(
            table, keys[::2].copy(), distinct_rows(table, keys[::2]), versions_of(keys[::2])
        )
    parts = [part_of(table, keys) for table in tables]
    cupy().cuda.get_current_stream().synchronize()
    launch_it = loader.CudaKernel.launch
    monkeypatch.setattr(
        loader.CudaKernel, "launch", lambda *given: launched.append(given) or launch_it(*given)
    )

    class Stream(cupy().cuda.Stream):
        def synchronize(self):
            waited.append(self)
            super().synchronize()

    class Launch:
        """A `FetchLaunch` that counts."""

        def __init__(self, launch):
            self.launch = launch

        @classmethod
        def make(cls, *given):
            return cls(FetchLaunch.make(*given))

        def run_parts(self, *given):
            launched.append(given)
            self.launch.run_parts(*given)

        def wait(self):
            waited.append(self)
            return self.launch.wait()

    if COMPILED:
        FetchLaunch = fetch_module.FetchLaunch
        monkeypatch.setattr(fetch_module, "FetchLaunch", Launch)
    cache.fetch(parts, FetchContext(stream=Stream(non_blocking=True)))
    assert (len(launched), len(waited)) == (1, 1)
    for part in parts:
        np.testing.assert_array_equal(part.missing, keys[1::2])


def test_contains_row_numbers_and_export_agree():
    table = EmbeddingTable.make("t", 8)
    cache = GpuCache({table: 5000})
    keys = np.arange(-1000, 1000)
    cache.insert(table, keys, distinct_rows(table, keys), versions_of(keys))
    cache.delete(table, keys[:100].copy(), versions_of(keys[:100], 1))
    requested = np.arange(-1500, 1500)
    resident = np.isin(requested, keys[100:])
    np.testing.assert_array_equal(cache.contains(table, requested).get(), resident)
    numbers = cache.row_numbers(table, cupy().asarray(requested)).get()
    assert (numbers[~resident] == NO_ROW).all()
    assert len(np.unique(numbers[resident])) == resident.sum()
    exported, vectors, versions, scores = (array.get() for array in cache.export(table))
    np.testing.assert_array_equal(np.sort(exported), keys[100:])
    np.testing.assert_array_equal(vectors, distinct_rows(table, exported))
    assert (versions == NOW).all()
    assert scores.dtype == np.uint64
    assert (scores >= 1).all()
    assert cache.export(table, with_versions=False)[2] is None
    cache.clear(table)
    assert cache.size(table) == 0
    assert len(fetch(cache, table, keys).missing) == len(keys)
    cache.insert(table, keys, distinct_rows(table, keys), versions_of(keys))
    assert len(fetch(cache, table, keys).missing) == 0
    check(cache.held(table))


def test_export_can_omit_old_rows():
    table = EmbeddingTable.make("t", 4)
    cache = GpuCache({table: 1600})
    old, new = np.arange(300), np.arange(1000, 1300)
    for keys in (old, np.arange(5000, 5300), new):
        cache.insert(table, keys, distinct_rows(table, keys), versions_of(keys))
    held = cache.held(table)
    exported = cache.export(table, least=held.clock.ticks - 2 * held.clock.age)[0].get()
    assert np.isin(new, exported).all()
    assert not np.isin(old, exported).any()


def test_scores_are_compared_in_all_64_bits():
    table, rng = EmbeddingTable.make("t", 4), np.random.default_rng(1)
    cache = GpuCache({})
    cache.add_table(table, 20_000, policy=EvictionPolicy.SCORE)
    keys = rng.permutation(100_000)
    worth = (7 << 40) + rng.permutation(len(keys)).astype(np.uint64)
    for some in np.array_split(np.arange(len(keys)), 10):
        cache.insert(
            table, keys[some], distinct_rows(table, keys[some]), versions_of(some), worth[some]
        )
    held = cache.held(table)
    check(held)
    assert held.state.dropped > 30_000
    exported, vectors, _, scores = (array.get() for array in cache.export(table))
    order = np.argsort(keys)
    np.testing.assert_array_equal(scores, worth[order][exported])
    np.testing.assert_array_equal(vectors, distinct_rows(table, exported))
    best = np.isin(exported, keys[np.argsort(worth)[-20_000:]])
    assert best.mean() > 0.8  # not all: each has 16 slots to be in
    least = int(np.sort(scores)[-100])
    assert sorted(cache.export(table, least)[3].get().tolist()) == sorted(scores)[-100:]
    top, _ = cache.top_k(table, 100)
    assert top.tolist() == exported[np.argsort(scores)[::-1][:100]].tolist()
    changed = top[:50].copy()
    versions = versions_of(changed, 1)
    cache.update(table, changed, distinct_rows(table, changed, 1), versions)
    assert cache.top_k(table, 100)[0].tolist() == top.tolist()
    cache.update(
        table, changed, distinct_rows(table, changed, 2), versions, np.zeros(50, np.uint64)
    )
    assert cache.top_k(table, 50)[0].tolist() == top[50:].tolist()
    check(held)


def test_scores_are_accepted_only_by_score_policy():
    table, keys = EmbeddingTable.make("t", 4), np.arange(3)
    rows, versions = distinct_rows(table, keys), versions_of(keys)
    cache = GpuCache({table: 100})
    with pytest.raises(BadRequest, match="it evicts by LRU, so scores are rejected"):
        cache.insert(table, keys, rows, versions, np.ones(3, np.uint64))
    cache.add_table(table, 100, policy=EvictionPolicy.SCORE)
    with pytest.raises(BadRequest, match=r"scores must be \(3,\) uint64"):
        cache.insert(table, keys, rows, versions, np.ones(3, np.uint32))


def test_epoch_is_recovered_from_scores():
    table = EmbeddingTable.make("t", 4)
    for policy in (EvictionPolicy.EPOCH_LRU, EvictionPolicy.LFU):
        cache, keys = GpuCache({}), np.arange(2000)
        cache.add_table(table, 4000, policy=policy)
        cache.insert(table, keys, distinct_rows(table, keys), versions_of(keys))
        cache.held(table).clock.epoch = 3
        fetch(cache, table, keys[500:700])
        found, _, _, scores = (a.get() for a in cache.export(table, 3 << layout.COUNT_BITS))
        assert sorted(found.tolist()) == list(range(500, 700))
        assert (scores >> np.uint64(layout.COUNT_BITS) == 3).all()


@pytest.mark.parametrize("policy", [EvictionPolicy.LRU, EvictionPolicy.LFU], ids=lambda p: p.name)
def test_top_k_lists_hottest_keys_first(policy, monkeypatch):
    monkeypatch.setattr("hps.cuda.table._RANKED_AT_ONCE", 1 << 12)
    table, keys = EmbeddingTable.make("t", 4), np.arange(-8000, 8000)
    cache = GpuCache({})
    cache.add_table(table, 24_000, policy=policy)
    held = cache.held(table)
    cache.insert(table, keys, distinct_rows(table, keys), versions_of(keys))
    cache.delete(table, keys[:10].copy(), versions_of(keys[:10], 1))
    present = keys[cache.contains(table, keys).get()]
    for n, step in ((3000, held.clock.age or 1), (300, held.clock.age or 1)):
        held.clock.ticks += step
        fetch(cache, table, present[-n:])
    found, scores = cache.top_k(table, 5000)
    assert set(found[:300].tolist()) == set(present[-300:].tolist())
    assert set(found[300:3000].tolist()) == set(present[-3000:-300].tolist())
    assert scores[0] == 255
    assert (np.diff(scores.astype(int)) <= 0).all()
    assert scores[299] > scores[300] > scores[2999] - 1
    assert scores[2999] > scores[3000]
    everything, _ = cache.top_k(table, 1 << 30)
    assert sorted(everything.tolist()) == present.tolist()
    assert len(cache.top_k(EmbeddingTable.make("other", 4), 9)[0]) == 0


def test_find_or_insert_returns_resident_rows_and_inserts_others():
    table = EmbeddingTable.make("t", 8)
    cache = GpuCache({table: 5000})
    held, requested = np.arange(0, 1000, 2), np.arange(1000)
    cache.insert(table, held, distinct_rows(table, held, 1), versions_of(held))
    vectors = cupy().asarray(distinct_rows(table, requested, 2))
    found = cache.find_or_insert(table, requested, vectors, versions_of(requested))
    assert found == len(held)
    expected = np.where(
        requested[:, None] % 2 == 0,
        distinct_rows(table, requested, 1),
        distinct_rows(table, requested, 2),
    )
    np.testing.assert_array_equal(vectors.get(), expected)
    np.testing.assert_array_equal(fetch(cache, table, requested).out.get(), expected)
    check(cache.held(table))
    with pytest.raises(BadRequest, match="vectors must be on device 0"):
        cache.find_or_insert(
            table, requested, distinct_rows(table, requested), versions_of(requested)
        )


@pytest.mark.parametrize("unique", [False, True])
def test_find_or_insert_accepts_repeated_keys(unique):
    table, rng = EmbeddingTable.make("t", 8), np.random.default_rng(4)
    cache, held = GpuCache({table: 40_000}), np.arange(0, 10_000, 2)
    cache.insert(table, held, distinct_rows(table, held, 1), versions_of(held))
    requested = rng.permutation(10_000) if unique else rng.integers(0, 10_000, 50_000)
    versions = (NOW + rng.integers(0, 3, len(requested))).astype(np.uint64)
    given = distinct_rows(table, requested, np.arange(len(requested))[:, None])
    vectors = cupy().asarray(given)
    found = cache.find_or_insert(table, requested, vectors, versions, unique=unique)
    assert found == (requested % 2 == 0).sum()
    order = np.lexsort((np.arange(len(requested)), versions, requested))
    last = order[np.append(np.flatnonzero(np.diff(requested[order])), len(requested) - 1)]
    winner = np.zeros(10_000, np.int64)
    winner[requested[last]] = last
    expected = np.where(
        requested[:, None] % 2 == 0, distinct_rows(table, requested, 1), given[winner[requested]]
    )
    np.testing.assert_array_equal(vectors.get(), expected)
    np.testing.assert_array_equal(fetch(cache, table, requested).out.get(), expected)
    check(cache.held(table))


@pytest.mark.parametrize("window_shift", [15, 18, 29])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("dim", [3, 32])
def test_rows_in_pinned_host_memory_behave_like_device_rows(share, dim, window_shift, monkeypatch):
    monkeypatch.setattr(layout, "WINDOW_SHIFT", window_shift)
    monkeypatch.setattr(layout, "KEYS_A_WINDOW", 1)
    table = EmbeddingTable.make("t", dim)
    cache = GpuCache({})
    cache.add_table(table, 40_000, host_rows=int(40_000 * share))
    assert cache.held(table).shape.host_rows == int(40_000 * share)
    keys = np.arange(-6000, 6000)
    cache.insert(table, keys, distinct_rows(table, keys), versions_of(keys))
    cache.update(
        table, keys[::3].copy(), distinct_rows(table, keys[::3], 5), versions_of(keys[::3], 1)
    )
    cache.delete(table, keys[:100].copy(), versions_of(keys[:100], 2))
    part = fetch(cache, table, keys)
    assert len(part.missing) == 0
    expected = distinct_rows(table, keys)
    expected[::3] = distinct_rows(table, keys[::3], 5)
    np.testing.assert_array_equal(part.out.get()[100:], expected[100:])
    assert (part.source.get()[:100] == 0).all()
    resident, out, misses = cupy().asarray(keys), part.out, cupy().zeros(4 + len(keys), np.uint32)
    out.fill(0)
    cache.direct.fetch(cache.held(table), resident, out, misses)
    np.testing.assert_array_equal(out.get()[100:], expected[100:])
    assert sorted(misses.get()[4:104].tolist()) == list(range(100))
    assert int(misses[0]) == 100
    exported, vectors, _, _ = (array.get() for array in cache.export(table))
    order = np.argsort(exported)
    np.testing.assert_array_equal(vectors[order], expected[100:])
    check(cache.held(table))


def test_static_table_holds_exactly_its_rows():
    table = EmbeddingTable.make("t", 16)
    cache = GpuCache({})
    keys = np.random.default_rng(7).integers(-(2**63), 2**63 - 1, 300_000)
    cache.add_table(table, len(keys), static=True)
    for some in np.array_split(keys, 3):
        cache.insert(table, some, distinct_rows(table, some), versions_of(some))
    assert cache.seal(table) == 0
    slots = slots_of(cache.held(table)).copy()
    requested = np.concatenate([keys, keys + 1])
    part = fetch(cache, table, requested)
    np.testing.assert_array_equal(part.missing, np.flatnonzero(~np.isin(requested, keys)))
    np.testing.assert_array_equal(part.out.get()[: len(keys)], distinct_rows(table, keys))
    np.testing.assert_array_equal(slots_of(cache.held(table)), slots)  # no trace of the uses
    assert cache.size(table) == len(keys)
    for change in (
        lambda: cache.insert(
            table, keys[:1], distinct_rows(table, keys[:1]), versions_of(keys[:1])
        ),
        lambda: cache.evict(table, keys[:1]),
        lambda: cache.clear(table),
    ):
        with pytest.raises(BadRequest, match="static"):
            change()


@pytest.mark.parametrize("count", [300, 20_000, 1_000_000, 10_000_000])
def test_roomy_table_holds_every_row(count):
    """As many rows as its capacity, inserted in small and large batches, some of them twice."""
    table = EmbeddingTable.make("t", 8)
    cache, cp = GpuCache({}), cupy()
    cache.add_table(table, count, load=ROOMY_LOAD)
    keys = cp.random.permutation(count).astype(np.int64) * 1_000_003
    for some in (keys[:200], keys[100 : count // 2], keys[count // 3 :]):
        rows = cp.repeat((some % 1021).astype(np.float32)[:, None], 8, axis=1)
        cache.insert(table, some, rows, cp.full(len(some), NOW, np.uint64))
    held = cache.held(table)
    assert (held.state.evicted, held.state.dropped, cache.size(table)) == (0, 0, count)
    assert cache.contains(table, keys).all()
    if count <= 1_000_000:
        check(held)
        part = fetch(cache, table, keys.get())
        expected = (part.keys % 1021).astype(np.float32)
        np.testing.assert_array_equal(part.out.get(), np.repeat(expected[:, None], 8, axis=1))


def test_update_of_a_roomy_table_takes_all_spare_rows(monkeypatch):
    """An insert takes fewer keys at a time, so that each sees the slots that others chose."""
    table, count = EmbeddingTable.make("t", 8), 100_000
    cache, keys = GpuCache({}), np.arange(count)
    cache.add_table(table, count, load=ROOMY_LOAD)
    held, steps, hold_back = cache.held(table), [], ReaderEvents.hold_back

    def record(self, stream):
        steps.append(held.shape.rows - held.state.filled)
        hold_back(self, stream)

    monkeypatch.setattr(ReaderEvents, "hold_back", record)
    cache.insert(table, keys, distinct_rows(table, keys), versions_of(keys))
    assert len(steps) == -(-count // held.shape.batch)
    steps.clear()
    cache.update(table, keys, distinct_rows(table, keys, 1), versions_of(keys, 1))
    assert len(steps) == -(-count // (2 * held.shape.batch))
    np.testing.assert_array_equal(
        fetch(cache, table, keys).out.get(), distinct_rows(table, keys, 1)
    )
    check(held)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_roomy_table_keeps_its_capacity_under_churn(policy):
    """Inserts beyond the capacity, evictions, deletions and a clear; each row keeps one owner."""
    table, count = EmbeddingTable.make("t", 8), 20_000
    cache, rng = GpuCache({}), np.random.default_rng(9)
    cache.add_table(table, count, policy=policy, load=ROOMY_LOAD)
    held = cache.held(table)
    for turn in range(8):
        keys = rng.integers(0, 3 * count, count // 2)
        cache.insert(table, keys, distinct_rows(table, keys, turn), versions_of(keys, turn))
        check(held)
        if turn == 5:
            assert count <= sum(held.count(cache.space.take_stream())) <= count + held.shape.batch
            assert held.state.evicted > 0
        gone = rng.integers(0, 3 * count, 3000)
        cache.delete(table, gone[:1000], versions_of(gone[:1000], turn))
        cache.evict(table, gone[1000:])
        check(held)
        assert cache.contains(table, gone).sum() == 0
        keys = np.setdiff1d(keys, gone)
        part = fetch(cache, table, keys)
        found = np.setdiff1d(np.arange(len(keys)), part.missing)
        np.testing.assert_array_equal(
            part.out.get()[found], distinct_rows(table, keys[found], turn)
        )
        assert len(found) > 0.5 * len(keys)
    cache.clear(table)
    check(held)
    assert (cache.size(table), held.state.filled) == (0, 0)


@pytest.mark.parametrize("load", [1.0, ROOMY_LOAD])
def test_expired_rows_are_evicted(monkeypatch, load):
    monkeypatch.setattr(table_module, "_RANKED_AT_ONCE", 512)
    table, keys = EmbeddingTable.make("t", 8), np.arange(5000)
    cache = GpuCache({})
    cache.add_table(table, len(keys), load=load)
    versions = versions_of(keys) + (keys % 3).astype(np.uint64)
    cache.insert(table, keys, distinct_rows(table, keys), versions)
    cache.delete(table, keys[:10], versions_of(keys[:10], 5))
    held = cache.held(table)
    before, tombstones = held.count(cache.space.take_stream())
    evicted = cache.expire(table, NOW + 2)
    assert before * 0.6 < evicted < before * 0.7
    check(held)
    assert held.count(cache.space.take_stream()) == (before - evicted, tombstones)
    found = np.flatnonzero(fetch(cache, table, keys).source.get())
    assert len(found) == before - evicted
    assert (keys[found] % 3 == 2).all()
    assert cache.expire(table, NOW + 2) == 0
    cache.insert(table, keys, distinct_rows(table, keys, 1), versions_of(keys, 6))
    check(held)
    assert cache.expire(EmbeddingTable.make("absent", 8), NOW) == 0


def test_closed_cache_gives_its_memory_back_while_it_lives():
    table, cp = EmbeddingTable.make("t", 32), cupy()
    GpuCache({table: 1000}).close()
    memory.release_unused([0])
    pool, before = cp.get_default_memory_pool(), cp.cuda.runtime.memGetInfo()[0]
    used = pool.used_bytes()
    cache = GpuCache({table: 1_000_000})
    keys = np.arange(1000)
    cache.insert(table, keys, distinct_rows(table, keys), versions_of(keys))
    prepared = cache.prepare_vectors([(table, 100)], [0], [False])
    assert cp.cuda.runtime.memGetInfo()[0] < before - (1 << 27)
    cache.close()
    del prepared
    memory.release_unused([0])
    assert pool.used_bytes() <= used
    assert cp.cuda.runtime.memGetInfo()[0] >= before - (2 << 20)
    assert len(fetch(cache, table, keys).missing) == len(keys)
    with pytest.raises(Unavailable, match="closed"):
        cache.pool_rows([], cp.cuda.get_current_stream())
    cache.close()


def test_static_table_too_large_is_rejected_with_both_sizes():
    table = EmbeddingTable.make("t", 1024)
    with pytest.raises(
        ConfigError, match=r"needs [\d,]+ bytes for 100,000,000 rows.* [\d,]+ are free"
    ):
        GpuCache({}).add_table(table, 100_000_000, static=True)


def test_cache_larger_than_device_is_rejected_with_fitting_size():
    table = EmbeddingTable.make("t", 1024)
    with pytest.raises(ConfigError, match=r"needs [\d,]+ bytes .* at most [\d,]+ rows fit"):
        GpuCache({table: 200_000_000})


def test_other_dtype_is_rejected():
    with pytest.raises(ConfigError, match="float32 and float16"):
        GpuCache({EmbeddingTable.make("t", 4, dtype=np.float64): 100})


def test_torch_tensors_are_read_and_filled_in_place():
    torch = pytest.importorskip("torch")
    table, keys = EmbeddingTable.make("t", 8), np.arange(1000)
    cache, rows = GpuCache({table: 4000}), distinct_rows(table, keys)

    def on_device(array):
        return torch.from_numpy(array).cuda()

    cache.insert(table, on_device(keys), on_device(rows), versions_of(keys))
    cache.update(table, torch.from_numpy(keys), torch.from_numpy(rows + 1), versions_of(keys, 1))
    assert cache.contains(table, on_device(keys)).all()
    for requested in (on_device(keys), torch.from_numpy(keys)):
        out = torch.zeros(1000, 8, device="cuda")
        part = part_of(table, keys)
        part.keys, part.out = requested, out
        cache.fetch([part], FetchContext())
        assert len(part.missing) == 0
        np.testing.assert_array_equal(out.cpu().numpy(), rows + 1)
    pooled = torch.zeros(100, 8, device="cuda")
    bags = JaggedKeys(on_device(keys), 100, on_device(np.arange(0, 1001, 10)))
    assert cache.pool([DevicePooling(table, bags, "sum", pooled)])
    np.testing.assert_array_equal(pooled.cpu(), (rows + 1).reshape(100, 10, 8).sum(axis=1))
    cache.evict(table, on_device(keys))
    assert cache.size(table) == 0


@pytest.mark.parametrize("name", ["out", "versions", "source"])
def test_outputs_on_host_are_rejected(name):
    table = EmbeddingTable.make("t", 4)
    cache = GpuCache({table: 100})
    part = part_of(table, np.arange(3))
    setattr(part, name, getattr(part, name).get())
    with pytest.raises(BadRequest, match=f"{name} must be on device"):
        cache.fetch([part], FetchContext())


def test_fetch_waits_for_workspace_until_deadline():
    table = EmbeddingTable.make("t", 4)
    cache = GpuCache({table: 100}, workspaces=0)
    with pytest.raises(TierTimeout):
        cache.fetch([part_of(table, np.arange(3))], FetchContext(time.monotonic() + 0.05))


# -- readers beside the writer ---------------------------------------------------------------------

KEYS, CAPACITY, BATCH, DIM = 120_000, 60_000, 400_000, 32


def marked_rows(xp, keys, sequence, dim=DIM):
    """(n, dim) uint32 rows that carry their key, their sequence and a checksum of both everywhere else."""
    rows = xp.empty((len(keys), dim), np.uint32)
    rows[:, 0], rows[:, 1] = keys, sequence
    check = (keys.astype(np.uint32) * np.uint32(2654435761)) ^ (rows[:, 1] * np.uint32(40503))
    rows[:, 2:] = check[:, None] + xp.arange(2, dim, dtype=np.uint32)
    return rows


def read(cache, table, key_count, started, stop, wrong, found, seed, defines):
    """Fetch again and again on a stream of this thread; count rows that are not of one piece."""
    cp = cupy()
    rng = np.random.default_rng(seed)
    with cp.cuda.Stream(non_blocking=True) as stream:
        keys = cp.asarray(rng.integers(0, key_count, BATCH))
        out = cp.empty((BATCH, DIM), np.float32)
        misses = cp.empty(4 + BATCH, np.uint32)
        total, bad = cp.zeros((), np.int64), cp.zeros((), np.int64)
        while not stop.is_set():
            out.view(np.uint32).fill(0xFFFFFFFF)
            misses[:4] = 0
            cache.direct.fetch(cache.held(table), keys, out, misses, FetchVariant(defines=defines))
            rows = out.view(np.uint32)
            untouched = (rows == np.uint32(0xFFFFFFFF)).all(axis=1)
            right = (rows == marked_rows(cp, keys, rows[:, 1])).all(axis=1)
            bad += (~untouched & ~right).sum()
            bad += abs(untouched.sum() - misses[0].astype(np.int64))
            total += (~untouched).sum()
            stream.synchronize()
            started.release()
        wrong.append(int(bad))
        found.append(int(total))


def read_versions(cache, table, key_count, started, stop, wrong, found, seed, _defines):
    """As `read`, as a tier: rows that are not of one piece with the version that came with them count too."""
    cp = cupy()
    rng = np.random.default_rng(seed)
    with cp.cuda.Stream(non_blocking=True) as stream:
        keys = cp.asarray(rng.integers(0, key_count, BATCH))
        part, everything = part_of(table, keys), np.arange(BATCH)
        rows = part.out.view(np.uint32)
        total, bad = cp.zeros((), np.int64), cp.zeros((), np.int64)
        while not stop.is_set():
            rows.fill(0xFFFFFFFF)
            part.versions.fill(0), part.source.fill(0)
            part.missing = everything
            cache.fetch([part], FetchContext(stream=stream))
            is_row, untouched = part.source != 0, (rows == np.uint32(0xFFFFFFFF)).all(axis=1)
            right = (rows == marked_rows(cp, keys, rows[:, 1], table.dim)).all(axis=1)
            right &= part.versions == rows[:, 1].astype(np.uint64) + np.uint64(NOW)
            bad += cp.where(is_row, ~right, ~untouched).sum()
            bad += (~is_row & (part.versions != 0) & (part.versions <= np.uint64(NOW))).sum()
            bad += abs((part.versions == 0).sum() - len(part.missing))
            total += is_row.sum()
            stream.synchronize()
            started.release()
        wrong.append(int(bad))
        found.append(int(total))


def write(cache, table, key_count, until):
    """Inserts that drop rows, updates, deletions, evictions of random keys."""
    cp = cupy()
    rng = np.random.default_rng(9)
    sequence = 0
    with cp.cuda.Stream(non_blocking=True):
        while time.monotonic() < until:
            sequence += 1
            keys = cp.asarray(rng.integers(0, key_count, min(6000, key_count // 20)))
            versions = cp.full(len(keys), NOW + sequence, np.uint64)
            rows = marked_rows(cp, keys, sequence, table.dim).view(np.float32)
            cache.insert(table, keys, rows, versions)
            cache.update(table, keys[::-1].copy(), rows[::-1].copy(), versions)
            some = len(keys) // 20
            cache.delete(table, keys[:some].copy(), versions[:some])
            cache.evict(table, keys[some : 2 * some].copy())
    return sequence


def race(cache, table, seconds, defines=(), read=read, key_count=KEYS):
    """Observations of three readers of so many keys: rounds of the writer, wrong rows, rows found."""
    started = threading.Semaphore(0)
    stop, wrong, found = threading.Event(), [], []
    readers = [
        threading.Thread(
            target=read, args=(cache, table, key_count, started, stop, wrong, found, seed, defines)
        )
        for seed in range(3)
    ]
    for reader in readers:
        reader.start()
    for _ in range(3 * len(readers)):  # compiled and running
        assert started.acquire(timeout=60)
    rounds = write(cache, table, key_count, time.monotonic() + seconds)
    stop.set()
    for reader in readers:
        reader.join()
    assert len(wrong) == len(readers)
    return rounds, sum(wrong), sum(found)


SLOW = ("HPS_SLOW_READS=500000",)


@pytest.mark.parametrize("defines", [(), SLOW], ids=["as shipped", "slow reads"])
@pytest.mark.parametrize("kind", ["packed", "roomy", "windows"])
def test_concurrent_readers_see_whole_rows_of_their_keys(kind, defines, monkeypatch):
    table, windows = EmbeddingTable.make("t", DIM), kind == "windows"
    cache = GpuCache({})
    if windows:
        monkeypatch.setattr(layout, "WINDOW_SHIFT", 21)
    load = ROOMY_LOAD if kind == "roomy" else 1.0
    cache.add_table(table, CAPACITY, host_rows=CAPACITY if windows else 0, load=load)
    if windows:
        assert launch.windows_of(cache.held(table).shape.host_bytes, BATCH) == 4
    rounds, wrong, found = race(cache, table, 6.0, defines)
    assert wrong == 0
    assert rounds > 100
    assert found > 10 * KEYS
    assert cache.held(table).state.evicted > CAPACITY
    check(cache.held(table))


@pytest.mark.parametrize("defines", [(), SLOW], ids=["as shipped", "slow reads"])
def test_concurrent_readers_see_versions_of_their_rows(defines, monkeypatch):
    """In a table whose versions a multiprocessor could keep in its first-level cache."""
    slow = partial(fetch_module.FetchKernels, defines=defines)
    monkeypatch.setattr(fetch_module, "FetchKernels", slow)
    table = EmbeddingTable.make("t", 8)
    cache = GpuCache({table: 2048})
    rounds, wrong, found = race(cache, table, 6.0, read=read_versions, key_count=4096)
    assert wrong == 0
    assert rounds > 100
    assert found > 10 * KEYS
    check(cache.held(table))


def test_writer_that_does_not_wait_is_detected(monkeypatch):
    """The test above can fail: without the waiting, slow readers see rows that aren't theirs."""

    monkeypatch.setattr("hps.cuda.reader_events.ReaderEvents.hold_back", lambda *_: None)
    table = EmbeddingTable.make("t", DIM)
    races = (race(GpuCache({table: CAPACITY}), table, 4.0, SLOW) for _ in range(4))
    assert any(wrong for _, wrong, _ in races)  # a busy device may hide it once
