"""Merged lookups give the results of single ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.lookup.base import Feature, LookupModel
from hps.lookup.engine import LookupEngine
from hps.lookup.lookup_merge import MergedLookup, merge_key
from hps.threads import BoundedThreadPool
from hps.tiers.base import TierInfo
from hps.tiers.chain import TierChain
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, Source
from tests.support.memory_tier import MemoryTier

TABLE = EmbeddingTable.make("t", 3, default=-1.0)
FEATURES = {
    name: Feature(name, TABLE, pooling=pooling)
    for name, pooling in (("sum", "sum"), ("mean", "mean"), ("rows", "none"))
}


@pytest.fixture(scope="module")
def engine():
    memory = MemoryTier(TierInfo("cpu", Source.CPU, cache=True))
    keys = np.arange(10)
    rows = np.random.default_rng(1).standard_normal((10, 3)).astype(np.float32)
    memory.insert(TABLE, keys, rows, np.ones(10, np.uint64))
    workers = BoundedThreadPool(1, 8, name="test")
    model = LookupModel("m", 1, {"t": TABLE}, FEATURES)
    yield LookupEngine(model, TierChain([memory]), TierChain([]), workers)
    workers.close()


keys = st.integers(0, 14)


@st.composite
def jagged(draw, form):
    """Keys of a feature: ``form`` is its hotness, None: jagged, and whether it has weights."""
    hotness, weighted = form
    batch = draw(st.integers(0, 4))
    if hotness is None:
        bags = draw(st.lists(st.lists(keys, max_size=3), min_size=batch, max_size=batch))
        flat = [key for bag in bags for key in bag]
        offsets = np.cumsum([0, *map(len, bags)])
    else:
        flat = draw(st.lists(keys, min_size=batch * hotness, max_size=batch * hotness))
        offsets = None
    weights = np.linspace(0.5, 2, len(flat), dtype=np.float32) if weighted else None
    return JaggedKeys(np.array(flat, np.int64), batch, offsets, weights)


@st.composite
def requests(draw):
    names = draw(st.lists(st.sampled_from(sorted(FEATURES)), min_size=1, unique=True))
    forms = {
        name: (draw(st.sampled_from([None, 1, 2])), draw(st.booleans()) and name != "rows")
        for name in names
    }
    made = []
    for _ in range(draw(st.integers(1, 4))):
        features = {name: draw(jagged(form)) for name, form in forms.items()}
        batch = min(each.batch for each in features.values())
        cut = {name: _first(each, batch) for name, each in features.items()}
        made.append(LookupRequest(cut, want_source=draw(st.booleans())))
    return made


def _first(keys, batch):
    if keys.offsets is not None:
        end = int(keys.offsets[batch])
        offsets = keys.offsets[: batch + 1]
    else:
        end, offsets = batch * (keys.hotness or 0), None
    weights = None if keys.weights is None else keys.weights[:end]
    return JaggedKeys(keys.keys[:end], batch, offsets, weights)


def same(ours, alone, request):
    assert ours.vectors.keys() == alone.vectors.keys()
    for name, vectors in alone.vectors.items():
        np.testing.assert_array_equal(ours.vectors[name], vectors)
    assert ours.defaulted == alone.defaulted
    assert ours.sources.keys() == (request.features.keys() if request.want_source else set())
    for name, sources in ours.sources.items():
        np.testing.assert_array_equal(sources, alone.sources[name])


@given(requests())
def test_merged_features_split_into_single_results(engine, made):
    fixed = [r for r in made if all(k.batch for k in r.features.values())]
    if not fixed or len({merge_key(r) for r in fixed}) != 1:
        return
    merged = MergedLookup(fixed, FEATURES)
    for ours, request in zip(merged.split(engine.lookup(merged.request)), fixed, strict=True):
        same(ours, engine.lookup(request), request)


@given(st.lists(st.lists(keys, min_size=1, max_size=5), min_size=1, max_size=4))
def test_merged_tables_split_into_single_results(engine, key_lists):
    made = [
        LookupRequest({"t": JaggedKeys.dense(np.array(each))}, by_table=True) for each in key_lists
    ]
    merged = MergedLookup(made, FEATURES)
    for ours, request in zip(merged.split(engine.lookup(merged.request)), made, strict=True):
        same(ours, engine.lookup(request), request)


def test_merge_key_of_mergeable_requests():
    one = JaggedKeys.dense(np.array([[1, 2]]))
    by_feature = LookupRequest({"sum": one})
    assert merge_key(by_feature) == merge_key(
        LookupRequest({"sum": JaggedKeys.dense(np.array([[3, 4]]))})
    )
    assert merge_key(by_feature) != merge_key(LookupRequest({"mean": one}))
    assert merge_key(by_feature) != merge_key(
        LookupRequest({"sum": JaggedKeys.dense(np.array([3]))})
    )
    assert merge_key(LookupRequest({"t": one}, by_table=True)) == merge_key(
        LookupRequest({}, by_table=True)
    )
    assert merge_key(LookupRequest({"sum": one}, out={"sum": np.zeros((1, 3))})) is None


def test_merged_request_has_the_latest_deadline():
    made = [LookupRequest({"sum": JaggedKeys.dense(np.array([1]))}, deadline=d) for d in (1.0, 3.0)]
    assert MergedLookup(made, FEATURES).request.deadline == 3.0
    made.append(LookupRequest({"sum": JaggedKeys.dense(np.array([1]))}))
    assert MergedLookup(made, FEATURES).request.deadline is None
