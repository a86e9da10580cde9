"""OnnxModel, and the check of a network against model.yaml."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h

from hps.cuda import loader
from hps.dense import onnx as module
from hps.dense.base import NetworkTensor, check_network
from hps.dense.onnx import GpuOptions, OnnxModel, convert_to_float16
from hps.errors import ConfigError, DenseModelError, ModelError
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


# -- providers -----------------------------------------------------------------------------------


class _FakeRuntime:
    """A fake `onnxruntime` module.

    ``available``: its providers; ``used``: those that its sessions report, None for the requested ones.
    """

    class SessionOptions:
        pass

    def __init__(self, available, used):
        self._available, self._used = available, used
        self.requested = None
        self.preloaded = 0

    def preload_dlls(self):
        """Count the call, and print a missing library as ONNX Runtime does."""
        self.preloaded += 1
        print("Failed to load libcublas.so.13")

    def get_available_providers(self):
        return self._available

    def InferenceSession(self, path, options, providers):
        self.requested = providers
        self.options = options
        runtime = self

        class Session:
            def get_providers(self):
                return runtime._used or [p if isinstance(p, str) else p[0] for p in providers]

            def get_inputs(self):
                return []

            get_outputs = get_inputs

        return Session()


CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"


@pytest.mark.parametrize(
    ("provider", "available", "requested"),
    [
        ("auto", [CUDA, CPU], [CUDA, CPU]),
        ("auto", [CPU], [CPU]),
        ("cpu", [CUDA, CPU], [CPU]),
        ("cuda", [CUDA, CPU], [CUDA, CPU]),
    ],
)
def test_provider_setting_selects_execution_providers(
    monkeypatch, capfd, provider, available, requested
):
    runtime = _FakeRuntime(available, None)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    assert OnnxModel(Path("x.onnx"), provider, threads=3).provider == requested[0]
    assert runtime.preloaded == (requested[0] == CUDA)
    assert capfd.readouterr().out == ""
    assert [each if isinstance(each, str) else each[0] for each in runtime.requested] == requested
    assert runtime.options.intra_op_num_threads == 3


def test_cuda_uses_tf32_only_when_configured(monkeypatch):
    runtime = _FakeRuntime([CUDA, CPU], None)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    OnnxModel(Path("x.onnx"), "cuda")
    assert runtime.requested[0] == (CUDA, {"device_id": "0", "use_tf32": "0"})
    OnnxModel(Path("x.onnx"), "cuda", gpu=GpuOptions(device=1, tf32=True))
    assert runtime.requested[0] == (CUDA, {"device_id": "1", "use_tf32": "1"})


def test_lane_session_uses_its_device_and_stream(monkeypatch):
    runtime = _FakeRuntime([CUDA, CPU], None)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    model = OnnxModel(Path("x.onnx"), "cuda")
    model.session_on(1, 4711)
    name, options = runtime.requested[0]
    assert name == CUDA
    assert options["device_id"] == "1"
    assert options["user_compute_stream"] == "4711"


def test_cuda_runs_are_recorded_unless_graphs_are_off(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime([CUDA, CPU], None))
    assert OnnxModel(Path("x.onnx"), "cuda").records
    assert not OnnxModel(Path("x.onnx"), "cuda", gpu=GpuOptions(graphs=False)).records
    monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime([TENSORRT, CUDA, CPU], None))
    assert not OnnxModel(Path("x.onnx"), "tensorrt").records


def test_tensorrt_gets_the_float16_option(monkeypatch):
    runtime = _FakeRuntime([TENSORRT, CUDA, CPU], None)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    OnnxModel(Path("x.onnx"), "tensorrt", gpu=GpuOptions(precision="float16"))
    assert runtime.requested[0] == (TENSORRT, {"device_id": "0", "trt_fp16_enable": "1"})
    assert [each[0] for each in runtime.requested[1:-1]] == [CUDA]


def test_missing_or_broken_tensorrt_is_a_config_error(monkeypatch):
    """onnxruntime-gpu has the provider, but does not contain TensorRT itself."""
    runtime = _FakeRuntime([CUDA, CPU], None)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    with pytest.raises(
        ConfigError, match=r"is tensorrt, .* has only CUDA.*install onnxruntime-gpu"
    ):
        OnnxModel(Path("x.onnx"), "tensorrt")
    for used in ([CUDA, CPU], [CPU]):
        monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime([TENSORRT, CUDA, CPU], used))
        message = (
            rf"fell back to {used[0]}: .*libnvinfer .*of TensorRT .*docs/gpu.md.*provider: auto"
        )
        with pytest.raises(ConfigError, match=message):
            OnnxModel(Path("x.onnx"), "tensorrt")


def test_gpu_network_restores_the_threads_current_device(monkeypatch):
    """ONNX Runtime changes the thread's current device to its own and does not restore it."""
    current = SimpleNamespace(device=0)
    cuda = SimpleNamespace(
        getDevice=lambda: current.device, setDevice=lambda n: setattr(current, "device", n)
    )
    devices_at_run = []

    class Runtime(_FakeRuntime):
        def InferenceSession(self, path, options, providers):
            session = super().InferenceSession(path, options, providers)

            def run(names, inputs):
                devices_at_run.append(current.device)
                current.device = 2
                return []

            session.run = run
            current.device = 2
            return session

    monkeypatch.setitem(sys.modules, "onnxruntime", Runtime([CUDA, CPU], None))
    monkeypatch.setattr(module, "missing_requirement", lambda: None)
    monkeypatch.setattr(loader, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=cuda)))
    model = OnnxModel(Path("x.onnx"), "cuda", gpu=GpuOptions(device=2))
    assert current.device == 0
    current.device = 1
    model.predict({})
    model.session_on(2, 0)
    assert (devices_at_run, current.device) == ([1], 1)


def test_float16_on_a_cpu_is_a_config_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime([CPU], None))
    with pytest.raises(ConfigError, match="a CPU is slower in float16"):
        OnnxModel(Path("x.onnx"), "auto", gpu=GpuOptions(precision="float16"))


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


def test_missing_cuda_provider_is_a_config_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime([CPU], None))
    with pytest.raises(ConfigError, match="install onnxruntime-gpu over it"):
        OnnxModel(Path("x.onnx"), "cuda")


def test_cuda_provider_that_fails_to_load_is_an_error_unless_auto(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime([CUDA, CPU], [CPU]))
    with pytest.raises(ConfigError, match=f"fell back to {CPU}"):
        OnnxModel(Path("x.onnx"), "cuda")
    assert OnnxModel(Path("x.onnx"), "auto").provider == CPU


def test_first_line_of_an_empty_error_is_its_class_name():
    assert module.first_line(ValueError()) == "ValueError"


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
