"""The fast path gives the results of the slow path, or leaves the request to it."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hps.errors import BadRequest, DeadlineExceeded
from hps.lookup.engine import INLINE_KEYS
from hps.threads import BoundedThreadPool
from hps.types import JaggedKeys, LookupRequest, Source
from tests.support.two_ways import FEATURES, ITEM, MODEL, ROWS, USER, Side, dense, outcome


@pytest.fixture(scope="module")
def workers():
    workers = BoundedThreadPool(1, 4, name="test", setting="x")
    yield workers
    workers.close()


@pytest.fixture
def sides(workers):
    pair = Side(workers, fast=True), Side(workers, fast=False)
    yield pair
    for side in pair:
        side.cache.close()


@st.composite
def requests(draw):
    """Requests of every kind, wrong ones too."""
    keys = st.integers(0, ROWS - 1) | st.integers(-3, ROWS + 6)
    batch = draw(st.integers(0, 4))
    chosen = draw(st.lists(st.sampled_from([*FEATURES, None]), min_size=1, max_size=5))
    features = {}
    for feature in chosen:
        name = feature.name if feature else "nothing"
        size = draw(st.sampled_from([batch, batch, batch, 1]))
        hotness = feature.hotness if feature and feature.hotness else draw(st.integers(0, 3))
        n = size * hotness + draw(st.sampled_from([0, 0, 0, 0, 1]))
        flat = np.array(draw(st.lists(keys, min_size=n, max_size=n)), np.int64)
        kind = draw(st.integers(0, 9))
        offsets = weights = None
        if kind == 0:
            flat = flat.astype(np.int32)
        elif kind == 1:
            flat = np.repeat(flat, 2)[::2]
        elif kind == 2:
            offsets = np.linspace(0, n, size + 1).astype(np.int64)
        elif kind == 3:
            weights = np.ones(n, np.float32)
        features[name] = JaggedKeys(flat, size, offsets, weights)
    by_table = draw(st.integers(0, 4)) == 0
    if by_table:
        features = {
            table: JaggedKeys(np.array(draw(st.lists(keys, max_size=4)), np.int64), 1)
            for table in draw(st.sampled_from([["user"], ["item", "user"], ["nope"]]))
        }
        features = {t: JaggedKeys(k.keys, len(k.keys)) for t, k in features.items()}
    return LookupRequest(features, by_table=by_table, want_source=draw(st.integers(0, 9)) == 0)


@settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(requests(), min_size=1, max_size=3))
def test_fast_and_slow_path_agree(sides, several):
    fast, slow = sides
    for request in several:
        assert outcome(fast, request) == outcome(slow, request)
        assert fast.finished[-1:] == slow.finished[-1:]


@st.composite
def good_requests(draw):
    """Requests whose every row is in memory."""
    batch = draw(st.integers(1, 4))
    features = {}
    for feature in draw(st.permutations(FEATURES))[: draw(st.integers(1, 4))]:
        n = batch * (feature.hotness or draw(st.integers(0, 3)))
        held = st.integers(0, ROWS - 1).map(lambda key, shift=feature.key_offset: key - shift)
        flat = np.array(draw(st.lists(held, min_size=n, max_size=n)), np.int64)
        features[feature.name] = JaggedKeys(flat, batch)
    return LookupRequest(features)


@settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(good_requests())
def test_resident_rows_take_the_fast_path_with_equal_results(sides, request):
    fast, slow = sides
    from_memory = fast.engine._fast_path.prepare(request)
    assert from_memory([keys.keys for keys in request.features.values()]) is not None
    assert outcome(fast, request) == outcome(slow, request)


@settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(good_requests(), st.data())
def test_prepared_lookup_answers_other_keys_of_the_same_form(sides, request, data):
    for side in sides:
        submit = side.engine.prepare(request)
        for _ in range(2):
            features = {}
            for name, keys in request.features.items():
                n, shift = len(keys.keys), MODEL.features[name].key_offset
                anything = st.integers(0, ROWS - 1) | st.integers(0, ROWS)
                flat = data.draw(st.lists(anything, min_size=n, max_size=n))
                features[name] = JaggedKeys(np.array(flat, np.int64) - shift, keys.batch)
            expected = sides[1].engine.lookup(LookupRequest(features))
            counted = sides[1].finished[-1]
            result = submit([keys.keys for keys in features.values()], None).result()
            assert side.finished[-1] == counted
            assert result.defaulted == expected.defaulted
            assert list(result.vectors) == list(expected.vectors)
            for name, vectors in expected.vectors.items():
                np.testing.assert_array_equal(result.vectors[name], vectors)


def test_prepared_lookup_honours_deadline_and_sources(sides):
    fast, _ = sides
    request = dense(item=[[1, 2]])
    late = fast.engine.prepare(request)
    with pytest.raises(DeadlineExceeded):
        late([np.array([1, 2])], time.monotonic() - 1)
    request.want_source = True
    result = fast.engine.prepare(request)([np.array([1, 999])], None).result()
    assert result.sources["item"].tolist() == [Source.CPU, Source.DEFAULT]
    with pytest.raises(BadRequest, match="'nope'"):
        fast.engine.prepare(dense(nope=[[1]]))


def test_prepared_lookup_reads_memory_once_before_the_slow_path(sides):
    fast, _ = sides
    gathers = []
    tier = fast.engine._fast_path._tier
    fast.engine._fast_path._tier = SimpleNamespace(
        info=tier.info,
        gather=lambda asks, bags: gathers.append(len(asks)) or tier.gather(asks, bags),
    )
    submit = fast.engine.prepare(dense(item=[[1]]))
    assert submit([np.array([999])], None).result().defaulted == 1
    assert gathers == [1]


def test_table_and_feature_of_one_name_are_prepared_separately(sides):
    fast, slow = sides
    keys = {"item": JaggedKeys(np.array([4, 5]), 2)}
    for by_table in (False, True, False):
        request = LookupRequest(keys, by_table=by_table)
        assert outcome(fast, request) == outcome(slow, request)


def test_fast_path_is_used_when_all_rows_are_in_memory(sides):
    fast, _ = sides
    result = fast.engine.lookup(dense(item=[[-2, -1], [-1, 0]], user=[[4], [5]]))
    assert list(result.vectors) == ["item", "user"]
    assert result.vectors["item"][:, 0].tolist() == [1, 2, 2, 3]
    # Repeated keys are not recognised: the mark of the short way.
    assert fast.observed == [[(ITEM, 4, 4), (USER, 2, 2)]]
    counted = [(ITEM, b"\2" * 4, [("item", 4)]), (USER, b"\2" * 2, [("user", 2)])]
    assert fast.finished == [(counted, ())]


def test_failed_fast_path_is_not_counted(sides):
    fast, _ = sides
    result = fast.engine.lookup(dense(item=[[1, 2]], user=[[999]]))
    assert result.defaulted == 1
    assert fast.observed == [[(ITEM, 2, 2), (USER, 1, 0)]]
    assert len(fast.finished) == 1


def test_requests_are_checked_once_per_form(sides):
    fast, slow = sides
    for request in (dense(bought=[[1, 2]]), dense(bought=[[3, 4]]), dense(bought=[[1, 2, 3]])):
        assert outcome(fast, request) == outcome(slow, request)
    assert len(fast.engine._fast_path._prepared_lookups) == 1
    for n in range(1, 300):
        fast.engine.lookup(dense(item=[[1] * n]))
    assert len(fast.engine._fast_path._prepared_lookups) <= 256


@pytest.mark.parametrize(
    "bag",
    [
        {"weights": np.array([1, 0.5], np.float32)},
        {"weights": np.array([1, 0.5, 2], np.float32)},
        {"offsets": np.array([0, 1])},
        {"offsets": np.array([0, 2])},
        {"offsets": np.array([1, 2])},
    ],
)
@pytest.mark.parametrize("feature", ["item", "bought"])
def test_requests_with_offsets_are_checked_each_time(sides, feature, bag):
    fast, slow = sides
    keys = np.array([1, 2])
    for request in (
        LookupRequest({feature: JaggedKeys(keys, 1)}),
        LookupRequest({feature: JaggedKeys(keys, 1, **bag)}),
    ):
        assert outcome(fast, request) == outcome(slow, request)


def test_large_or_expired_request_takes_the_slow_path(sides):
    fast, _ = sides
    keys = np.zeros((1, INLINE_KEYS + 1), np.int64)
    assert len(fast.engine.lookup(dense(item=keys)).vectors["item"]) == INLINE_KEYS + 1
    assert fast.observed == [[(ITEM, 1, 1)]]  # after deduplication
    late = dense(item=[[1]])
    late.deadline = time.monotonic() - 1
    with pytest.raises(DeadlineExceeded):
        fast.engine.lookup(late)


def test_request_with_out_takes_the_slow_path(sides):
    fast, _ = sides
    out = np.zeros((2, 2), np.float16)
    request = dense(item=[[-2, -2]])
    request.out = {"item": out}
    assert fast.engine.lookup(request).vectors["item"] is out
    assert out[:, 0].tolist() == [1, 1]
