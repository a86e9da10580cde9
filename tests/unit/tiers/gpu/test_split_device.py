"""A table split over GPUs, on devices: partition, fetches against the twin, a race with a writer.

Two arrays on one device do the same as on two, where the connection alone differs; with two devices, both
are tested."""

import threading
import time

import numpy as np
import pytest

from hps.cuda.layout import EMPTY, NO_ROW, ROOMY_LOAD, TOMBSTONE
from hps.cuda.loader import cupy, device_count, missing_requirement
from hps.cuda.owners import owner_of, partition, rows_per_owner
from hps.cuda.split_fetch import _Division
from hps.cuda.twin import TwinTable
from hps.cuda.twin_split import TwinSplit
from hps.tiers.base import FetchContext, Part
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.split import GpuSplit
from hps.types import EmbeddingTable, Source, make_version
from tests.support.rows import distinct_rows

pytestmark = pytest.mark.gpu
NOW = make_version(time.time_ns() // 1_000_000)
PLACES = [(0, 0), (0, 0, 0)]
if missing_requirement() is None and device_count() > 1:
    PLACES.append((0, 1))
CAPACITY = 4000


def split_of(table, places, rows=CAPACITY, **options):
    caches = [GpuCache({}, device=device) for device in places]
    for cache in caches:
        cache.add_table(table, rows, **{"load": ROOMY_LOAD, **options})
    return GpuSplit(caches)


def twin_of(split, table):
    shape = split.caches[0].held(table).shape
    return TwinSplit([TwinTable(shape, table.row_width, table.row_dtype) for _ in split.caches])


def versions_of(keys, sequence=0):
    return np.full(len(keys), NOW + sequence, np.uint64)


@pytest.mark.parametrize("owners", [1, 2, 3, 16])
@pytest.mark.parametrize("n", [1, 31, 256, 5000, 300_000])
def test_partition_matches_twin(owners, n):
    cp, rng = cupy(), np.random.default_rng(n)
    keys = rng.integers(-(2**63), 2**63, n)
    on_device = cp.asarray(keys)
    whole = _Division(on_device, owners, None, NO_ROW, grouped=True)
    check_division(whole, keys, partition(keys, owners), grouped=True)
    misses = np.zeros(4 + n, np.uint32)
    some = np.sort(rng.permutation(n)[: n // 3])
    misses[0], misses[4 : 4 + len(some)] = len(some), some
    part = _Division(on_device, owners, cp.asarray(misses), owners - 1, grouped=False)
    expected = partition(keys[some], owners, left_out=owners - 1)
    check_division(part, keys, [some[each] for each in expected], grouped=False)


def check_division(division, keys, expected, *, grouped):
    assert division.counts == [len(each) for each in expected]
    for owner, positions in enumerate(expected):
        found = division.lists[owner, : len(positions)].get()
        np.testing.assert_array_equal(np.sort(found), positions)
        if grouped:
            there = division.grouped[owner, : len(positions)].get()
            np.testing.assert_array_equal(there, keys[found])


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize(("dim", "rows"), [(3, "float32"), (32, "float32"), (64, "int8")])
def test_fetches_match_twin_under_random_changes(places, dim, rows):
    table = EmbeddingTable.make("t", dim, rows=rows)
    split, rng = split_of(table, places), np.random.default_rng(dim)
    twin, copied = twin_of(split, table), False
    for step in range(60):
        keys = rng.permutation(np.arange(-300, 300))[: rng.integers(1, 200)]
        vectors = stored(table, keys, step)
        versions = (NOW + rng.integers(0, step + 2, len(keys))).astype(np.uint64)
        verb = rng.choice(["insert", "insert", "update", "delete", "copy"])
        if verb == "copy":
            split.copy_hottest(table, CAPACITY)
            twin.copy_rows(np.arange(-300, 300))
            copied = True
        elif verb == "delete":
            split.delete(table, keys, versions)
            twin.delete(keys, versions)
        else:
            getattr(split, verb)(table, keys, vectors, versions)
            getattr(twin, verb)(keys, vectors, versions)
        for home in range(len(places)):
            check_fetches(split, twin, table, home, rng.permutation(np.arange(-350, 350)))
    assert copied


def stored(table, keys, salt):
    """(n, row_width) of the table's type, different for each key and ``salt``."""
    rows = (keys[:, None] * 7 + np.arange(table.row_width) + salt) % 251
    return rows.astype(table.row_dtype)


def check_fetches(split, twin, table, home, keys):
    """All ways to fetch ``keys`` give what the twin has."""
    cp, n = cupy(), len(keys)
    expected, words, versions = twin.fetch(home, keys)
    resident = words < TOMBSTONE
    cache = split.caches[home]
    with cache.space.device:
        out = cp.full((n, table.row_width), 77, table.row_dtype)
        source = cp.full(n, 9, np.uint8)
        on_device = cp.asarray(keys)
        split.fetch_rows(home, table, on_device, out, source)
        stream = cp.cuda.get_current_stream()
        np.testing.assert_array_equal(source.get(stream=stream), resident * int(Source.GPU))
        found = out.get(stream=stream)
    np.testing.assert_array_equal(found[resident], expected[resident])
    assert (found[~resident] == 77).all()

    seen = 0
    for mine in split.fetch_apart(home, table, on_device):
        with cache.space.device:
            positions = mine.positions.get()
        with cp.cuda.Device(mine.device):
            rows, codes = mine.rows.get(), mine.source.get()
        there = codes != 0
        np.testing.assert_array_equal(there, resident[positions])
        np.testing.assert_array_equal(rows[there], expected[positions][there])
        seen += len(positions)
    assert seen == n

    part = Part.make(table, keys)
    split.fetch([part], FetchContext())
    np.testing.assert_array_equal(part.missing, np.flatnonzero(words == EMPTY))
    np.testing.assert_array_equal(part.source, resident * int(Source.GPU))
    np.testing.assert_array_equal(part.versions, versions)
    np.testing.assert_array_equal(part.out[resident], expected[resident])


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_each_device_has_its_share_of_a_static_table(places):
    table, keys = EmbeddingTable.make("t", 16), np.arange(20_000)
    rows = rows_per_owner(len(keys), len(places))
    split = split_of(table, places, rows, static=True)
    split.insert(table, keys, distinct_rows(table, keys), versions_of(keys))
    assert split.seal(table) == 0
    shares = np.bincount(owner_of(keys, len(places)))
    assert [cache.size(table) for cache in split.caches] == shares.tolist()
    cp = cupy()
    for home, cache in enumerate(split.caches):
        with cache.space.device:
            out, source = cp.empty((len(keys), 16), np.float32), cp.empty(len(keys), np.uint8)
            split.fetch_rows(home, table, cp.asarray(keys), out, source)
            assert (source.get() == int(Source.GPU)).all()
            np.testing.assert_array_equal(out.get(), distinct_rows(table, keys))


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_readers_see_rows_of_their_keys_while_rows_are_replaced(places):
    """Rows are their key in every place; a cache of 1,000 rows evicts most of what is written."""
    table, cp = EmbeddingTable.make("t", 32), cupy()
    split = split_of(table, places, 1000, load=1.0)
    stop, failures, counts = threading.Event(), [], []

    def rows_of(keys, salt):
        return np.repeat((keys + 10_000 * salt).astype(np.float32)[:, None], 32, axis=1)

    def read(home, seed):
        rng, found = np.random.default_rng(seed), 0
        try:
            with split.caches[home].space.device, cp.cuda.Stream(non_blocking=True):
                out, source = cp.empty((2000, 32), np.float32), cp.empty(2000, np.uint8)
                while not stop.is_set():
                    keys = rng.integers(0, 5000, 2000)
                    split.fetch_rows(home, table, cp.asarray(keys), out, source)
                    there, rows = source.get() != 0, out.get()
                    if not (rows == rows[:, :1]).all(axis=1)[there].all():
                        failures.append("torn")
                    if not (rows[:, 0] % 10_000 == keys)[there].all():
                        failures.append("another key's")
                    found += int(there.sum())
        except Exception as error:
            failures.append(error)
        counts.append(found)

    homes = range(len(places))
    readers = [threading.Thread(target=read, args=(home, home)) for home in homes]
    for reader in readers:
        reader.start()
    rng, end, step = np.random.default_rng(9), time.monotonic() + 4, 0
    while time.monotonic() < end:
        keys, step = rng.permutation(5000)[:400], step + 1
        rows, versions = rows_of(keys, step % 50), versions_of(keys, step)
        split.insert(table, keys, rows, versions)
        split.delete(table, keys[:20], versions[:20] + np.uint64(1))
        if step % 10 == 0:
            split.copy_hottest(table, 100)
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert len(counts) == len(places)
    assert min(counts) > 10_000
    assert step > 50
