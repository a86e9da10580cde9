"""Padded vectors, masks and truncated keys, against a definition that takes one sample after the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.errors import BadRequest
from hps.lookup.base import Feature, LookupModel
from hps.lookup.padding import (
    TruncatedKeys,
    jagged_offsets,
    lengths,
    lookup_padded,
    mask,
    pad,
    truncate,
)
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, LookupResult

TABLE = EmbeddingTable.make("t", 2)
SAMPLES = st.one_of(
    st.lists(st.integers(0, 6), max_size=6).map(
        lambda sizes: [list(range(7 * i, 7 * i + n)) for i, n in enumerate(sizes)]
    ),
    st.tuples(st.integers(0, 5), st.integers(0, 6)).map(
        lambda shape: np.arange(shape[0] * shape[1]).reshape(shape).tolist()
    ),
)


def feature(max_length, truncation="reject", **options):
    return Feature(
        "f", TABLE, pooling="none", max_length=max_length, truncation=truncation, **options
    )


def keys_of(samples, *, jagged):
    if jagged or len({len(sample) for sample in samples}) > 1:
        return JaggedKeys.from_lists(samples)
    return JaggedKeys(np.array([k for s in samples for k in s], np.int64), len(samples))


@given(SAMPLES, st.integers(0, 3), st.booleans(), st.sampled_from([np.float16, np.float32]))
def test_each_sample_is_followed_by_zeros(samples, more, jagged, dtype):
    keys = keys_of(samples, jagged=jagged)
    most = max([1, *map(len, samples)]) + more
    vectors = np.stack([keys.keys + 1, -keys.keys - 1], axis=1).astype(dtype)
    padded, at_keys = pad(vectors, keys, most), mask(keys, most)
    assert padded.shape == (len(samples), most, 2)
    assert padded.dtype == dtype
    assert padded.flags.c_contiguous
    assert at_keys.shape == (len(samples), most)
    assert at_keys.dtype == np.bool_
    for i, sample in enumerate(samples):
        n = len(sample)
        assert padded[i, :n, 0].tolist() == [k + 1 for k in sample]
        assert padded[i, :n, 1].tolist() == [-k - 1 for k in sample]
        assert not padded[i, n:].any()
        assert at_keys[i].tolist() == [True] * n + [False] * (most - n)
    assert lengths(keys).tolist() == [len(sample) for sample in samples]


@given(SAMPLES, st.integers(1, 6), st.booleans(), st.sampled_from(["keep_first", "keep_last"]))
def test_one_end_of_longer_samples_is_kept(samples, most, jagged, truncation):
    keys = keys_of(samples, jagged=jagged)
    fit, positions = truncate(feature(most, truncation), keys)
    kept = [s[:most] if truncation == "keep_first" else s[-most:] for s in samples]
    assert fit.batch == len(samples)
    assert fit.keys.tolist() == [k for sample in kept for k in sample]
    assert lengths(fit).tolist() == [len(sample) for sample in kept]
    if kept == samples:
        assert positions is None
    else:
        assert keys.keys[positions].tolist() == fit.keys.tolist()
        assert (np.diff(positions) > 0).all()


@pytest.mark.parametrize("jagged", [True, False])
def test_longer_sample_is_rejected_by_default(jagged):
    keys = keys_of([[1, 2, 3], [4, 5, 6]], jagged=jagged)
    assert truncate(feature(3), keys)[0] is keys
    with pytest.raises(
        BadRequest,
        match=r"'f' takes at most 2 keys per sample \(max_length\), sample 0 has 3; .* truncation",
    ):
        truncate(feature(2), keys)
    with pytest.raises(BadRequest, match="sample 1 has 4"):
        truncate(feature(3), JaggedKeys.from_lists([[1], [1, 2, 3, 4], [1, 2, 3, 4]]))


FAULTS = {
    "offsets end": (np.array([0, 2, 9]), "must run from 0 to the number of keys, 4"),
    "offsets fall": (np.array([0, 5, 4]), "fall from 5 to 4 at sample 1"),
    "offsets count": (np.array([0, 4]), r"a batch of 2 needs \[3\]"),
    "offsets type": (np.array([0.0, 2.0, 4.0]), "offsets must be integers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_offsets_are_rejected_before_keys_are_cut(fault):
    offsets, message = FAULTS[fault]
    with pytest.raises(BadRequest, match=message):
        truncate(feature(1, "keep_last"), JaggedKeys(np.arange(4), 2, offsets))


def test_max_hotness_counts_all_keys_of_the_request():
    keys = JaggedKeys.from_lists([[1, 2, 3], []])
    assert truncate(feature(2, "keep_last", max_hotness=2), keys)[0].keys.tolist() == [2, 3]
    with pytest.raises(BadRequest, match=r"at most 1 key per sample \(max_hotness\), got 3 keys"):
        truncate(feature(2, "keep_last", max_hotness=1), keys)


def test_reports_of_cut_keys_are_zero():
    features = {"f": feature(2, "keep_last"), "g": Feature("g", TABLE)}
    model = LookupModel("m", 1, {"t": TABLE}, features)

    every = {"f": JaggedKeys.from_lists([[1, 2, 3], [4]]), "g": JaggedKeys.dense([5, 6])}
    truncated = TruncatedKeys.of(model, every)
    assert truncated.features["f"].keys.tolist() == [2, 3, 4]
    assert truncated.features["g"] is every["g"]
    sources = {"f": np.array([2, 3, 4], np.uint8), "g": np.array([2, 2], np.uint8)}
    versions = {"f": np.array([7, 8, 9], np.uint64), "g": np.array([1, 1], np.uint64)}
    found = truncated.report_all(LookupResult({}, sources, versions))
    assert found.sources["f"].tolist() == [0, 2, 3, 4]
    assert found.versions["f"].tolist() == [0, 7, 8, 9]
    assert found.sources["f"].dtype == np.uint8
    assert found.sources["g"].tolist() == [2, 2]
    plain = LookupResult({})
    assert truncated.report_all(plain) is plain


# -- lookups ---------------------------------------------------------------------------------------

FEATURES = [
    {"name": "user", "table": "user"},
    {"name": "item", "table": "item", "pooling": "none"},
    {"name": "history", "table": "item", "pooling": "none", "max_length": 3},
    {
        "name": "last",
        "table": "item",
        "pooling": "none",
        "max_length": 2,
        "truncation": "keep_last",
    },
]


@pytest.fixture
def world(make_world):
    world = make_world(FEATURES, max_keys=20_000)
    world.put(world.cache, "item", range(50))
    world.put(world.store, "item", range(50, 100))
    world.put(world.cache, "user", range(50))
    return world


def test_lookup_pads_the_features_that_have_a_length(world):
    samples = [[1, 60], [], [3, 4, 999]]
    keys = JaggedKeys.from_lists(samples)
    request = LookupRequest(
        {"history": keys, "last": keys, "item": keys, "user": JaggedKeys.dense([1, 2, 3])},
        want_source=True,
    )
    found = lookup_padded(world.engine, request)
    item = world.tables["item"]
    rows = world.row(item, keys.keys)
    rows[4] = -9.0  # the default of an unknown key, unlike the padding
    expected = np.zeros((3, 3, 2), np.float32)
    expected[0, :2], expected[2] = rows[:2], rows[2:]
    assert found.vectors["history"].tobytes() == expected.tobytes()
    assert found.masks["history"].tolist() == [[True, True, False], [False] * 3, [True] * 3]
    expected = np.zeros((3, 2, 2), np.float32)
    expected[0], expected[2] = rows[:2], rows[3:]
    assert found.vectors["last"].tobytes() == expected.tobytes()
    assert found.masks["last"].tolist() == [[True, True], [False, False], [True, True]]
    assert found.vectors["item"].tobytes() == rows.tobytes()
    assert found.vectors["user"].shape == (3, 3)
    assert found.masks.keys() == {"history", "last"}
    assert found.sources["history"].tolist() == [2, 4, 2, 2, 0]
    assert found.sources["last"].tolist() == [2, 4, 0, 2, 0]  # key 3 was cut
    assert found.versions["last"].tolist() == [7, 7, 0, 7, 0]


@pytest.mark.parametrize("samples", [[], [[], [], []]], ids=["no sample", "no key"])
def test_lookup_without_keys_is_padding(world, samples):
    keys = JaggedKeys.from_lists(samples)
    found = lookup_padded(world.engine, LookupRequest({"history": keys}))
    assert found.vectors["history"].shape == (len(samples), 3, 2)
    assert not found.vectors["history"].any()
    assert found.masks["history"].shape == (len(samples), 3)
    assert not found.masks["history"].any()


def test_requests_that_cannot_be_padded_are_rejected(world):
    keys, one = JaggedKeys.from_lists([[1], [2]]), np.zeros((2, 2), np.float32)
    many = JaggedKeys(np.arange(0), 7000, np.zeros(7001, np.int64))
    faults = [
        (LookupRequest({"item": keys}), "none of the features 'item' has max_length"),
        (LookupRequest({"itm": keys}), "no feature 'itm'; did you mean 'item'"),
        (LookupRequest({}), "names no feature"),
        (LookupRequest({"item": keys}, by_table=True), "leave out by_table or padded"),
        (LookupRequest({"history": keys}, out={"history": one}), "leave out out or padded"),
        (LookupRequest({"history": many}), "at most 20000 keys, and has 21000 when padded"),
        (
            LookupRequest({"history": JaggedKeys(keys.keys, 2, None, np.ones(2, np.float32))}),
            "'history' is not pooled, so 'history.weights' has no meaning",
        ),
    ]
    for request, message in faults:
        with pytest.raises(BadRequest, match=message):
            lookup_padded(world.engine, request)
    assert not world.answered


@pytest.mark.parametrize("users", [1, 3])
def test_ten_thousand_keys_a_user_are_one_vector_each(make_world, users):
    """Also more than a lookup gathers on its caller's thread."""
    world = make_world(FEATURES)
    world.put(world.cache, "item", range(5_000))
    world.put(world.store, "item", range(5_000, 9_000))
    rng = np.random.default_rng(users)
    offsets = 10_000 * np.arange(users + 1)
    keys = JaggedKeys(rng.integers(0, 10_000, offsets[-1]), users, offsets)
    request = LookupRequest({"item": keys})
    found = world.engine.lookup(request)
    rows = world.row(world.tables["item"], keys.keys)
    rows[keys.keys >= 9_000] = -9.0
    assert found.vectors["item"].tobytes() == rows.tobytes()
    assert found.defaulted == np.count_nonzero(keys.keys >= 9_000)
    assert jagged_offsets(world.engine, request)["item"].tolist() == offsets.tolist()


def test_offsets_are_those_of_vectors_that_are_not_pooled(world):
    keys = JaggedKeys(np.arange(3), 2, np.array([0, 1, 3], np.int32))
    features = {"user": keys, "item": keys, "history": JaggedKeys.dense([1, 2])}
    found = jagged_offsets(world.engine, LookupRequest(features))
    assert found.keys() == {"item"}
    assert found["item"].dtype == np.int64
    assert found["item"].tolist() == [0, 1, 3]
