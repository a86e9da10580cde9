"""ONNX Runtime in this process: on the CPU, or on a GPU with onnxruntime-gpu."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hps.cuda.loader import device_count, keep_device, missing_device, missing_requirement
from hps.dense.base import NetworkTensor
from hps.dense.onnxruntime_loader import (
    PROVIDERS,
    Provider,
    choose_provider,
    import_onnxruntime,
    load_failure,
    preload_cuda,
    quiet_logger,
    report_unused_gpu,
)
from hps.errors import ConfigError, DenseModelError, ModelError, Unavailable
from hps.threads import rest

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
_WARM_RUNS = 5


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
    network and ``ConfigError`` for a provider that cannot be used."""

    takes_device_arrays = False
    """`predict` takes host arrays only; the lanes of `hps.dense.lanes` take device arrays."""

    def __init__(
        self,
        path: Path,
        provider: Provider = "auto",
        threads: int = 1,
        inline_us: float = 250.0,
        gpu: GpuOptions | None = None,
    ) -> None:
        self._ort = import_onnxruntime()
        self.path = path
        self._gpu = gpu or GpuOptions()
        self._threads = threads
        self._required = provider != "auto"
        self._provider = choose_provider(self._ort, provider)
        self._beside: Callable[[], AbstractContextManager[None]] = nullcontext
        if self._provider:
            preload_cuda(self._ort)
            if missing_requirement() is None:  # ONNX Runtime changes the thread's device
                self._beside = keep_device
        self._network: Any = str(path)
        if self._gpu.precision == "float16":
            self._network = self._narrowed(provider)
        self._session = self._open_chosen(provider)
        self.provider: str = self._session.get_providers()[0]
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
        return self._gpu.graphs and self.provider == PROVIDERS["cuda"]

    def session_on(self, device: int, stream: int) -> Any:
        """Open one more session of the network on a stream of a device, for `lanes.py`."""
        if self.on_host:
            return self._open([])
        return self._open(self._options_of(device, stream))

    def run_options(self) -> Any:
        """Return the options of runs that do not wait for the device."""
        options = self._ort.RunOptions()
        options.log_severity_level = 4
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        # Disables ONNX Runtime's graph capture: its search for a missing entry costs 50 µs a run.
        options.add_run_config_entry("gpu_graph_id", "-1")
        return options

    def _open_chosen(self, provider: Provider) -> Any:
        """Open the first session: on the GPU, or on the CPU if there is none and ``provider`` is auto.

        Raises ConfigError if the configured provider cannot be used."""
        if self._provider is None:
            return self._open([])
        why = None
        if missing_requirement() is None:
            why = missing_device([self._gpu.device], device_count())
        if why is None:
            session, why = self._open_on_gpu(provider)
        if why is None:
            return session
        if provider != "auto":
            raise ConfigError(
                f"dense.provider is {provider}, but {why}; fix that, or set dense.provider: auto"
            )
        report_unused_gpu(why)
        return self._open([])

    def _open_on_gpu(self, provider: Provider) -> tuple[Any, str | None]:
        """Open a session on the GPU; also return why it is not there, None if it is."""
        try:
            session = self._open(self._options_of(self._gpu.device, None))
        except ModelError as error:
            self._open([])  # raises if the network is at fault
            session, reason = None, first_line(error.__cause__ or error)
        else:
            used = session.get_providers()[0]
            if used == self._provider:
                return session, None
            reason = f"it fell back to {used}"
        why = load_failure(self._ort, provider, reason)
        return session, f"ONNX Runtime cannot use GPU {self._gpu.device}: {why}"

    def _open(self, providers: list[Any]) -> Any:
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors are raised, not printed
        everywhere = [*providers, "CPUExecutionProvider"]
        quiet = quiet_logger(self._ort) if providers else nullcontext()
        try:
            with self._beside(), quiet:
                # No fallback: ONNX Runtime would print the error and go on without the GPU.
                return self._ort.InferenceSession(
                    self._network, options, providers=everywhere, enable_fallback=0
                )
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
        session = self._session
        if session is None:
            raise Unavailable("the network is closed")
        expected_us = self._expected_us(len(next(iter(inputs.values()), ())))
        is_timed = self.on_host and self._inline_us < expected_us < math.inf
        start = time.thread_time() if is_timed else 0.0
        try:
            with self._beside():
                arrays = session.run(names, inputs)
        except Exception as error:
            raise DenseModelError(f"the dense model failed: {first_line(error)}") from error
        if is_timed:
            self._lower_expected(expected_us, (time.thread_time() - start) * 1e6)
        return dict(zip(names, arrays, strict=True))

    def runs_inline(self, batch: int) -> bool:
        return self._expected_us(batch) <= self._inline_us

    def _expected_us(self, batch: int) -> float:
        return self._one_us + self._sample_us * (batch - 1)

    def _lower_expected(self, expected_us: float, took_us: float) -> None:
        """Expect less of all batches if a run took less than expected.

        A warm-up beside requests measures up to five times too much: other threads evict the network's data
        from the processor's caches. Later runs would then go to the pool, which costs a server a third of its
        rate."""
        if took_us < expected_us:
            self._one_us *= took_us / expected_us
            self._sample_us *= took_us / expected_us

    def warm_up(self, fed: Mapping[str, NetworkTensor] | None = None) -> None:
        """Run on zeros, to allocate memory and to measure small and larger batches.

        ``fed`` gives the shapes where the network has variable dimensions; others count as 1. With the
        provider ``auto``, a network that fails on the GPU, whose memory may be full, moves to the CPU."""
        fed = fed or {}
        try:
            self._measure(fed)
        except ModelError as error:
            if self.on_host or self._required:
                raise
            self._session = self._open([])
            self.provider = self._session.get_providers()[0]
            self._measure(fed)  # raises if the network is at fault
            report_unused_gpu(f"GPU {self._gpu.device}: {error}")

    def _measure(self, fed: Mapping[str, NetworkTensor]) -> None:
        one = self._time(1, fed)
        rest()  # not between the runs, which would find cold caches
        many = self._time(_WARM_BATCH, fed)
        self._sample_us = max(0.0, (many - one) / (_WARM_BATCH - 1))
        self._one_us = one

    def _time(self, batch: int, fed: Mapping[str, NetworkTensor]) -> float:
        """Return the microseconds of the best of five runs.

        On the host, of this thread's time: other threads, which may answer requests meanwhile, delay a run,
        and their delay would send later runs to the pool."""
        zeros = {}
        for tensor in self.inputs:
            fed_shape = fed.get(tensor.name, tensor).shape
            sizes = (max(a, b) for a, b in zip(tensor.shape[1:], fed_shape[1:], strict=True))
            shape = (batch, *(abs(size) for size in sizes))
            zeros[tensor.name] = np.zeros(shape, tensor.dtype)
        times: list[float] = []
        clock = time.thread_time if self.on_host else time.perf_counter
        try:
            for _ in range(_WARM_RUNS):
                start = clock()
                outputs = self.predict(zeros)
                times.append(clock() - start)
        except DenseModelError as error:
            shapes = {name: list(array.shape) for name, array in zeros.items()}
            raise ModelError(
                f"{self.path}: the first run, on zeros {shapes}, failed: {error}"
            ) from None
        self.tails = {name: a.shape[1:] for name, a in (*zeros.items(), *outputs.items())}
        return min(times) * 1e6

    def close(self) -> None:
        """Free the session on a GPU, after the runs in flight; later runs raise Unavailable.

        A session on the CPU is freed with its last reference."""
        if not self.on_host:
            self._session = None


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


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
