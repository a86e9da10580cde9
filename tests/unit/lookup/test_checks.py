"""Errors of invalid requests name the value received and the one expected."""

import numpy as np
import pytest

from hps.errors import BadRequest
from hps.types import JaggedKeys, LookupRequest

FEATURES = [
    {"name": "user", "table": "user"},
    {"name": "pair", "table": "user", "hotness": 2, "pooling": "mean"},
    {"name": "item", "table": "item", "pooling": "none"},
    {"name": "ctx", "table": "item", "context": True},
]


def keys(n):
    return np.arange(n, dtype=np.int64)


def offsets(*values, dtype=np.int64):
    return np.array(values, dtype)


@pytest.fixture
def world(make_world):
    return make_world(FEATURES, max_batch_size=4, max_keys=20)


FAULTS = {
    "no feature": ({}, "names no feature of model 'm'"),
    "unknown": ({"usr": JaggedKeys(keys(1), 1)}, "no feature 'usr'; did you mean 'user'"),
    "unlike any": ({"zz": JaggedKeys(keys(1), 1)}, "no feature 'zz'; it has user, pair, item, ctx"),
    "float keys": ({"user": JaggedKeys(np.ones(2), 2)}, "'user': keys must be integers .*got .*float64"),
    "matrix": ({"user": JaggedKeys(keys(4).reshape(2, 2), 2)}, r"one flat array, got shape \(2, 2\)"),
    "indivisible": ({"user": JaggedKeys(keys(5), 2)}, "5 keys cannot be divided into a batch of 2"),
    "no sample": ({"user": JaggedKeys(keys(5), 0)}, "5 keys cannot be divided into a batch of 0"),
    "negative": ({"user": JaggedKeys(keys(0), -1)}, "batch of -1"),
    "hotness": ({"pair": JaggedKeys(keys(6), 2)}, "takes 2 keys per sample, got 6 .* batch of 2"),
    "jagged hotness": (
        {"pair": JaggedKeys(keys(4), 2, offsets(0, 1, 4))},
        "takes 2 keys per sample, sample 0 has 1",
    ),
    "offsets start": (
        {"user": JaggedKeys(keys(3), 2, offsets(1, 2, 3))},
        "run from 1 to 3, they must run from 0 to the number of keys, 3",
    ),
    "offsets end": ({"user": JaggedKeys(keys(3), 2, offsets(0, 2, 4))}, "from 0 to 4, .* 3"),
    "offsets fall": (
        {"user": JaggedKeys(keys(3), 3, offsets(0, 3, 1, 3))},
        "fall from 3 to 1 at sample 1",
    ),
    "offsets beyond": (
        {"user": JaggedKeys(keys(3), 2, offsets(0, 2**62, 3))},
        f"fall from {2**62} to 3",
    ),
    "offsets count": ({"user": JaggedKeys(keys(3), 2, offsets(0, 3))}, r"\[2\], .* 2 needs \[3\]"),
    "offsets shape": (
        {"user": JaggedKeys(keys(3), 2, offsets(0, 1, 3).reshape(3, 1))},
        r"shape \[3, 1\]",
    ),
    "no offsets": ({"user": JaggedKeys(keys(0), 0, offsets())}, r"shape \[0\], .* needs \[1\]"),
    "offsets type": (
        {"user": JaggedKeys(keys(3), 2, offsets(0, 1, 3, dtype=np.float32))},
        "offsets must be integers, got float32",
    ),
    "weights length": (
        {"user": JaggedKeys(keys(3), 3, None, np.ones(2, np.float32))},
        r"weights have shape \[2\], keys have \[3\]",
    ),
    "weights type": (
        {"user": JaggedKeys(keys(1), 1, None, np.array(["a"]))},
        "weights must be numbers, got <U1",
    ),
    "weights of rows": (
        {"item": JaggedKeys(keys(1), 1, None, np.ones(1, np.float32))},
        "'item' is not pooled, so 'item.weights' has no meaning",
    ),
    "batches differ": (
        {"user": JaggedKeys(keys(2), 2), "item": JaggedKeys(keys(3), 3)},
        "'user' has 2, feature 'item' has 3",
    ),
    "one is not context": (
        {"user": JaggedKeys(keys(2), 2), "item": JaggedKeys(keys(1), 1)},
        "'user' has 2, feature 'item' has 1",
    ),
    "context is 1 or all": (
        {"user": JaggedKeys(keys(3), 3), "ctx": JaggedKeys(keys(2), 2)},
        "'user' has 3, feature 'ctx' has 2",
    ),
    "batch": (
        {"user": JaggedKeys(keys(5), 5)},
        "batch-size must be <= 4 for 'm', got 5",
    ),
    "keys": ({"user": JaggedKeys(keys(24), 4)}, "may have at most 20 keys, got 24"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_keys_are_rejected_with_the_reason(world, fault):
    features, message = FAULTS[fault]
    with pytest.raises(BadRequest, match=message):
        world.engine.submit(LookupRequest(features))
    assert not world.answered


def test_unknown_table_is_rejected(world):
    with pytest.raises(BadRequest, match="no table 'itm'; did you mean 'item'"):
        world.engine.submit(LookupRequest({"itm": JaggedKeys(keys(1), 1)}, by_table=True))


@pytest.mark.parametrize(
    ("name", "out", "message"),
    [
        ("user", np.zeros((2, 2), np.float32), r"shape \[2, 2\], the vectors have \[2, 3\]"),
        ("user", np.zeros((2, 3), np.float64), "is float64, the table is float32"),
        (
            "user",
            np.zeros((2, 6), np.float32)[:, ::2],
            "not C-contiguous; pass .* and copy from it",
        ),
        ("user", [[0.0]], "must be a NumPy array, got list"),
        ("item", np.zeros((2, 2), np.float32), "no requested feature 'item'"),
    ],
)
def test_invalid_out_array_is_rejected(world, name, out, message):
    with pytest.raises(BadRequest, match=message):
        world.engine.submit(LookupRequest({"user": JaggedKeys(keys(2), 2)}, out={name: out}))


def test_read_only_out_array_is_rejected(world):
    out = np.zeros((2, 3), np.float32)
    out.flags.writeable = False
    with pytest.raises(BadRequest, match="is read-only"):
        world.engine.submit(LookupRequest({"user": JaggedKeys(keys(2), 2)}, out={"user": out}))


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.int8, ">i8"])
def test_other_integer_types_are_converted(world, dtype):
    world.put(world.cache, "user", [1, 2])
    jagged = JaggedKeys(np.array([2, 1], dtype), 2, np.array([0, 1, 2], np.int32), np.ones(2))
    result = world.engine.lookup(LookupRequest({"user": jagged}))
    np.testing.assert_array_equal(result.vectors["user"], world.row(world.tables["user"], [2, 1]))


def test_strided_keys_are_accepted(world):
    world.put(world.cache, "user", [0, 2])
    result = world.engine.lookup(LookupRequest({"user": JaggedKeys(keys(4)[::2], 2)}))
    assert result.defaulted == 0
