"""Rows scaled down to a feature's ``max_norm`` before pooling: the definition, and every path to it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.lookup.base import Feature, LookupModel
from hps.lookup.engine import LookupEngine
from hps.lookup.max_norm import scale_to_norm
from hps.lookup.pooling import pool
from hps.threads import BoundedThreadPool
from hps.tiers.base import TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.stored_rows import to_rows, to_vectors
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, Source
from tests.support.memory_tier import MemoryTier

ROWS, MAX = 40, 1.3
KEYS = np.array([0, 1, 7, 7, ROWS + 5, 3])
WEIGHTS = np.array([1, -2, 0.5, 3, 1, 2], np.float32)
BAGS = JaggedKeys(KEYS, 6, np.array([0, 2, 2, 6, 6, 6, 6]), WEIGHTS)


def by_definition(row, max_norm):
    """One operation after the other, in float32."""
    squares = np.float32(0)
    for value in row.astype(np.float32):
        squares = squares + value * value
    norm = np.sqrt(squares)
    limit = np.float32(max_norm)
    return row * limit / norm if norm > limit else row.astype(np.float32)


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 16, 33]), st.floats(0.01, 30))
def test_long_rows_are_scaled_by_definition_and_others_kept(seed, dim, max_norm):
    random = np.random.default_rng(seed)
    rows = random.normal(0, 1, (20, dim)).astype(np.float32) * np.float32(random.uniform(0.1, 9))
    found = scale_to_norm(rows, max_norm)
    assert found.tobytes() == np.array([by_definition(r, max_norm) for r in rows]).tobytes()
    lengths = np.linalg.norm(found.astype(np.float64), axis=1)
    assert (lengths <= max_norm * (1 + 1e-5)).all()


def test_scaled_rows_are_those_of_tensorflow():
    """Results of `tf.nn.embedding_lookup(max_norm=5)`; a row of that norm is not scaled."""
    rows = np.array([[3, 4], [6, 8], [-30, 40], [0, 0]], np.float32)
    assert scale_to_norm(rows, 5).tolist() == [[3, 4], [3, 4], [-3, 4], [0, 0]]


def test_strange_values_stay_in_their_row_without_a_warning():
    rows = np.array([[np.nan, 1], [3e38, 3e38], [2, 0], [-0.0, 0.5]], np.float32)
    found = scale_to_norm(rows, 1)
    assert np.isnan(found[0, 0])
    assert found[1:].tolist() == [[0, 0], [1, 0], [0, 0.5]]  # the norm of the second is infinite
    assert np.signbit(found[3, 0])
    assert scale_to_norm(rows[2:].astype(np.float16), 1).dtype == np.float32
    assert rows[2, 0] == 2


class World:
    """Features with and without ``max_norm`` over one table; its rows are in a cache or in a store."""

    def __init__(self, cached, rows, dtype):
        self.table = EmbeddingTable.make("t", 5, dtype=dtype, rows=rows, default=[3, 0, 0, 0, -4])
        vectors = np.random.default_rng(1).normal(0, 1, (ROWS, 5)).astype(np.float32)
        stored = to_rows(self.table, vectors)
        self.vectors = to_vectors(self.table, stored, dtype=np.float32)
        poolings = ("sum", "mean", "sqrtn", "none")
        features = [Feature(p, self.table, pooling=p, max_norm=MAX) for p in poolings]
        features.append(Feature("plain", self.table))
        features.append(Feature("rows", self.table, pooling="none"))
        model = LookupModel("m", 1, {"t": self.table}, {f.name: f for f in features})
        cache = CpuCache({self.table: 2 * ROWS})
        store = MemoryTier(TierInfo("store", Source.ROCKSDB))
        tier = cache if cached else store
        tier.insert(self.table, np.arange(ROWS), stored, np.ones(ROWS, np.uint64))
        self.workers = BoundedThreadPool(1, 100, name="test")
        self.engine = LookupEngine(model, TierChain([cache]), TierChain([store]), self.workers)

    def rows_of(self, keys, max_norm=MAX):
        rows = [self.vectors[k] if k < ROWS else self.table.default.astype("f4") for k in keys]
        return np.array([r if max_norm is None else by_definition(r, max_norm) for r in rows])

    def expected(self, name, keys):
        rows = self.rows_of(keys.keys, None if name in ("plain", "rows") else MAX)
        pooling = {"plain": "sum", "rows": "none"}.get(name, name)
        return pool(rows, keys, pooling, dtype=self.table.dtype)


@pytest.fixture(params=[True, False], ids=["cache", "store"])
def make_world(request):
    made = []

    def make(rows=None, dtype=np.float32):
        made.append(World(request.param, rows, dtype))
        return made[-1]

    yield make
    for world in made:
        world.workers.close()


@pytest.mark.parametrize(
    ("rows", "dtype"), [(None, "f4"), (None, "f2"), ("int8", "f4"), ("bfloat16", "f2")]
)
@pytest.mark.parametrize("want_source", [False, True])
def test_rows_are_scaled_before_they_are_pooled(make_world, rows, dtype, want_source):
    world = make_world(rows, np.dtype(dtype))
    flat = JaggedKeys(KEYS, len(KEYS))
    asked = dict.fromkeys(["sum", "plain", "mean", "sqrtn"], BAGS) | {"none": flat, "rows": flat}
    for names in (*([name] for name in asked), list(asked)):
        features = {name: asked[name] for name in names}
        found = world.engine.lookup(LookupRequest(features, want_source=want_source))
        assert list(found.vectors) == names
        for name, vectors in found.vectors.items():
            assert vectors.dtype == world.table.dtype
            assert vectors.tobytes() == world.expected(name, asked[name]).tobytes(), names


def test_scaled_rows_are_written_to_the_callers_array(make_world):
    world = make_world()
    keys = JaggedKeys(np.arange(9), 9)
    out = np.empty((9, 5), np.float32)
    world.engine.lookup(LookupRequest({"none": keys}, out={"none": out}))
    assert out.tobytes() == world.rows_of(keys.keys).tobytes()


def test_narrow_rows_are_scaled_instead_of_returned_as_stored(make_world):
    world = make_world("int8")
    keys = JaggedKeys(np.arange(9), 9)
    request = LookupRequest({"none": keys, "rows": keys}, stored_rows=True)
    found = world.engine.lookup(request)
    assert found.vectors["none"].tobytes() == world.rows_of(keys.keys).tobytes()
    rows = found.vectors["rows"]
    if found.stored_rows:
        rows = to_vectors(world.table, rows)
    assert rows.tobytes() == world.rows_of(keys.keys, None).tobytes()


def test_rows_of_tables_and_other_features_are_not_scaled(make_world):
    world = make_world()
    keys = JaggedKeys(np.arange(9), 9)
    found = world.engine.lookup(LookupRequest({"t": keys}, by_table=True))
    assert found.vectors["t"].tobytes() == world.rows_of(keys.keys, None).tobytes()
    prepare = world.engine._fast_path.prepare
    assert prepare(LookupRequest({"plain": keys})) is not None
    assert prepare(LookupRequest({"plain": keys, "sum": keys})) is None
