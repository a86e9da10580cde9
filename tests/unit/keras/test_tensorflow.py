"""Layers on TensorFlow: ragged and sparse keys, graphs, gradients, and what can be saved."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from hps.errors import BadRequest, Unsupported
from tests.support.keras3 import hps_keras, keras
from tests.support.tensorflow import tf

pytestmark = pytest.mark.filterwarnings("ignore")


def bags(kind, keys):
    """``keys``: a list of keys for each sample."""
    ragged = tf.ragged.constant(keys, dtype=tf.int64)
    return ragged if kind == "ragged" else ragged.to_sparse()


BAGS = [[3, 1, 4], [], [1], [5, 9, 2, 6], []]


def expected_sums(rows, weights=None):
    table, total = rows["plain"], np.zeros((5, 8), np.float32)
    for i, keys in enumerate(BAGS):
        for j, key in enumerate(keys):
            total[i] += table[key] * (1 if weights is None else weights[i][j])
    return total


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_bags_of_different_lengths(node, rows, kind, weighted, graph):
    layer, keys = hps_keras.EmbedReduce(node, "m", "plain", "sum"), bags(kind, BAGS)
    factors = [[0.5 + key for key in bag] for bag in BAGS] if weighted else None
    weights = None
    if weighted:
        weights = tf.ragged.constant(factors, dtype=tf.float32)
        weights = weights if kind == "ragged" else weights.to_sparse()
    found = (tf.function(layer) if graph else layer)(keys, weights)
    assert np.allclose(found, expected_sums(rows, factors), rtol=1e-6)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_ragged_keys_give_ragged_rows(node, rows, graph):
    layer, keys = hps_keras.Embedding(node, "m", "plain"), bags("ragged", BAGS)
    found = (tf.function(layer) if graph else layer)(keys)
    assert isinstance(found, tf.RaggedTensor)
    assert found.row_lengths().numpy().tolist() == [3, 0, 1, 4, 0]
    assert np.array_equal(found.flat_values, rows["plain"][keys.flat_values])


def test_shapes_are_known_in_graphs(node):
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.int64)])
    def look_up(keys):
        found = hps_keras.Embedding(node, "m", "plain")(keys)
        pooled = hps_keras.EmbedReduce(node, "m", "half")(keys)
        shapes.extend([found.shape.as_list(), pooled.shape.as_list()])
        return found, pooled

    look_up(tf.zeros((2, 3), tf.int64))
    assert shapes == [[None, 3, 8], [None, 4]]


def test_graph_looks_rows_up_whenever_it_runs(node):
    """Not once: a row may change between two runs."""
    lookups = []

    class CountingNode:
        table, model, models = node.table, node.model, node.models

        def lookup(self, *arguments, **options):
            lookups.append(arguments)
            return node.lookup(*arguments, **options)

    layer = hps_keras.Embedding(CountingNode(), "m", "plain")
    graph = tf.function(lambda: (layer(tf.constant([1, 2])), layer(tf.constant([1, 2]))))
    for _ in range(3):
        graph()
    assert len(lookups) == 6


def test_errors_in_a_graph_have_the_text_of_hps(node):
    layer = hps_keras.EmbedReduce(node, "m", "plain")
    keys = tf.SparseTensor([[1, 0], [0, 0]], tf.constant([1, 2], tf.int64), (2, 1))
    with pytest.raises(BadRequest, match=r"not in row order; pass tf\.sparse\.reorder"):
        layer(keys)
    with pytest.raises(tf.errors.UnknownError, match=r"BadRequest.* not in row order"):
        tf.function(layer)(keys)


RAGGED = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
WRONG = {
    "kinds": (
        (RAGGED, tf.ones((2, 2))),
        "weights are .*EagerTensor, keys RaggedTensor: not alike",
    ),
    "splits": ((RAGGED, tf.ragged.constant([[1.0], [2.0, 3.0]])), "equal row_splits"),
    "indices": (
        (
            RAGGED.to_sparse(),
            tf.SparseTensor([[0, 0], [1, 0], [1, 1]], tf.ones(3), (2, 2)),
        ),
        "equal indices",
    ),
    "ragged 3-D": (
        (tf.RaggedTensor.from_row_lengths(tf.ones((3, 2), tf.int64), [2, 1]),),
        "keys must be 2-D",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kinds_raise_bad_request(node, wrong):
    arguments, message = WRONG[wrong]
    with pytest.raises(BadRequest, match=message):
        hps_keras.EmbedReduce(node, "m", "plain")(*arguments)


def test_sparse_keys_are_not_embedded_one_by_one(node):
    with pytest.raises(BadRequest, match=r"keys are sparse; .* EmbedReduce"):
        hps_keras.Embedding(node, "m", "plain")(RAGGED.to_sparse())


# -- gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_gradient_for_weights_raises_an_error_with_the_remedy(node, graph):
    layer, keys = hps_keras.EmbedReduce(node, "m", "plain", "sum"), tf.constant([[3, 1]])

    def gradient(weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            total = tf.reduce_sum(layer(keys, weights))
        return tape.gradient(total, weights)

    with pytest.raises(Unsupported, match=r"for inference: .* tf\.stop_gradient\(weights\)"):
        (tf.function(gradient) if graph else gradient)(tf.ones((1, 2)))


def test_stopped_gradient_is_none(node):
    layer, keys = hps_keras.EmbedReduce(node, "m", "plain", "sum"), tf.constant([[3, 1]])
    weights = tf.ones((1, 2))
    with tf.GradientTape() as tape:
        tape.watch(weights)
        total = tf.reduce_sum(layer(keys, tf.stop_gradient(weights)))
    assert tape.gradient(total, weights) is None


# -- saving ------------------------------------------------------------------------------------------

LOAD = """
import sys, tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
try:
    model.serve(tf.constant([[1, 2]], tf.int64))
except tf.errors.OpError as error:
    print(type(error).__name__, "pyfunc" in str(error))
"""


def test_saved_model_of_tensorflow_runs_in_this_process_only(node, rows, tmp_path):
    """As docs/keras.md states: it holds a call of this process's Python."""
    keys = keras.Input((2,), dtype="int64")
    model = keras.Model(keys, hps_keras.Embedding(node, "m", "plain")(keys))
    path = str(tmp_path / "saved")
    model.export(path, verbose=False)
    here = tf.saved_model.load(path).serve(tf.constant([[1, 2]], tf.int64))
    assert np.array_equal(here[0], rows["plain"][[1, 2]])
    paths = f"import sys; sys.path[:] = {sys.path!r}\n"
    there = subprocess.run(
        [sys.executable, "-c", paths + LOAD, path], capture_output=True, text=True, check=True
    )
    assert there.stdout.split()[1:] == ["True"]


def test_models_are_not_compiled_by_xla(node):
    keys = keras.Input((2,), dtype="int64")
    model = keras.Model(keys, hps_keras.Embedding(node, "m", "plain")(keys))
    with pytest.warns(UserWarning, match=r"doesn't support `jit_compile=True`"):
        model.compile(jit_compile=True)
    assert model.predict(np.array([[1, 2]]), verbose=0).shape == (1, 2, 8)
