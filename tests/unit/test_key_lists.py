"""Keys given as lists: dense, jagged, large, and not integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hps.array_inputs import jagged_keys
from hps.client.wire import tensors_of
from hps.errors import BadRequest
from hps.types import JaggedKeys


def objects(*bags: Any) -> np.ndarray[Any, Any]:
    """An array of lists, as a column of pandas or pyarrow gives it."""
    array = np.empty(len(bags), object)
    array[:] = [list(bag) for bag in bags]
    return array


@pytest.mark.parametrize(
    ("given", "keys", "batch", "offsets"),
    [
        ([1, 2], [1, 2], 2, None),
        ([[1, 2], [3, 4]], [1, 2, 3, 4], 2, None),
        ([[1], [2, 3], []], [1, 2, 3], 3, [0, 1, 3, 3]),
        ([(1,), np.array([2, 3])], [1, 2, 3], 2, [0, 1, 3]),
        (objects([1], [2, 3]), [1, 2, 3], 2, [0, 1, 3]),
        (objects([1], [2]), [1, 2], 2, None),
        ([], [], 0, None),
        ([[], []], [], 2, None),
        ([2**64 - 1, 2], [-1, 2], 2, None),
        ([[2**63, -1], [1]], [-(2**63), -1, 1], 2, [0, 2, 3]),
    ],
)
def test_keys_of_lists_are_dense_or_jagged(
    given: Any, keys: list[int], batch: int, offsets: list[int] | None
) -> None:
    found = JaggedKeys.of(given)
    assert found.keys.dtype == np.int64
    assert found.keys.tolist() == keys
    assert found.batch == batch
    assert (None if found.offsets is None else found.offsets.tolist()) == offsets


@pytest.mark.parametrize(
    "given", [[1.5], [[1.5], [2, 3]], ["a"], [True], [None], [2**64], [[[1]], [[2, 3], [4, 5]]]]
)
@pytest.mark.parametrize("convert", [tensors_of, jagged_keys])
def test_keys_that_are_not_integers_are_rejected(given: Any, convert: Any) -> None:
    with pytest.raises(BadRequest, match="feature 'tags'"):
        convert({"tags": given})


@pytest.mark.parametrize("convert", [tensors_of, jagged_keys])
def test_lists_of_different_lengths_are_accepted(convert: Any) -> None:
    found = convert({"tags": [[1], [2, 3]]})
    if convert is tensors_of:
        assert found["tags"].tolist() == [1, 2, 3]
        assert found["tags.offsets"].tolist() == [0, 1, 3]
    else:
        assert found["tags"].offsets.tolist() == [0, 1, 3]


def test_from_lists_takes_weights_of_the_same_lengths() -> None:
    found = JaggedKeys.from_lists([[1], [2, 3]], [[0.5], [1, 2]])
    assert found.weights is not None
    assert found.weights.tolist() == [0.5, 1.0, 2.0]
    assert found.weights.dtype == np.float32
    with pytest.raises(ValueError, match="sample 1 has 2 keys, but 1 weights"):
        JaggedKeys.from_lists([[1], [2, 3]], [[0.5], [1]])
    with pytest.raises(ValueError, match="2 samples have keys, 1 have weights"):
        JaggedKeys.from_lists([[1], [2, 3]], [[0.5]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([None, [1, 2]], "expected a list of keys for each sample, got None for sample 0"),
        ([[1, 2], 3], "expected a list of keys for each sample, got 3 for sample 1"),
        ([2**64], "keys must be integers from -2^63 to 2^64-1, got 18446744073709551616"),
        ([1, None], "keys must be integers from -2^63 to 2^64-1, got None"),
        ([["a"], [1, 2]], "keys must be integers from -2^63 to 2^64-1, got dtype <U"),
    ],
)
@pytest.mark.parametrize("convert", [tensors_of, jagged_keys])
def test_wrong_keys_are_named(given: Any, message: str, convert: Any) -> None:
    with pytest.raises(BadRequest) as error:
        convert({"tags": given})
    assert f"feature 'tags': {message}" in str(error.value)


def test_from_lists_rejects_one_flat_list() -> None:
    with pytest.raises(TypeError, match="a list of keys for each sample, got 1 for sample 0"):
        JaggedKeys.from_lists([1, 2])  # type: ignore[list-item]
