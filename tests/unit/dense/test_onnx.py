"""OnnxModel, and the check of a network against model.yaml."""

import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper

from hps.dense.base import NetworkTensor, check_network
from hps.dense.onnx import OnnxModel, convert_to_float16
from hps.errors import DenseModelError, ModelError, Unavailable
from tests.support.onnx_networks import network


def write_network(path: Path, nodes, inputs, outputs, weights=()) -> Path:
    """Write an ONNX file. ``inputs`` and ``outputs``: name -> (type, shape)."""
    path.write_bytes(network(nodes, inputs, outputs, weights))
    return path


@pytest.fixture
def two_outputs(tmp_path):
    """A network of inputs a, b (batch, 3) and outputs sum = a + b, double = sum + sum."""
    tensor = (T.FLOAT, ["batch", 3])
    return write_network(
        tmp_path / "dense.onnx",
        [h.make_node("Add", ["a", "b"], ["sum"]), h.make_node("Add", ["sum", "sum"], ["double"])],
        {"a": tensor, "b": tensor},
        {"sum": tensor, "double": tensor},
    )


def test_predict_returns_requested_outputs(two_outputs):
    model = OnnxModel(two_outputs, "cpu")
    assert model.inputs == (
        NetworkTensor("a", "FP32", (-1, 3)),
        NetworkTensor("b", "FP32", (-1, 3)),
    )
    assert [tensor.name for tensor in model.outputs] == ["sum", "double"]
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    a[1, 1] = np.nan
    outputs = model.predict({"a": a, "b": a})
    assert list(outputs) == ["sum", "double"]
    np.testing.assert_array_equal(outputs["double"], a * 4)
    assert list(model.predict({"a": a, "b": a}, ("double",))) == ["double"]
    model.close()


def test_closed_session_on_a_gpu_is_freed(two_outputs):
    """One on the CPU is freed with its last reference: the last requests of a version are answered."""
    model = OnnxModel(two_outputs, "cpu")
    inputs = {name: np.ones((1, 3), np.float32) for name in "ab"}
    model.close()
    assert model.predict(inputs)
    model.provider = "CUDAExecutionProvider"
    model.close()
    with pytest.raises(Unavailable, match="closed"):
        model.predict(inputs)


def test_concurrent_runs_return_correct_outputs(two_outputs):
    model = OnnxModel(two_outputs, "cpu")
    wrong = []

    def run(i):
        a = np.full((4, 3), i, np.float32)
        answers = (model.predict({"a": a, "b": a})["sum"] for _ in range(200))
        wrong.extend(i for sums in answers if not (sums == 2 * i).all())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_failed_run_raises_a_one_line_error(two_outputs):
    model = OnnxModel(two_outputs, "cpu")
    a = np.ones((2, 3), np.float32)
    with pytest.raises(DenseModelError, match="the dense model failed: ") as error:
        model.predict({"a": a, "b": np.ones((3, 3), np.float32)})
    assert "\n" not in str(error.value)
    with pytest.raises(DenseModelError):
        model.predict({"a": a})
    with pytest.raises(DenseModelError):
        model.predict({"a": a, "b": a}, ("nonsense",))
    assert len(model.predict({"a": a, "b": a})) == 2


def test_network_runs_inline_only_when_measured_and_fast(two_outputs):
    model = OnnxModel(two_outputs, "cpu", inline_us=1e6)
    assert not model.runs_inline(1)
    model.warm_up()
    assert model.runs_inline(1)
    model._one_us, model._sample_us = 100.0, 10.0
    model._inline_us = 150.0
    assert [model.runs_inline(batch) for batch in (1, 6, 7)] == [True, True, False]
    never = OnnxModel(two_outputs, "cpu", inline_us=0.0)
    never.warm_up()
    assert not never.runs_inline(1)


def test_busy_threads_do_not_make_a_network_slow(tmp_path):
    """They hold the interpreter's lock for milliseconds after each run that a load measures."""
    width, between_s, stop = 1024, sys.getswitchinterval(), threading.Event()
    weights = numpy_helper.from_array(np.ones((width, width), np.float32), "w")
    path = write_network(
        tmp_path / "dense.onnx",
        [h.make_node("MatMul", ["a", "w"], ["b"])],
        {"a": (T.FLOAT, ["batch", width])},
        {"b": (T.FLOAT, ["batch", width])},
        [weights],
    )

    def answer_requests() -> None:
        while not stop.is_set():
            sum(range(100))

    busy = threading.Thread(target=answer_requests)
    sys.setswitchinterval(0.1)
    busy.start()
    try:
        model = OnnxModel(path, "cpu", inline_us=50_000.0)
        model.warm_up()
    finally:
        stop.set()
        busy.join()
        sys.setswitchinterval(between_s)
    assert model.runs_inline(1)


def test_runs_correct_what_was_measured_beside_other_work(two_outputs, monkeypatch):
    model, seconds, clock = OnnxModel(two_outputs, "cpu"), [], time.thread_time
    monkeypatch.setattr(
        "hps.dense.onnx.time.thread_time", lambda: seconds.append(1) or len(seconds)
    )
    model.warm_up()
    assert not model.runs_inline(1)
    assert not model.runs_inline(1000)
    monkeypatch.setattr("hps.dense.onnx.time.thread_time", clock)
    a = np.zeros((2, 3), np.float32)
    for _ in range(100):
        model.predict({"a": a, "b": a})
    assert model.runs_inline(1)
    assert model.runs_inline(3)


def test_paced_thread_measures_without_pauses(two_outputs, monkeypatch):
    """Runs after a pause find cold caches: measured so, the network would never run inline."""
    model, events = OnnxModel(two_outputs), []
    monkeypatch.setattr("hps.dense.onnx.rest", lambda: events.append("rest"))
    monkeypatch.setattr(
        OnnxModel, "predict", lambda *_a, f=OnnxModel.predict: (events.append("run"), f(*_a))[1]
    )
    model.warm_up()
    runs = "".join(event[1] for event in events).split("e")
    assert len(runs) == 2
    assert min(map(len, runs)) >= 5


def test_warm_up_reports_a_network_that_cannot_run(tmp_path):
    path = write_network(
        tmp_path / "dense.onnx",
        [h.make_node("MatMul", ["a", "b"], ["c"])],
        {"a": (T.FLOAT, ["n", "k"]), "b": (T.FLOAT, ["n", 3])},
        {"c": (T.FLOAT, ["n", 3])},
    )
    with pytest.raises(ModelError, match=r"dense.onnx: the first run, on zeros .*'a': \[1, 5\]"):
        OnnxModel(path, "cpu").warm_up({"a": NetworkTensor("a", "FP32", (-1, 5))})


@pytest.mark.parametrize("content", [b"", b"not a network"])
def test_invalid_onnx_file_is_a_model_error(tmp_path, content):
    path = tmp_path / "dense.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"dense.onnx: ONNX Runtime cannot load it"):
        OnnxModel(path)


def test_tensor_type_outside_the_protocol_is_a_model_error(tmp_path):
    path = write_network(
        tmp_path / "dense.onnx",
        [h.make_node("Identity", ["s"], ["t"])],
        {"s": (T.STRING, ["n"])},
        {"t": (T.STRING, ["n"])},
    )
    with pytest.raises(ModelError, match=r"'s' is tensor\(string\); use one of"):
        OnnxModel(path, "cpu")


def test_float16_conversion_keeps_float32_inputs_and_outputs(tmp_path):
    weights = h.make_tensor("w", T.FLOAT, [3, 2], np.linspace(-1, 1, 6, dtype=np.float32))
    path = write_network(
        tmp_path / "dense.onnx",
        [h.make_node("MatMul", ["a", "w"], ["score"])],
        {"a": (T.FLOAT, ["batch", 3])},
        {"score": (T.FLOAT, ["batch", 2])},
        [weights],
    )
    wide = OnnxModel(path, "cpu")
    (tmp_path / "narrow.onnx").write_bytes(convert_to_float16(path))
    narrow = OnnxModel(tmp_path / "narrow.onnx", "cpu")
    assert (narrow.inputs, narrow.outputs) == (wide.inputs, wide.outputs)
    rng = np.random.default_rng(1)
    fed = {t.name: rng.random((5, *t.shape[1:]), np.float32) for t in wide.inputs}
    for name, values in wide.predict(fed).items():
        np.testing.assert_allclose(narrow.predict(fed)[name], values, rtol=2e-2, atol=2e-2)
    kinds = {t.data_type for t in onnx.load(tmp_path / "narrow.onnx").graph.initializer}
    assert kinds == {T.FLOAT16}


# -- model.yaml ----------------------------------------------------------------------------------


class _Network:
    inputs = (NetworkTensor("user", "FP32", (-1, 4)), NetworkTensor("hist", "FP32", (-1, -1, 2)))
    outputs = (NetworkTensor("ctr", "FP32", (-1, 1)), NetworkTensor("cvr", "FP32", (-1, 1)))


USER, HIST = NetworkTensor("user", "FP32", (-1, 4)), NetworkTensor("hist", "FP32", (-1, 3, 2))
CTR = NetworkTensor("ctr", "FP32", (-1, 1))


def test_matching_network_passes_the_check():
    check_network("m", _Network(), [USER, HIST], [CTR])
    half = NetworkTensor("user", "FP16", (-1, 4))
    check_network("m", _Network(), [half, HIST], [CTR])


@pytest.mark.parametrize(
    ("fed", "served", "message"),
    [
        ([USER], [CTR], r"feeds nothing to network input 'hist' \(FP32 \[-1, -1, 2\]\)"),
        ([USER, USER, HIST], [CTR], "'user' is fed twice"),
        (
            [USER, HIST, NetworkTensor("x", "FP32", (-1,))],
            [CTR],
            "names input 'x', the network has user, hist",
        ),
        (
            [NetworkTensor("user", "FP32", (-1, 5)), HIST],
            [CTR],
            r"\[-1, 5\] in model.yaml, \[-1, 4\]",
        ),
        ([NetworkTensor("user", "FP32", (-1,)), HIST], [CTR], r"\[-1\] in model.yaml, \[-1, 4\]"),
        (
            [NetworkTensor("user", "INT64", (-1, 4)), HIST],
            [CTR],
            "is INT64 in model.yaml, FP32 in the",
        ),
        (
            [USER, HIST],
            [NetworkTensor("p", "FP32", (-1, 1))],
            "names output 'p', the network has ctr, cvr",
        ),
        (
            [USER, HIST],
            [NetworkTensor("ctr", "FP16", (-1, 1))],
            "is FP16 in model.yaml, FP32 in the",
        ),
    ],
)
def test_mismatching_network_is_a_model_error(fed, served, message):
    with pytest.raises(ModelError, match=message):
        check_network("m", _Network(), fed, served)


def test_network_with_a_fixed_batch_is_a_model_error():
    class Fixed(_Network):
        inputs = (NetworkTensor("user", "FP32", (1, 4)),)

    with pytest.raises(ModelError, match=r"fixed batch in the network, \[1, 4\]; export"):
        check_network("m", Fixed(), [USER], [])
