"""Columns of a prediction: its keys and dense inputs as the batch scheduler moves them."""

import numpy as np
import pytest

from hps.lookup.base import Feature
from hps.predict.scheduler.columns import ModelColumns, TensorColumn
from hps.types import EmbeddingTable, JaggedKeys, PredictRequest

TABLE = EmbeddingTable.make("t", 4)
NARROW = EmbeddingTable.make("n", 4, key_bits=32)
FEATURES = (
    Feature("user", TABLE, hotness=1),
    Feature("items", TABLE, key_offset=-5, hotness=3, context=True),
    Feature("free", NARROW),
)
INPUTS = (TensorColumn("age", "<f4", (2,)), TensorColumn("flag", "|b1", ()))
OUTPUTS = (TensorColumn("score", "<f4", (1,)), TensorColumn("parts", "<f8", (2, 2)))
COLUMNS = ModelColumns(FEATURES, INPUTS, OUTPUTS, 100)


def made(batch=2, **keys):
    features = {
        "user": JaggedKeys(np.arange(batch), batch),
        "items": JaggedKeys(np.arange(10, 10 + 3 * batch), batch),
        "free": JaggedKeys(np.arange(2**32, 2**32 + batch), batch),
    }
    dense = {
        "age": np.arange(2 * batch, dtype=np.float32).reshape(batch, 2),
        "flag": np.arange(batch) % 2 == 0,
    }
    return PredictRequest(features | keys, dense), dense


def test_widths_are_bytes_per_sample():
    assert COLUMNS.input_widths == [8, 24, 8, 8, 1]
    assert COLUMNS.output_widths == [4, 32]
    assert COLUMNS.output_width == 36


def test_encoded_columns_have_the_tables_keys_and_decode_to_the_request():
    request, dense = made()
    columns = COLUMNS.encode(request, dense, 2)
    user, items, free, age, flag = columns
    assert (user.tolist(), items.tolist(), free.tolist()) == ([0, 1], [5, 6, 7, 8, 9, 10], [0, 1])
    assert age is dense["age"]
    assert flag is dense["flag"]
    data = np.frombuffer(b"".join(c.tobytes() for c in columns), np.uint8)
    assert len(data) == 2 * sum(COLUMNS.input_widths)
    features, inputs = COLUMNS.decode_inputs(data, 2)
    assert features["user"].keys.tolist() == [0, 1]
    assert features["items"].keys.tolist() == [10, 11, 12, 13, 14, 15]
    assert features["free"].keys.tolist() == [0, 1]
    assert {each.batch for each in features.values()} == {2}
    for name, array in dense.items():
        np.testing.assert_array_equal(inputs[name], array)


def test_context_feature_of_batch_one_is_repeated():
    request, dense = made(3, items=JaggedKeys(np.array([10, 11, 12]), 1))
    assert COLUMNS.encode(request, dense, 3)[1].tolist() == [5, 6, 7] * 3


@pytest.mark.parametrize(
    "keys",
    [
        {"user": JaggedKeys(np.arange(2), 2, offsets=np.arange(3))},
        {"user": JaggedKeys(np.arange(2), 2, weights=np.ones(2, np.float32))},
        {"user": JaggedKeys(np.arange(4), 2)},
        {"free": JaggedKeys(np.arange(6), 2)},
        {"user": JaggedKeys(np.arange(2, dtype=np.int32), 2)},
        {"user": JaggedKeys(np.arange(4)[::2], 2)},
    ],
    ids=["offsets", "weights", "hotness", "no hotness", "int32", "strides"],
)
def test_request_whose_keys_are_no_column_is_not_encoded(keys):
    request, dense = made(2, **keys)
    assert COLUMNS.encode(request, dense, 2) is None


@pytest.mark.parametrize(("batch", "is_encoded"), [(0, False), (100, True), (101, False)])
def test_only_batches_up_to_the_models_are_encoded(batch, is_encoded):
    request, dense = made(batch)
    assert (COLUMNS.encode(request, dense, batch) is not None) == is_encoded


def test_outputs_are_decoded_in_the_order_of_their_names():
    scores, parts = np.arange(3, dtype="<f4"), np.arange(12, dtype="<f8")
    data = np.frombuffer(scores.tobytes() + parts.tobytes(), np.uint8)
    outputs = COLUMNS.decode_outputs(data, 3, ("parts", "score"))
    assert list(outputs) == ["parts", "score"]
    np.testing.assert_array_equal(outputs["parts"], parts.reshape(3, 2, 2))
    np.testing.assert_array_equal(outputs["score"], scores.reshape(3, 1))
    assert list(COLUMNS.decode_outputs(data, 3, ("score",))) == ["score"]
