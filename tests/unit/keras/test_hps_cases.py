"""The unit cases of HPS's plug-in for TensorFlow: layers against TensorFlow's functions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.hps_models import TENSORFLOW_MODELS
from tests.support.keras3 import hps_keras
from tests.support.tensorflow import tf

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH = 1_024
TABLES = [(model.name, table) for model in TENSORFLOW_MODELS for table in model.tables]
each_table = pytest.mark.parametrize(
    ("model", "table"), TABLES, ids=[f"{model}-{table.name}" for model, table in TABLES]
)
each_norm = pytest.mark.parametrize("max_norm", [None, 0, 0.1, 10])


def sparse_keys(table, dtype=np.int32):
    """Bags of 1 to ``hotness`` keys, at random columns in ascending order; the case's generator."""
    rng = np.random.default_rng(4)
    sizes = rng.integers(1, table.hotness + 1, BATCH)
    columns = [np.sort(rng.choice(table.hotness, size, replace=False)) for size in sizes]
    indices = np.stack([np.repeat(np.arange(BATCH), sizes), np.concatenate(columns)], 1)
    keys = rng.integers(0, table.rows, len(indices)).astype(dtype)
    return tf.SparseTensor(indices, keys, (BATCH, table.hotness))


@each_table
@each_norm
def test_lookup_layer(ps_json_node, model, table, max_norm):
    keys = np.random.default_rng(5).integers(0, table.rows, (BATCH, table.hotness), np.int32)
    found = hps_keras.Embedding(ps_json_node, model, table.name, max_norm=max_norm)(keys)
    expected = tf.nn.embedding_lookup(table.vectors, keys, max_norm)
    assert found.shape == expected.shape
    if max_norm is None:
        assert np.array_equal(found, expected)
    else:
        assert np.allclose(found, expected, rtol=1e-6, atol=1e-9)


@each_table
@each_norm
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_sparse_lookup_layer(ps_json_node, model, table, combiner, max_norm, weighted):
    keys = sparse_keys(table)
    weights = None
    if weighted:
        drawn = np.random.default_rng(6).random(len(keys.values), np.float32)
        weights = keys.with_values(drawn)
    layer = hps_keras.EmbedReduce(ps_json_node, model, table.name, combiner, max_norm=max_norm)
    expected = tf.nn.embedding_lookup_sparse(
        table.vectors, keys, weights, combiner=combiner, max_norm=max_norm
    )
    assert np.allclose(layer(keys, weights), expected, rtol=1e-5, atol=1e-7)


@each_table
def test_unknown_keys_get_the_default_of_the_ps_json(ps_json_node, model, table):
    found = hps_keras.Embedding(ps_json_node, model, table.name)(
        np.array([[table.rows, 2**31 - 1]])
    )
    assert np.array_equal(found, np.ones((1, 2, table.dim)))


@pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=["int32", "int64"])
def test_model_of_a_sparse_and_a_dense_input(ps_json_node, dtype):
    """Pooled slots of one table and single keys of another, joined by a dense part, in a graph."""
    import keras

    slots, singles = (table for _, table in TABLES[1:])
    inputs = [
        keras.Input((slots.hotness,), sparse=True, dtype=np.dtype(dtype).name),
        keras.Input((2,), dtype=np.dtype(dtype).name),
    ]
    pooled = hps_keras.EmbedReduce(ps_json_node, "bar", slots.name, "mean")(inputs[0])
    flat = keras.layers.Flatten()(hps_keras.Embedding(ps_json_node, "bar", singles.name)(inputs[1]))
    dense = keras.layers.Dense(8, kernel_initializer="ones")
    other = keras.layers.Dense(8, kernel_initializer="ones")
    model = keras.Model(inputs, keras.layers.Add()([dense(pooled), other(flat)]))

    keys, numbers = (
        sparse_keys(slots, dtype),
        np.arange(2 * BATCH, dtype=dtype).reshape(-1, 2) % 2000,
    )
    found = tf.function(model)([keys, tf.constant(numbers)])
    bags = tf.nn.embedding_lookup_sparse(slots.vectors, keys, None, combiner="mean")
    rows = singles.vectors[numbers].reshape(BATCH, -1)
    expected = np.sum(bags, 1, keepdims=True) + rows.sum(1, keepdims=True)
    assert np.allclose(found, np.repeat(expected, 8, 1), rtol=1e-4)
