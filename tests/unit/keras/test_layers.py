"""`hps.keras.Embedding` and `EmbedReduce` on whichever backend Keras has; see test_torch_backend.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hps.errors import BadRequest, NotFound
from tests.support.keras3 import BACKEND, hps_keras, keras

pytestmark = pytest.mark.filterwarnings("ignore")  # Keras's and its backends' own


def array(tensor):
    return keras.ops.convert_to_numpy(tensor)


def clipped(vectors, max_norm):
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.where(norms > max_norm, vectors * (max_norm / norms), vectors)


# -- Embedding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["int32", "int64", *(["uint64"] if BACKEND == "tensorflow" else [])]
)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (4, 0)], ids=str)
def test_rows_are_those_of_the_table(node, rows, shape, dtype):
    numbers = np.random.default_rng(1).integers(0, 100, shape)
    keys = keras.ops.convert_to_tensor(numbers.astype(dtype))
    found = hps_keras.Embedding(node, "m", "plain")(keys)
    assert keras.backend.standardize_dtype(found.dtype) == "float32"
    assert np.array_equal(array(found), rows["plain"][numbers])


def test_arrays_are_taken_too(node, rows):
    found = hps_keras.Embedding(node, "m", "plain")(np.arange(6).reshape(2, 3))
    assert np.array_equal(array(found), rows["plain"][:6].reshape(2, 3, 8))


def test_absent_keys_get_the_default(node):
    keys = keras.ops.convert_to_tensor(np.array([-1, 100, 2**62]))
    assert (array(hps_keras.Embedding(node, "m", "plain")(keys)) == 0.5).all()


@pytest.mark.parametrize("max_norm", [None, 0, 0.1, 1.5, 10])
def test_rows_longer_than_max_norm_are_scaled_down(node, rows, max_norm):
    keys = np.arange(100)
    found = array(hps_keras.Embedding(node, "m", "plain", max_norm=max_norm)(keys))
    expected = rows["plain"] if max_norm is None else clipped(rows["plain"], max_norm)
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("table", "options", "dtype"),
    [
        ("half", {}, "float32"),
        ("half", {"dtype": "float16"}, "float16"),
        ("plain", {"dtype": "mixed_bfloat16"}, "bfloat16"),
    ],
    ids=str,
)
def test_outputs_have_the_compute_dtype_of_the_layer(node, rows, table, options, dtype):
    keys = np.arange(100).reshape(20, 5)
    for layer, expected in (
        (hps_keras.Embedding(node, "m", table, **options), rows[table].reshape(20, 5, -1)),
        (hps_keras.EmbedReduce(node, "m", table, **options), None),
    ):
        found = layer(keys)
        assert keras.backend.standardize_dtype(found.dtype) == dtype
        if expected is not None:
            assert np.allclose(array(keras.ops.cast(found, "float32")), expected, rtol=0.01)


# -- EmbedReduce -------------------------------------------------------------------------------------


def reduced(vectors, weights, combiner):
    by = {
        "sum": 1,
        "mean": weights.sum(1, keepdims=True),
        "sqrtn": np.sqrt((weights**2).sum(1, keepdims=True)),
    }[combiner]
    return (vectors * weights[..., None]).sum(1) / by


@pytest.mark.parametrize("max_norm", [None, 1.2])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags_are_pooled(node, rows, combiner, weighted, max_norm):
    rng = np.random.default_rng(2)
    keys = rng.integers(0, 100, (6, 5))
    weights = rng.random((6, 5), np.float32) + 0.1 if weighted else np.ones((6, 5), np.float32)
    vectors = rows["plain"][keys]
    layer = hps_keras.EmbedReduce(node, "m", "plain", combiner, max_norm=max_norm)
    found = array(layer(keys, weights) if weighted else layer(keys))
    expected = reduced(
        vectors if max_norm is None else clipped(vectors, max_norm), weights, combiner
    )
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_bags_without_keys_or_weight_get_zeros(node):
    layer = hps_keras.EmbedReduce(node, "m", "plain", "mean")
    assert not array(layer(np.zeros((3, 0), np.int64))).any()
    assert not array(layer(np.zeros((3, 2), np.int64), np.zeros((3, 2), np.float32))).any()


def test_padding_of_weight_zero_changes_no_bag(node):
    for combiner in ("sum", "mean", "sqrtn"):
        layer = hps_keras.EmbedReduce(node, "m", "plain", combiner)
        short = layer(np.array([[3, 1]]), np.ones((1, 2), np.float32))
        padded = layer(np.array([[3, 1, 0, 0]]), np.array([[1, 1, 0, 0]], np.float32))
        assert np.array_equal(array(short), array(padded))


def test_weights_are_not_rounded_to_the_compute_dtype(node, rows):
    """257 is 256 in bfloat16."""
    layer = hps_keras.EmbedReduce(node, "m", "plain", "sum", dtype="mixed_bfloat16")
    found = layer(np.array([[3, 3]]), np.array([[257, -256]], np.float32))
    assert np.allclose(array(keras.ops.cast(found, "float32")), rows["plain"][3], rtol=0.01)


# -- models ------------------------------------------------------------------------------------------


def ranker(node):
    keys = keras.Input((3,), dtype="int64", name="keys")
    weights = keras.Input((3,), name="weights")
    rows_of = hps_keras.Embedding(node, "m", "plain", max_norm=1.5, name="rows")(keys)
    bag = hps_keras.EmbedReduce(node, "m", "half", "sqrtn", version=1, name="bag")(keys, weights)
    assert rows_of.shape == (None, 3, 8)
    assert bag.shape == (None, 4)
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(rows_of), bag])
    return keras.Model([keys, weights], keras.layers.Dense(1, name="dense")(joined))


def inputs(batch):
    rng = np.random.default_rng(3)
    return [rng.integers(0, 100, (batch, 3)), rng.random((batch, 3), np.float32)]


def test_functional_model_predicts_in_a_graph(node, rows):
    model, (keys, weights) = ranker(node), inputs(10)
    kernel, bias = (array(each) for each in model.get_layer("dense").weights)
    bag = reduced(rows["half"][keys], weights, "sqrtn").astype(np.float16)
    joined = np.concatenate([clipped(rows["plain"][keys], 1.5).reshape(10, 24), bag], 1)
    assert np.allclose(
        model.predict([keys, weights], batch_size=4, verbose=0), joined @ kernel + bias, atol=1e-3
    )


def test_layers_train_what_is_behind_them(node):
    model, given = ranker(node), inputs(16)
    model.compile("sgd", "mse")
    before = array(model.get_layer("dense").weights[0]).copy()
    model.fit(given, np.ones((16, 1), np.float32), epochs=1, verbose=0)
    assert not np.allclose(array(model.get_layer("dense").weights[0]), before)
    assert model.get_layer("rows").weights == []


def test_saved_model_names_its_node(node, tmp_path):
    hps_keras.register_node("served", node)
    model, given = ranker("served"), inputs(5)
    expected = model.predict(given, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert np.array_equal(loaded.predict(given, verbose=0), expected)
    assert loaded.get_layer("rows").get_config()["max_norm"] == 1.5
    assert loaded.get_layer("bag").get_config() == model.get_layer("bag").get_config()
    hps_keras.unregister_node("served")
    with pytest.raises(Exception, match=r"no node is registered as 'served'"):
        keras.saving.load_model(tmp_path / "model.keras")


def test_configuration_holds_names(node):
    layer = hps_keras.EmbedReduce(node, "m", "plain", "sqrtn", version=1, name="bag")
    config = layer.get_config()
    assert config["node"].startswith("node-")
    expected = {
        "model": "m",
        "table": "plain",
        "version": "1",
        "combiner": "sqrtn",
        "max_norm": None,
    }
    assert expected.items() <= config.items()
    again = hps_keras.EmbedReduce.from_config(config)
    keys = np.array([[3, 1]])
    assert np.array_equal(array(again(keys)), array(layer(keys)))


def test_threads_share_a_layer(node, rows):
    layer, wrong = hps_keras.Embedding(node, "m", "plain"), []

    def look_up(seed):
        keys = np.random.default_rng(seed).integers(0, 100, (50, 20))
        wrong.extend(
            i for i in range(50) if (array(layer(keys[i])) != rows["plain"][keys[i]]).any()
        )

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- errors ------------------------------------------------------------------------------------------


def test_unknown_names_raise_not_found(node):
    with pytest.raises(NotFound, match="did you mean 'plain'"):
        hps_keras.Embedding(node, "m", "plane")
    with pytest.raises(NotFound, match="version 7 is not found"):
        hps_keras.EmbedReduce(node, "m", "plain", version=7)
    with pytest.raises(NotFound, match="no node is registered as 'nowhere'"):
        hps_keras.Embedding("nowhere", "m", "plain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"combiner": "max"}, "combiner is 'max'; it must be 'sum', 'mean' or 'sqrtn'"),
        ({"max_norm": -1}, "max_norm is -1; it must be a number, 0 or more"),
    ],
    ids=["combiner", "max_norm"],
)
def test_wrong_options_raise_bad_request(node, options, message):
    with pytest.raises(BadRequest, match=message):
        hps_keras.EmbedReduce(node, "m", "plain", **options)


KEYS = np.arange(6).reshape(2, 3)
WRONG = {
    "floats": ((KEYS.astype(np.float32),), "keys must be int64, int32 or uint64, got float32"),
    "1-D": ((KEYS[0],), "keys must be 2-D"),
    "3-D": ((KEYS[None],), "keys must be 2-D"),
    "weights' shape": ((KEYS, np.ones((2, 2), np.float32)), "weights have shape"),
    "weights' dtype": ((KEYS, KEYS), "weights must be floating point, got int64"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_raise_bad_request(node, wrong):
    arguments, message = WRONG[wrong]
    with pytest.raises(BadRequest, match=message):
        hps_keras.EmbedReduce(node, "m", "plain")(*arguments)


def test_symbolic_keys_that_are_no_integers_raise_bad_request(node):
    with pytest.raises(BadRequest, match=r"got float32; keras\.Input takes dtype='int64'"):
        hps_keras.Embedding(node, "m", "plain")(keras.Input((3,)))


def test_backend_is_the_one_asked_for():
    assert keras.backend.backend() == BACKEND
