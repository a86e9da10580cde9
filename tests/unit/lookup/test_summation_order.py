"""A pooled vector has the same bits whichever path made it: rows are added in the order of the keys."""

from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hps.lookup import engine as engine_module
from hps.lookup.base import Feature, LookupModel
from hps.lookup.batched_lookup import BatchedLookup
from hps.lookup.batching import BatchLimits
from hps.lookup.engine import LookupEngine
from hps.lookup.lookup_merge import MergedLookup
from hps.lookup.pooling import divisors, is_pooled
from hps.native import COMPILED, pool_rows, twin_pool
from hps.row_format import ROW_FORMAT_NAMES
from hps.threads import BoundedThreadPool
from hps.tiers.base import TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.stored_rows import to_rows, to_vectors
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, Source
from tests.support.memory_tier import MemoryTier

ROWS = 200
OTHER = EmbeddingTable.make("other", 4)
STORE = TierInfo("store", Source.ROCKSDB)
DIMS = [1, 2, 3, 8, 16, 32, 33, 64, 128]
HALF = np.float16
KINDS = [(np.float32, None), (HALF, None), (HALF, "float32"), (np.float32, "float16")]
KINDS += [(dtype, rows) for rows in ROW_FORMAT_NAMES[2:] for dtype in (np.float32, HALF)]
"""Dtypes of vectors and formats of rows."""


def vectors_of(dim, dtype):
    """Vectors whose sums depend on the order; some are zeros of either sign."""
    random = np.random.default_rng(dim)
    rows = random.normal(0, 1, (ROWS, dim)) * 10.0 ** random.integers(-3, 2, (ROWS, 1))
    rows[0], rows[1] = 0.0, -0.0
    return rows.astype(dtype)


class World:
    """One feature to be pooled, and one of another table; all rows are in the store, and in the cache those
    that are put there."""

    def __init__(self, dim, kind, pooling):
        dtype, rows = kind
        self.table = EmbeddingTable.make("pooled", dim, dtype=dtype, rows=rows)
        self.rows = to_rows(self.table, vectors_of(dim, dtype))
        self.vectors = to_vectors(self.table, self.rows, dtype=np.float32)
        features = {
            "pooled": Feature("pooled", self.table, pooling=pooling),
            "neighbour": Feature("neighbour", self.table, pooling=pooling),
            "other": Feature("other", OTHER, pooling="none"),
        }
        tables = {"pooled": self.table, "other": OTHER}
        self.model = LookupModel("m", 1, tables, features)
        self.cache = CpuCache({self.table: 2 * ROWS, OTHER: 2 * ROWS})
        store = MemoryTier(STORE)
        self.put(store, np.arange(ROWS))
        self.workers = BoundedThreadPool(1, 100, name="test")
        self.engine = LookupEngine(
            self.model, TierChain([self.cache]), TierChain([store]), self.workers
        )

    def put(self, tier, keys):
        ones = np.ones(len(keys), np.uint64)
        tier.insert(self.table, keys, self.rows[keys], ones)
        tier.insert(OTHER, keys, np.ones((len(keys), 4), np.float32), ones)

    def only(self, keys):
        """Have the cache hold the rows of ``keys`` alone."""
        for table in (self.table, OTHER):
            self.cache.evict(table, np.arange(ROWS))
        self.put(self.cache, keys)


@cache
def world(dim, kind, pooling):
    return World(dim, kind, pooling)


@st.composite
def cases(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch = draw(st.integers(1, 6))
    # Long bags, where pairs of sums, or several sums side by side, would come out otherwise.
    most = draw(st.sampled_from([1, 2, 9, 40, 200]))
    if draw(st.booleans()):
        offsets = np.concatenate([[0], np.cumsum(random.integers(0, most + 1, batch))])
        n = int(offsets[-1])
    else:
        offsets, n = None, batch * most
    weights = None
    if draw(st.booleans()):
        weights = random.normal(0, 1, n).astype(np.float32)
    keys = random.integers(0, draw(st.sampled_from([2, 20, ROWS])), n)
    pooling = draw(st.sampled_from(["sum", "mean", "sqrtn"]))
    dim, kind = draw(st.sampled_from(DIMS)), draw(st.sampled_from(KINDS))
    return world(dim, kind, pooling), JaggedKeys(keys, batch, offsets, weights)


def by_definition(world, keys, pooling):
    """One row after the other, in float32."""
    rows = world.vectors
    summed = np.zeros((keys.batch, rows.shape[1]), np.float32)
    ends = np.arange(keys.batch + 1) * (keys.hotness or 0) if keys.offsets is None else keys.offsets
    for bag in range(keys.batch):
        total, by = None, np.float32(0)
        for i in range(ends[bag], ends[bag + 1]):
            row, weight = rows[keys.keys[i]], np.float32(1)
            if keys.weights is not None:
                weight = keys.weights[i]
                row = row * weight
            total = row if total is None else total + row
            by += weight * weight if pooling == "sqrtn" else weight
        if pooling == "sqrtn":
            by = np.sqrt(by)
        if total is not None:
            summed[bag] = total if pooling == "sum" else total / by if by else 0
    with np.errstate(over="ignore"):  # weights that almost cancel make a mean too large for float16
        return summed.astype(world.table.dtype)


def answers(world, keys):
    """Results of every path through the engine for ``keys``, by its name."""
    distinct = np.unique(keys.keys)
    other = JaggedKeys(np.arange(1, keys.batch + 1), keys.batch)

    def ask(engine=world.engine, **options):
        features = {"pooled": keys, "other": other}
        return engine.lookup(LookupRequest(features, **options)).vectors["pooled"]

    world.only(np.arange(ROWS))
    yield "in memory", ask()
    yield "with sources", ask(want_source=True)
    out = np.empty((keys.batch, world.table.dim), world.table.dtype)
    yield "in the caller's array", ask(out={"pooled": out})
    neighbour = {"neighbour": keys, "pooled": keys}
    result = world.engine.lookup(LookupRequest(neighbour, want_source=True)).vectors
    yield "with another feature of the table", result["pooled"]
    half = JaggedKeys(keys.keys[:0], 0, None if keys.offsets is None else keys.offsets[:1])
    if keys.weights is not None:
        half = JaggedKeys(half.keys, 0, half.offsets, keys.weights[:0])
    requests = [LookupRequest({"pooled": each}) for each in (keys, half, keys)]
    merged = MergedLookup(requests, world.model.features, want_source=False)
    yield "in a batch", merged.split(world.engine.lookup(merged.request))[2].vectors["pooled"]
    yield "batched", ask(BatchedLookup(world.engine, BatchLimits(100, 1000)))
    world.only(np.setdiff1d(np.arange(ROWS), [1]))
    yield "with another feature that misses a row", ask()
    world.only(np.setdiff1d(np.arange(ROWS), distinct[:1]))
    yield "with a missing row", ask()
    world.only(np.array([], np.int64))
    yield "from the store", ask()


@settings(deadline=None, max_examples=150)
@given(cases())
@example((world(1, KINDS[0], "mean"), JaggedKeys(np.arange(ROWS), 1)))
@example((world(32, KINDS[0], "sqrtn"), JaggedKeys(np.arange(ROWS), 1)))
@example((world(32, KINDS[1], "sum"), JaggedKeys(np.ones(3, np.int64), 1)))  # of -0
@example((world(32, KINDS[0], "sum"), JaggedKeys(np.ones(3, np.int64), 1)))
def test_every_path_gives_the_bits_of_the_definition(case):
    world, keys = case
    feature = world.model.features["pooled"]
    if not is_pooled(feature.pooling, keys):
        return
    expected = by_definition(world, keys, feature.pooling)
    for path, vectors in answers(world, keys):
        assert vectors.tobytes() == expected.tobytes(), path


def test_large_request_gives_the_same_bits(monkeypatch):
    there = world(32, KINDS[0], "sum")
    there.only(np.arange(ROWS))
    random = np.random.default_rng(1)
    keys = JaggedKeys(random.integers(0, ROWS, 12_000), 1_000)
    request = LookupRequest({"pooled": keys})
    inline = there.engine.lookup(request).vectors["pooled"]
    monkeypatch.setattr(engine_module, "INLINE_KEYS", 100)
    for options in ({}, {"want_source": True}):
        on_a_thread = there.engine.lookup(LookupRequest(request.features, **options))
        assert on_a_thread.vectors["pooled"].tobytes() == inline.tobytes()


KERNELS = [twin_pool.pool_rows]
if COMPILED:
    from hps.native import _core

    KERNELS += [
        lambda *args, name=name, **options: pool_rows(*args, kernels=name, **options)
        for name in _core.cache_kernels()
    ]


@settings(deadline=None, max_examples=100)
@given(cases())
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_gives_the_bits_of_the_definition(kernel, case):
    world, keys = case
    pooling = world.model.features["pooled"].pooling
    out = np.empty((keys.batch, world.table.dim), world.table.dtype)
    by = divisors(keys, pooling)
    code = world.table.row_format.code
    kernel(world.rows, keys.keys, keys.offsets, keys.weights, by, out, format=code)
    assert out.tobytes() == by_definition(world, keys, pooling).tobytes()
    kernel(world.rows[keys.keys], None, keys.offsets, keys.weights, by, out, format=code)
    assert out.tobytes() == by_definition(world, keys, pooling).tobytes()


@pytest.mark.skipif(not COMPILED, reason="the twin trusts its arrays")
@pytest.mark.parametrize(
    "wrong",
    [
        {"numbers": np.array([0, 3])},
        {"numbers": np.array([0, -1])},
        {"numbers": np.array([0, 1], np.int32)},
        {"offsets": np.array([0, 3])},
        {"offsets": np.array([0, 3, 1])},
        {"weights": np.ones(3, np.float32)},
        {"divisors": np.ones(3, np.float32)},
        {"out": np.empty((2, 5), np.float32)},
        {"out": np.empty((2, 4))},
        {"rows": np.ones((3, 4)), "out": np.empty((2, 4))},
        {"kernels": "none"},
        {"format": 6},
        {"format": 4},  # int8 rows would be wider
    ],
)
def test_pool_kernels_reject_mismatched_arrays(wrong):
    right = {
        "rows": np.ones((3, 4), np.float32),
        "numbers": np.array([0, 1]),
        "offsets": None,
        "weights": None,
        "divisors": None,
        "out": np.empty((2, 4), np.float32),
    }
    with pytest.raises((TypeError, ValueError)):
        pool_rows(**right | wrong)
