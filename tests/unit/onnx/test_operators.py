"""Operators of the domain ``hps`` in models that ONNX Runtime runs in this process."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, RuntimeException

import hps.onnx
from hps.errors import Unsupported
from hps.onnx import operators
from tests.support.onnx_sessions import keys_input, lookup_model, lookup_node, open_session

pytestmark = pytest.mark.usefixtures("node")


def embedding_session(table="plain", dims=1, **attributes):
    nodes = [lookup_node("Embedding", ["keys"], "rows", table, **attributes)]
    shape = [f"d{i}" for i in range(dims)]
    return open_session(lookup_model(nodes, {"keys": (TensorProto.INT64, shape)}, ["rows"]))


def bag_session(table="plain", dims=2, offsets=False, weights=False, **attributes):
    shape = [f"d{i}" for i in range(dims)]
    inputs = {"keys": (TensorProto.INT64, shape)}
    names = ["keys", "offsets" if offsets else "", "weights" if weights else ""]
    if offsets:
        inputs["offsets"] = keys_input("bags")
    if weights:
        inputs["weights"] = (TensorProto.FLOAT, shape)
    while not names[-1]:
        names.pop()
    nodes = [lookup_node("EmbeddingBag", names, "sums", table, **attributes)]
    return open_session(lookup_model(nodes, inputs, ["sums"]))


# -- Embedding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4), (4, 0)], ids=str)
def test_rows_are_those_of_the_table(rows, shape):
    keys = np.random.default_rng(1).integers(0, 100, shape)
    found = embedding_session(dims=len(shape)).run(None, {"keys": np.asarray(keys)})[0]
    assert found.dtype == np.float32
    assert found.shape == (*shape, 8)
    assert np.array_equal(found, rows["plain"][keys])


def test_float16_tables_give_float32(rows):
    found = embedding_session("half").run(None, {"keys": np.arange(100)})[0]
    assert found.dtype == np.float32
    assert np.array_equal(found, rows["half"])


def test_absent_keys_get_the_default():
    found = embedding_session().run(None, {"keys": np.array([-1, 100, 2**62])})[0]
    assert (found == 0.5).all()


def test_rows_longer_than_max_norm_are_scaled_down(rows):
    found = embedding_session(max_norm=1.5).run(None, {"keys": np.arange(100)})[0]
    norms = np.linalg.norm(rows["plain"], axis=1, keepdims=True)
    expected = np.where(norms > 1.5, rows["plain"] * 1.5 / norms, rows["plain"])
    assert np.allclose(found, expected, rtol=1e-6)
    assert not np.array_equal(found, rows["plain"])


def test_rows_of_constant_keys_are_looked_up_at_every_run(node):
    """ONNX Runtime computes other operators on constants once, when the session opens."""
    keys = numpy_helper.from_array(np.array([1_000_000]), "keys")
    nodes = [
        lookup_node("Embedding", ["keys"], "rows", "plain"),
        helper.make_node("Add", ["rows", "bias"], ["out"]),
    ]
    model = lookup_model(nodes, {"bias": (TensorProto.FLOAT, [8])}, ["out"], [keys])
    session, bias = open_session(model), {"bias": np.zeros(8, np.float32)}
    assert (session.run(None, bias)[0] == 0.5).all()
    node.write("m", "plain", [1_000_000], np.full((1, 8), 7, np.float32))
    assert (session.run(None, bias)[0] == 7).all()


# -- EmbeddingBag ------------------------------------------------------------------------------------


def pooled(vectors, weights, mode):
    by = {"sum": 1, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[mode]
    return (vectors * weights[:, None]).sum(0) / by


@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("table", ["plain", "half"])
def test_bags(rows, table, mode, weighted):
    rng = np.random.default_rng(2)
    keys, drawn = rng.integers(0, 100, 12), rng.random(12, np.float32) + np.float32(0.1)
    weights = drawn if weighted else np.ones(12, np.float32)
    inputs = {"keys": keys} | ({"weights": weights} if weighted else {})
    tolerance = {"rtol": 1e-3} if table == "half" else {"rtol": 1e-5}

    jagged = bag_session(table, 1, offsets=True, weights=weighted, mode=mode)
    found = jagged.run(None, inputs | {"offsets": np.array([0, 5, 5])})[0]
    spans = [slice(0, 5), slice(5, 12)]
    expected = [pooled(rows[table][keys[span]], weights[span], mode) for span in spans]
    assert np.allclose(found[[0, 2]], expected, **tolerance)
    assert not found[1].any()

    even = bag_session(table, 2, weights=weighted, mode=mode)
    found = even.run(None, {name: of.reshape(3, 4) for name, of in inputs.items()})[0]
    expected = [pooled(rows[table][keys[i : i + 4]], weights[i : i + 4], mode) for i in (0, 4, 8)]
    assert np.allclose(found, expected, **tolerance)


def test_bags_default_to_the_mean(rows):
    found = bag_session(version="1").run(None, {"keys": np.array([[3, 1]])})[0]
    assert np.allclose(found, rows["plain"][[3, 1]].mean(0), rtol=1e-6)


# -- whole models ------------------------------------------------------------------------------------


def ranker(rows):
    """Two lookups and a dense part: the model, and the same function of arrays."""
    kernel = np.random.default_rng(3).random((12, 1), np.float32)
    nodes = [
        lookup_node("Embedding", ["user"], "user_rows", "plain"),
        lookup_node("EmbeddingBag", ["tags"], "tag_rows", "half", mode="sum"),
        helper.make_node("Concat", ["user_rows", "tag_rows"], ["all"], axis=1),
        helper.make_node("MatMul", ["all", "kernel"], ["score"]),
    ]
    inputs = {"user": keys_input(), "tags": keys_input("batch", 3)}
    weights = [numpy_helper.from_array(kernel, "kernel")]

    def expected(user, tags):
        sums = rows["half"][tags].sum(1).astype(np.float16)
        return np.concatenate([rows["plain"][user], sums], 1) @ kernel

    return lookup_model(nodes, inputs, ["score"], weights), expected


@pytest.mark.parametrize("mode", ["ORT_SEQUENTIAL", "ORT_PARALLEL"])
def test_whole_model(rows, mode):
    model, expected = ranker(rows)
    session = open_session(model, execution_mode=getattr(onnxruntime.ExecutionMode, mode))
    rng = np.random.default_rng(4)
    for batch in (1, 17, 1000):
        user, tags = rng.integers(0, 100, batch), rng.integers(0, 100, (batch, 3))
        found = session.run(["score"], {"user": user, "tags": tags})[0]
        assert np.allclose(found, expected(user, tags), rtol=1e-3)


def test_threads_share_a_session(rows):
    model, expected = ranker(rows)
    session, wrong = open_session(model), []

    def score(seed):
        rng = np.random.default_rng(seed)
        for _ in range(50):
            user, tags = rng.integers(0, 100, 20), rng.integers(0, 100, (20, 3))
            found = session.run(None, {"user": user, "tags": tags})[0]
            wrong.extend([seed] if not np.allclose(found, expected(user, tags), rtol=1e-3) else [])

    threads = [threading.Thread(target=score, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_node_may_be_replaced_while_a_session_is_open(node, rows):
    hps.onnx.register_node("later", node)
    session = embedding_session(node="later")
    hps.onnx.unregister_node("later")
    with pytest.raises(Fail, match=r"NotFound: no node is registered as 'later'"):
        session.run(None, {"keys": np.arange(3)})
    hps.onnx.register_node("later", node)
    assert np.array_equal(session.run(None, {"keys": np.arange(3)})[0], rows["plain"][:3])
    hps.onnx.unregister_node("later")


# -- errors ------------------------------------------------------------------------------------------

WRONG_NODES = {
    "node": ({"node": "nowhere"}, r"NotFound: no node is registered as 'nowhere'.*register_node"),
    "model": ({"model": "n"}, "NotFound: .*'n' is not found"),
    "table": ({"table": "plane"}, "NotFound: .*did you mean 'plain'"),
    "version": ({"version": "7"}, "NotFound: .*version 7 is not found"),
    "no table": ({"table": None}, "BadRequest: a node hps.EmbeddingBag needs .* missing: table"),
    "a number": ({"table": 3}, "BadRequest: a node hps.EmbeddingBag needs .* missing: table"),
    "mode": ({"mode": "max"}, "BadRequest: mode is 'max'; it must be 'sum', 'mean' or 'sqrtn'"),
    "max_norm": (
        {"max_norm": -1.0},
        "BadRequest: max_norm is -1.0; it must be a number, 0 or more",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_NODES)
def test_wrong_nodes_are_rejected_when_the_session_opens(wrong):
    attributes, message = WRONG_NODES[wrong]
    with pytest.raises(RuntimeException, match=message):
        bag_session(**{"table": "plain", **attributes})


KEYS = np.arange(6)
WRONG_INPUTS = {
    "no offsets": ({"dims": 1}, {"keys": KEYS}, "1-D without offsets"),
    "offsets for 2-D": (
        {"offsets": True},
        {"keys": KEYS.reshape(2, 3), "offsets": np.array([0])},
        "2-D with offsets",
    ),
    "3-D": ({"dims": 3}, {"keys": KEYS.reshape(1, 2, 3)}, "3-D without offsets"),
    "first offset": (
        {"dims": 1, "offsets": True},
        {"keys": KEYS, "offsets": np.array([1, 2])},
        "offsets run from 1 to 6",
    ),
    "falling": (
        {"dims": 1, "offsets": True},
        {"keys": KEYS, "offsets": np.array([0, 4, 2])},
        "offsets fall from 4 to 2",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_INPUTS)
def test_wrong_inputs_fail_the_run(wrong):
    options, inputs, message = WRONG_INPUTS[wrong]
    with pytest.raises(Fail, match=f"EmbeddingBag.*BadRequest: .*{message}"):
        bag_session(**options).run(None, inputs)


def test_weights_of_another_shape_raise_bad_request():
    kernel = operators.make_kernel("EmbeddingBag", {"node": "rows", "model": "m", "table": "plain"})
    with pytest.raises(hps.HpsError, match=r"weights have shape \[2\], keys \[1, 2\]"):
        kernel(np.array([[1, 2]]), None, np.ones(2, np.float32))


def test_keys_of_another_type_are_rejected_when_the_session_opens():
    nodes = [lookup_node("Embedding", ["keys"], "rows", "plain")]
    model = lookup_model(nodes, {"keys": (TensorProto.FLOAT, ["n"])}, ["rows"])
    with pytest.raises(Exception, match=r"tensor\(float\)"):
        open_session(model)


def test_twin_has_no_operators(monkeypatch):
    monkeypatch.setattr(operators, "COMPILED", False)
    with pytest.raises(Unsupported, match=r"compiled core.* unset HPS_NATIVE"):
        hps.onnx.register_operators(onnxruntime.SessionOptions())


# -- the process's end -------------------------------------------------------------------------------

PROGRAM = """
import hps, hps.onnx, numpy as np, sys
from tests.support.onnx_sessions import keys_input, lookup_model, lookup_node, open_session

class Node:  # what a layer asks of a node
    models = model = None
    def table(self, *names):
        from hps.types import EmbeddingTable
        return EmbeddingTable.make("plain", 2)
    def lookup(self, model, features, **options):
        from types import SimpleNamespace
        return SimpleNamespace(vectors={"plain": np.ones((len(features["plain"]), 2), np.float32)})

hps.onnx.register_node("rows", Node())
nodes = [lookup_node("Embedding", ["keys"], "rows", "plain")]
session = open_session(lookup_model(nodes, {"keys": keys_input()}, ["rows"]))
print(session.run(None, {"keys": np.arange(3)})[0].sum())
kept = sys.modules["kept"] = session  # freed after all else
"""


def test_process_ends_with_an_open_session():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "6.0\n", "")


RAW = """
import onnxruntime
from hps.native.onnx_library import LIBRARY

options = onnxruntime.SessionOptions()
try:
    options.register_custom_ops_library(LIBRARY)
except Exception as error:
    print(error)
"""


def test_library_alone_has_no_kernels():
    done = subprocess.run(
        [sys.executable, "-c", RAW], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("call hps.onnx.register_operators instead\n")
