"""Execution providers of OnnxModel, ONNX Runtime's two packages, and reports of a GPU that stays unused."""

import logging
import re
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from hps.cuda import loader
from hps.dense import onnx as module
from hps.dense import onnxruntime_loader
from hps.dense.onnx import GpuOptions, OnnxModel
from hps.errors import ConfigError, ModelError
from hps.tools.doctor.networks import NETWORK

WARNING, FATAL = 2, 4


class _FakeRuntime:
    """A fake `onnxruntime` module, without the providers' libraries.

    ``available``: its providers; ``used``: those that its sessions report, None for the requested ones.
    """

    __file__ = "no-folder/__init__.py"

    class SessionOptions:
        pass

    def __init__(self, available, used):
        self._available, self._used = available, used
        self.requested = None
        self.preloaded = 0
        self.severity = WARNING
        self.severities = []

    def preload_dlls(self):
        """Count the call, and print a missing library as ONNX Runtime does."""
        self.preloaded += 1
        print("Failed to load libcublas.so.13")

    def get_available_providers(self):
        return self._available

    def set_default_logger_severity(self, level):
        self.severity = level

    def InferenceSession(self, path, options, providers, enable_fallback):
        assert not enable_fallback
        self.requested = providers
        self.severities.append(self.severity)
        self.options = options
        runtime = self

        class Session:
            def get_providers(self):
                return runtime._used or [p if isinstance(p, str) else p[0] for p in providers]

            def get_inputs(self):
                return []

            get_outputs = get_inputs

        return Session()


@pytest.fixture(autouse=True)
def _machine_without_gpu(monkeypatch):
    """The package for GPUs on a machine without one, whatever the tests run on."""
    monkeypatch.setattr(module, "missing_requirement", lambda: "no GPU")
    with_packages(monkeypatch, "onnxruntime-gpu")
    with_gpu(monkeypatch, False)


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
        ConfigError, match=r"is tensorrt, .* has only CUDA.*install 'hps-server\[gpu\]'"
    ):
        OnnxModel(Path("x.onnx"), "tensorrt")
    for used in ([CUDA, CPU], [CPU]):
        monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime([TENSORRT, CUDA, CPU], used))
        message = (
            r"cannot use GPU 0: its libraries do not load .libnvinfer .*of TensorRT .*docs/gpu.md.*"
            "provider: auto"
        )
        with pytest.raises(ConfigError, match=message):
            OnnxModel(Path("x.onnx"), "tensorrt")


def test_gpu_network_restores_the_threads_current_device(monkeypatch):
    """ONNX Runtime changes the thread's current device to its own and does not restore it."""
    current = SimpleNamespace(device=0)
    cuda = SimpleNamespace(
        getDevice=lambda: current.device,
        setDevice=lambda n: setattr(current, "device", n),
        getDeviceCount=lambda: 3,
    )
    devices_at_run = []

    class Runtime(_FakeRuntime):
        def InferenceSession(self, path, options, providers, enable_fallback):
            session = super().InferenceSession(path, options, providers, enable_fallback)

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


def with_packages(monkeypatch, *names):
    monkeypatch.setattr(onnxruntime_loader, "installed_packages", lambda: names)


def with_gpu(monkeypatch, found):
    """Report only what concerns a machine with (or without) a GPU, each reason anew."""
    monkeypatch.setattr(onnxruntime_loader, "has_gpu", lambda: found)
    onnxruntime_loader.report_once.cache_clear()


CLEAN = r"pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'hps-server\[gpu\]'"
FAULTS = [
    (("onnxruntime",), [CPU], "the package onnxruntime is installed, which has no CUDA"),
    (("onnxruntime", "onnxruntime-gpu"), [CPU], "both installed; .* the files of onnxruntime;"),
    (("onnxruntime-gpu",), [CPU], f"this ONNX Runtime has only {CPU}"),
]


@pytest.mark.parametrize(("packages", "available", "cause"), FAULTS)
def test_missing_cuda_provider_is_a_config_error(monkeypatch, packages, available, cause):
    with_packages(monkeypatch, *packages)
    monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime(available, None))
    with pytest.raises(ConfigError, match=f"dense.provider is cuda, but .*{cause}.*{CLEAN}"):
        OnnxModel(Path("x.onnx"), "cuda")


@pytest.mark.parametrize(("packages", "available", "cause"), FAULTS)
def test_unused_gpu_is_a_warning_once(monkeypatch, caplog, packages, available, cause):
    with_packages(monkeypatch, *packages)
    with_gpu(monkeypatch, True)
    monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime(available, None))
    for _ in range(2):
        assert OnnxModel(Path("x.onnx"), "auto").provider == CPU
    (line,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert re.search(f"run on the CPU, not on a GPU: .*{cause}.*{CLEAN}", line.getMessage())
    caplog.clear()
    OnnxModel(Path("x.onnx"), "cpu")
    assert not caplog.records


def test_machine_without_gpu_gets_no_report(monkeypatch, caplog):
    with_packages(monkeypatch, "onnxruntime")
    with_gpu(monkeypatch, False)
    monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime([CPU], None))
    caplog.set_level(logging.INFO)
    OnnxModel(Path("x.onnx"), "auto")
    assert not caplog.records


def test_both_packages_are_a_warning_even_if_cuda_works(monkeypatch, caplog):
    with_packages(monkeypatch, "onnxruntime", "onnxruntime-gpu")
    with_gpu(monkeypatch, True)
    monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime([CUDA, CPU], None))
    assert OnnxModel(Path("x.onnx"), "auto").provider == CUDA
    assert re.search(f"both installed; .* files of onnxruntime-gpu; run {CLEAN}", caplog.text)


def test_cuda_provider_that_fails_to_load_is_an_error_unless_auto(monkeypatch, caplog):
    with_packages(monkeypatch, "onnxruntime-gpu")
    with_gpu(monkeypatch, True)
    monkeypatch.setitem(sys.modules, "onnxruntime", _FakeRuntime([CUDA, CPU], [CPU]))
    cause = "cannot use GPU 0: its libraries do not load .CUDA and cuDNN: .*cannot open"
    with pytest.raises(ConfigError, match=cause):
        OnnxModel(Path("x.onnx"), "cuda")
    assert OnnxModel(Path("x.onnx"), "auto").provider == CPU
    assert re.search(cause, caplog.text)


def test_session_that_fails_on_the_gpu_alone_is_an_error_unless_auto(monkeypatch, caplog):
    class Runtime(_FakeRuntime):
        def InferenceSession(self, path, options, providers, enable_fallback):
            if len(providers) > 1:
                raise RuntimeError("CUDA failure 35: driver version is insufficient")
            return super().InferenceSession(path, options, providers, enable_fallback)

    with_packages(monkeypatch, "onnxruntime-gpu")
    with_gpu(monkeypatch, True)
    monkeypatch.setitem(sys.modules, "onnxruntime", Runtime([CUDA, CPU], None))
    monkeypatch.setattr(onnxruntime_loader.ctypes, "CDLL", lambda _path: None)
    cause = "ONNX Runtime cannot use GPU 0: CUDA failure 35: driver version is insufficient"
    with pytest.raises(ConfigError, match=f"dense.provider is cuda, but {cause}"):
        OnnxModel(Path("x.onnx"), "cuda")
    assert OnnxModel(Path("x.onnx"), "auto").provider == CPU
    assert cause in caplog.text


def test_gpu_that_does_not_exist_is_named(monkeypatch, caplog):
    """Not the libraries, which ONNX Runtime would blame."""
    with_packages(monkeypatch, "onnxruntime-gpu")
    with_gpu(monkeypatch, True)
    runtime = _FakeRuntime([CUDA, CPU], None)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    monkeypatch.setattr(module, "missing_requirement", lambda: None)
    monkeypatch.setattr(module, "device_count", lambda: 1)
    monkeypatch.setattr(module, "keep_device", nullcontext)
    cause = "GPU 1 of tiers.gpu.devices does not exist: this machine has 1, numbered from 0"
    with pytest.raises(ConfigError, match=f"dense.provider is cuda, but {cause}"):
        OnnxModel(Path("x.onnx"), "cuda", gpu=GpuOptions(device=1))
    assert OnnxModel(Path("x.onnx"), "auto", gpu=GpuOptions(device=1)).provider == CPU
    assert cause in caplog.text
    assert OnnxModel(Path("x.onnx"), "cuda").provider == CUDA


def test_default_logger_is_silent_while_sessions_open_on_a_gpu(monkeypatch):
    """ONNX Runtime prints a coloured warning for each session with a ``device_id``."""
    runtime = _FakeRuntime([CUDA, CPU], None)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    model = OnnxModel(Path("x.onnx"), "cuda")
    model.session_on(0, 4711)
    assert (runtime.severities, runtime.severity) == ([FATAL, FATAL], WARNING)
    OnnxModel(Path("x.onnx"), "cpu")
    assert runtime.severities[2:] == [WARNING]


def test_onnxruntime_prints_nothing_for_a_session_on_a_gpu(capfd):
    """With the real package: it warns about each ``device_id`` without a plug-in provider."""
    import onnxruntime

    providers = [(CUDA, {"device_id": "0"}), CPU]
    options = onnxruntime.SessionOptions()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with onnxruntime_loader.quiet_logger(onnxruntime):
            onnxruntime.InferenceSession(str(NETWORK), options, providers=providers)
        assert capfd.readouterr() == ("", "")
        onnxruntime.InferenceSession(str(NETWORK), options, providers=providers)
    assert "device_id=0" in capfd.readouterr().err, "the warning is gone: so may be the silencing"


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ((), r"not installed: pip install 'hps-server\[cpu\]', or 'hps-server\[gpu\]' for a GPU"),
        (("onnxruntime-gpu",), "does not load .*--force-reinstall --no-deps onnxruntime-gpu"),
    ],
)
@pytest.mark.parametrize("found", [None, SimpleNamespace()], ids=["nothing", "an empty folder"])
def test_missing_onnxruntime_is_a_config_error(monkeypatch, packages, message, found):
    with_packages(monkeypatch, *packages)
    monkeypatch.setitem(sys.modules, "onnxruntime", found)
    with pytest.raises(ConfigError, match=message):
        OnnxModel(Path("x.onnx"))


def test_first_line_of_an_empty_error_is_its_class_name():
    assert module.first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize("provider", ["auto", "cuda"])
def test_network_whose_first_run_fails_on_a_full_gpu_moves_to_the_cpu(
    monkeypatch, caplog, provider
):
    with_gpu(monkeypatch, True)
    runtime = _FakeRuntime([CUDA, CPU], None)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    network = OnnxModel(Path("x.onnx"), provider)

    def run(self, *_arguments):
        if self.get_providers()[0] == CUDA:
            raise RuntimeError("Failed to allocate memory for requested buffer")
        return []

    monkeypatch.setattr(type(network._session), "run", run, raising=False)
    open_session = runtime.InferenceSession

    def open_and_run(*arguments, **options):
        session = open_session(*arguments, **options)
        monkeypatch.setattr(type(session), "run", run, raising=False)
        return session

    monkeypatch.setattr(runtime, "InferenceSession", open_and_run)
    if provider == "cuda":
        with pytest.raises(ModelError, match="Failed to allocate memory"):
            network.warm_up()
        return
    network.warm_up()
    assert network.on_host
    assert network.predict({}) == {}
    (line,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "run on the CPU, not on a GPU: GPU 0: x.onnx: the first run" in line.getMessage()
