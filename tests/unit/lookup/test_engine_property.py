"""The engine against a reference that looks up one key at a time and pools one sample at a time."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.lookup.base import Feature, LookupModel
from hps.lookup.engine import LookupEngine
from hps.threads import BoundedThreadPool
from hps.tiers.base import TierInfo
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, MissPolicy, Source, version_now
from tests.support.memory_tier import MemoryTier

NOW = version_now()
# Few enough to collide, with both ends of the range.
KEYS = st.sampled_from([-(2**63), -7, -1, 0, 1, 2, 3, 2**63 - 1])
OFFSETS = st.sampled_from([0, 1, -1, 2**63, 2**64 - 3])


def wrapped(key):
    return (key + 2**63) % 2**64 - 2**63


@st.composite
def tables(draw):
    made = []
    for i in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["wait", "default_then_promote"]))
        rate = draw(st.sampled_from([0.0, 0.5, 1.0])) if kind != "wait" else 0.0
        made.append(
            EmbeddingTable.make(f"t{i}", i + 1, default=-i - 1, miss=MissPolicy(kind, rate))
        )
    return made


@st.composite
def feature(draw, i, named):
    return Feature(
        f"f{i}",
        draw(st.sampled_from(named)),
        draw(OFFSETS),
        draw(st.sampled_from(["sum", "mean", "sqrtn", "none"])),
    )


@st.composite
def jagged(draw, batch, pooling):
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 3), min_size=batch, max_size=batch))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    else:
        lengths, offsets = [draw(st.integers(0, 3))] * batch, None
    n = sum(lengths)
    keys = np.array(draw(st.lists(KEYS, min_size=n, max_size=n)), np.int64)
    weights = None
    if pooling != "none" and draw(st.booleans()):
        weights = np.array(draw(st.lists(st.integers(-2, 2), min_size=n, max_size=n)), np.float32)
    return JaggedKeys(keys, batch, offsets, weights), lengths


@st.composite
def cases(draw):
    named = draw(tables())
    features = [draw(feature(i, named)) for i in range(draw(st.integers(1, 4)))]
    batch = draw(st.integers(0, 3))
    request = {f.name: draw(jagged(batch, f.pooling)) for f in features}
    # Where each row is: in the cache, in the store, deleted in the cache, deleted in the store.
    place = {
        (t.name, key): draw(st.sampled_from(["cache", "store", "gone above", "gone below", None]))
        for t in named
        for key in [-(2**63), -7, -1, 0, 1, 2, 3, 4, 2**63 - 1]
    }
    return named, features, request, place, draw(st.booleans())


def row(table, key):
    return np.float32(key % 101) + np.arange(table.dim, dtype=np.float32)


def expected_key(table, key, place, waits):
    """(row, source, version) of one key."""
    where = place.get((table.name, key))
    if where == "cache":
        return row(table, key), Source.CPU, NOW
    if where == "store" and waits:
        return row(table, key), Source.ROCKSDB, NOW
    deleted = where == "gone above" or (where == "gone below" and waits)
    return table.default, Source.DEFAULT, NOW if deleted else 0


def pooled(rows, lengths, weights, pooling, dim):
    if pooling == "none":
        return np.array(rows, np.float32).reshape(len(rows), dim)
    out, at = np.zeros((len(lengths), dim)), 0
    for sample, length in enumerate(lengths):
        w = np.ones(length) if weights is None else weights[at : at + length].astype(float)
        for i in range(length):
            out[sample] += w[i] * rows[at + i]
        if pooling != "sum":
            by = w.sum() if pooling == "mean" else np.sqrt((w**2).sum())
            out[sample] = out[sample] / by if by else 0.0
        at += length
    return out


@settings(max_examples=300, deadline=None)
@given(cases())
def test_engine_equals_reference(case):
    named, features, request, place, blocking = case
    cache = MemoryTier(TierInfo("cpu", Source.CPU, cache=True))
    store = MemoryTier(TierInfo("rocksdb", Source.ROCKSDB, blocking=blocking))
    for table in named:
        for tier, there, gone in ((cache, "cache", "gone above"), (store, "store", "gone below")):
            for (name, key), where in place.items():
                at = np.array([key], np.int64), np.array([NOW], np.uint64)
                if name == table.name and where == there:
                    tier.insert(table, at[0], row(table, key)[None], at[1])
                elif name == table.name and where == gone:
                    tier.delete(table, *at)
    promoted = []
    workers = BoundedThreadPool(1, 4, name="test", setting="s")
    model = LookupModel("m", 1, {t.name: t for t in named}, {f.name: f for f in features})
    engine = LookupEngine(
        model, cache, store, workers, lambda t, k: promoted.extend((t.name, x) for x in k.tolist())
    )
    result = engine.lookup(
        LookupRequest({name: keys for name, (keys, _) in request.items()}, want_source=True)
    )
    workers.close()

    requested = {t.name: set() for t in named}
    for f in features:
        requested[f.table.name] |= {
            wrapped(k + f.key_offset) for k in request[f.name][0].keys.tolist()
        }
    hit = {
        t.name: sum(place.get((t.name, k)) in ("cache", "gone above") for k in requested[t.name])
        for t in named
    }
    waits = {
        t.name: t.miss.kind == "wait" or hit[t.name] < t.miss.min_hit_rate * len(requested[t.name])
        for t in named
    }
    defaulted = 0
    for f in features:
        keys, lengths = request[f.name]
        found = [
            expected_key(f.table, wrapped(k + f.key_offset), place, waits[f.table.name])
            for k in keys.keys.tolist()
        ]
        assert result.sources[f.name].tolist() == [source for _, source, _ in found]
        assert result.versions[f.name].tolist() == [version for _, _, version in found]
        defaulted += sum(source == Source.DEFAULT for _, source, _ in found)
        expected = pooled([r for r, _, _ in found], lengths, keys.weights, f.pooling, f.table.dim)
        np.testing.assert_allclose(result.vectors[f.name], expected, rtol=1e-5, atol=1e-5)
        assert result.vectors[f.name].dtype == np.float32
    assert result.defaulted == defaulted
    assert len(promoted) == len(set(promoted))
    for t in named:
        above = {k for k in requested[t.name] if place.get((t.name, k)) in ("cache", "gone above")}
        if waits[t.name]:
            due = {k for k in requested[t.name] if place.get((t.name, k)) == "store"}
        else:
            due = requested[t.name] - above
        assert {k for name, k in promoted if name == t.name} == due
