"""ONNX Runtime in this process: on the CPU, or on a GPU with onnxruntime-gpu."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hps.cuda.loader import keep_device, missing_requirement
from hps.dense.base import NetworkTensor
from hps.environment import disable_onnxruntime_telemetry
from hps.errors import ConfigError, DenseModelError, ModelError

Provider = Literal["auto", "cpu", "cuda", "tensorrt"]
_PROVIDERS = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_LIBRARIES = {
    "cuda": "CUDA and cuDNN",
    "tensorrt": "libnvinfer and libnvonnxparser of TensorRT 10, and CUDA and cuDNN",
}

_DATATYPE_OF = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
}
_WARM_BATCH = 64


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Options of a network on a GPU; see the settings of the same names."""

    device: int = 0
    precision: Literal["float32", "float16"] = "float32"
    tf32: bool = False
    graphs: bool = True


class OnnxModel:
    """A network in a ``dense.onnx``, run by ONNX Runtime in this process.

    ``threads`` per run; 0: ONNX Runtime chooses. ``inline_us``: runs that take less, as measured by
    ``warm_up``, run on the caller's thread. Raises ``ModelError`` for a file that is not a usable
    network and ``ConfigError`` for a provider that is not installed."""

    takes_device_arrays = False
    """`predict` takes host arrays only; the lanes of `hps.dense.lanes` take device arrays."""

    def __init__(
        self,
        path: Path,
        provider: Provider = "auto",
        threads: int = 1,
        inline_us: float = 150.0,
        gpu: GpuOptions | None = None,
    ) -> None:
        disable_onnxruntime_telemetry()
        import onnxruntime as ort

        self.path = path
        self._gpu = gpu or GpuOptions()
        self._threads = threads
        self._provider = _choose(ort, provider)
        self._beside: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._provider:
            _load_cuda(ort)
            if missing_requirement() is None:  # ONNX Runtime changes the thread's device
                self._beside = keep_device
        self._network: Any = str(path)
        if self._gpu.precision == "float16":
            self._network = self._narrowed(provider)
        self._session = self._open(self._options_of(self._gpu.device, None))
        self.provider: str = self._session.get_providers()[0]
        if provider in _PROVIDERS and self.provider != _PROVIDERS[provider]:
            raise ConfigError(
                f"dense.provider is {provider}, but ONNX Runtime fell back to {self.provider}: its "
                f"libraries do not load ({_LIBRARIES[provider]}); install them (docs/gpu.md) or set "
                "dense.provider: auto"
            )
        self.inputs = tuple(_info(path, node) for node in self._session.get_inputs())
        self.outputs = tuple(_info(path, node) for node in self._session.get_outputs())
        self._names = [tensor.name for tensor in self.outputs]
        self.tails: dict[str, tuple[int, ...]] = {}
        """Shape of each tensor without its batch, as `warm_up` measured it."""
        self._inline_us = inline_us
        self._one_us = float("inf")  # until it is measured, every run goes to the pool
        self._sample_us = 0.0

    @property
    def on_host(self) -> bool:
        return self.provider == "CPUExecutionProvider"

    @property
    def records(self) -> bool:
        """True if a run's work on the device may be recorded as a CUDA graph and launched again.

        ONNX Runtime's own recording is not used: a CUDA call of another thread at the same time, such
        as a write into the cache, makes it fail, and the request with it."""
        return self._gpu.graphs and self.provider == _PROVIDERS["cuda"]

    def session_on(self, device: int, stream: int) -> Any:
        """Open one more session of the network on a stream of a device, for `lanes.py`."""
        if self.on_host:
            return self._open([])
        return self._open(self._options_of(device, stream))

    def run_options(self) -> Any:
        """Return the options of runs that do not wait for the device."""
        import onnxruntime as ort

        options = ort.RunOptions()
        options.log_severity_level = 4
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        # Disables ONNX Runtime's graph capture: its search for a missing entry costs 50 µs a run.
        options.add_run_config_entry("gpu_graph_id", "-1")
        return options

    def _open(self, providers: list[Any]) -> Any:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors are raised, not printed
        everywhere = [*providers, "CPUExecutionProvider"]
        try:
            with self._beside():
                return ort.InferenceSession(self._network, options, providers=everywhere)
        except Exception as error:
            message = f"{self.path}: ONNX Runtime cannot load it: {first_line(error)}"
            raise ModelError(message) from error

    def _options_of(self, device: int, stream: int | None) -> list[Any]:
        """Return the configured providers with their options."""
        if self._provider is None:
            return []
        # TF32, ONNX Runtime's default, keeps 11 of float32's 24 bits: scores differ by 3e-3 from the
        # trainer's.
        common = {"device_id": str(device)}
        if stream is not None:
            common["user_compute_stream"] = str(stream)
        cuda = {**common, "use_tf32": "01"[self._gpu.tf32]}
        providers: list[Any] = [("CUDAExecutionProvider", cuda)]
        if self._provider == "TensorrtExecutionProvider":
            narrow = "01"[self._gpu.precision == "float16"]
            providers.insert(0, (self._provider, {**common, "trt_fp16_enable": narrow}))
        return providers

    def _narrowed(self, provider: Provider) -> Any:
        """Return the network in float16 with unchanged inputs and outputs. TensorRT converts it itself."""
        if self._provider is None:
            raise ConfigError(
                f"dense.precision is float16, but the network runs on the CPU (dense.provider: {provider}); "
                "a CPU is slower in float16: set dense.precision: float32"
            )
        if self._provider == "TensorrtExecutionProvider":
            return str(self.path)
        return convert_to_float16(self.path)

    def predict(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: tuple[str, ...] | None = None,
        deadline: float | None = None,
    ) -> dict[str, NDArray[Any]]:
        names = self._names if outputs is None else list(outputs)
        try:
            with self._beside():
                arrays = self._session.run(names, inputs)
        except Exception as error:
            raise DenseModelError(f"the dense model failed: {first_line(error)}") from error
        return dict(zip(names, arrays, strict=True))

    def runs_inline(self, batch: int) -> bool:
        return self._one_us + self._sample_us * (batch - 1) <= self._inline_us

    def warm_up(self, fed: Mapping[str, NetworkTensor] | None = None) -> None:
        """Run on zeros, to allocate memory and to measure small and larger batches.

        ``fed`` gives the shapes where the network has variable dimensions; others count as 1."""
        one, many = self._time(1, fed or {}), self._time(_WARM_BATCH, fed or {})
        self._sample_us = max(0.0, (many - one) / (_WARM_BATCH - 1))
        self._one_us = one

    def _time(self, batch: int, fed: Mapping[str, NetworkTensor]) -> float:
        """Return the microseconds of the best of five runs."""
        zeros = {}
        for tensor in self.inputs:
            fed_shape = fed.get(tensor.name, tensor).shape
            sizes = (max(a, b) for a, b in zip(tensor.shape[1:], fed_shape[1:], strict=True))
            shape = (batch, *(abs(size) for size in sizes))
            zeros[tensor.name] = np.zeros(shape, tensor.dtype)
        best = float("inf")
        try:
            for _ in range(5):
                start = time.perf_counter()
                outputs = self.predict(zeros)
                best = min(best, time.perf_counter() - start)
        except DenseModelError as error:
            shapes = {name: list(array.shape) for name, array in zeros.items()}
            raise ModelError(
                f"{self.path}: the first run, on zeros {shapes}, failed: {error}"
            ) from None
        self.tails = {name: a.shape[1:] for name, a in (*zeros.items(), *outputs.items())}
        return best * 1e6

    def close(self) -> None:
        """Do nothing: the session is freed with its last reference, after the last run in flight."""


def _choose(ort: Any, provider: Provider) -> str | None:
    """Choose the provider to use besides the CPU's; None: the CPU's alone."""
    have = ort.get_available_providers()
    if provider == "auto":
        return "CUDAExecutionProvider" if "CUDAExecutionProvider" in have else None
    if provider == "cpu":
        return None
    if _PROVIDERS[provider] not in have:
        raise ConfigError(
            f"dense.provider is {provider}, but this ONNX Runtime has only "
            f"{', '.join(have)}; install onnxruntime-gpu over it (docs/gpu.md), or set it to auto"
        )
    return _PROVIDERS[provider]


def _load_cuda(ort: Any) -> None:
    """Load CUDA and cuDNN from pip's folders, if present; ONNX Runtime searches only those of the system.

    Messages of libraries that fail to load are suppressed: a session without CUDA reports the error."""
    if hasattr(ort, "preload_dlls"):  # since version 1.21
        with redirect_stdout(StringIO()):
            ort.preload_dlls()


def convert_to_float16(path: Path) -> bytes:
    """Return the network of ``path`` with float16 weights and operators, its inputs and outputs unchanged."""
    try:
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16
    except ImportError as error:
        raise ConfigError(
            f"dense.precision float16 needs the package onnx ({error}): pip install onnx"
        ) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about values rounded to the nearest float16
        model = convert_float_to_float16(onnx.load(str(path)), keep_io_types=True)
    return bytes(model.SerializeToString())


def _info(path: Path, node: Any) -> NetworkTensor:
    datatype = _DATATYPE_OF.get(node.type)
    if datatype is None:
        raise ModelError(
            f"{path}: tensor {node.name!r} is {node.type}; use one of {', '.join(_DATATYPE_OF)}"
        )
    shape = tuple(size if isinstance(size, int) else -1 for size in node.shape)
    return NetworkTensor(node.name, datatype, shape)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
