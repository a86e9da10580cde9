"""ONNX Runtime in this process: on the CPU, or on a GPU when onnxruntime-gpu is installed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hps.config.environment import keep_onnxruntime_quiet
from hps.dense.base import TensorInfo
from hps.errors import ConfigError, DenseModelError, ModelError

Provider = Literal["auto", "cpu", "cuda"]

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


class OnnxModel:
    """A ``dense.onnx``. ``threads`` within one run, 0 lets ONNX Runtime choose.

    ``inline_us``: runs that take less, judged by ``warm_up``, are done without a thread hop.
    Raises ``ModelError`` for a file that is not a usable network and ``ConfigError`` for a provider
    that is not there.
    """

    def __init__(
        self, path: Path, provider: Provider = "auto", threads: int = 1, inline_us: float = 150.0
    ) -> None:
        keep_onnxruntime_quiet()
        import onnxruntime as ort

        self.path = path
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # what goes wrong is raised, not printed
        providers = _providers(ort, provider)
        try:
            self._session = ort.InferenceSession(str(path), options, providers=providers)
        except Exception as error:
            raise ModelError(
                f"{path}: ONNX Runtime cannot load it: {_first_line(error)}"
            ) from error
        self.provider: str = self._session.get_providers()[0]
        if provider == "cuda" and self.provider != "CUDAExecutionProvider":
            raise ConfigError(
                f"dense.provider is cuda, but ONNX Runtime fell back to {self.provider}: its CUDA or "
                "cuDNN libraries do not load; install them or set dense.provider: cpu"
            )
        self.inputs = tuple(_info(path, node) for node in self._session.get_inputs())
        self.outputs = tuple(_info(path, node) for node in self._session.get_outputs())
        self._names = [tensor.name for tensor in self.outputs]
        self._inline_us = inline_us
        self._one_us = float("inf")  # until measured, every run hops
        self._sample_us = 0.0

    def predict(
        self, inputs: Mapping[str, NDArray[Any]], outputs: tuple[str, ...] | None = None
    ) -> dict[str, NDArray[Any]]:
        names = self._names if outputs is None else list(outputs)
        try:
            arrays = self._session.run(names, inputs)
        except Exception as error:
            raise DenseModelError(f"the dense model failed: {_first_line(error)}") from error
        return dict(zip(names, arrays, strict=True))

    def runs_inline(self, batch: int) -> bool:
        return self._one_us + self._sample_us * (batch - 1) <= self._inline_us

    def warm_up(self, fed: Mapping[str, TensorInfo] | None = None) -> None:
        """Run on zeros, for the allocations and for the time of small and larger batches.

        ``fed`` says the shapes where the network leaves them open; open ones count as 1.
        """
        one, many = self._time(1, fed or {}), self._time(_WARM_BATCH, fed or {})
        self._sample_us = max(0.0, (many - one) / (_WARM_BATCH - 1))
        self._one_us = one

    def _time(self, batch: int, fed: Mapping[str, TensorInfo]) -> float:
        """Microseconds of the best of five runs."""
        zeros = {}
        for tensor in self.inputs:
            asked = fed.get(tensor.name, tensor).shape
            sizes = (max(a, b) for a, b in zip(tensor.shape[1:], asked[1:], strict=True))
            shape = (batch, *(abs(size) for size in sizes))
            zeros[tensor.name] = np.zeros(shape, tensor.dtype)
        best = float("inf")
        try:
            for _ in range(5):
                start = time.perf_counter()
                self.predict(zeros)
                best = min(best, time.perf_counter() - start)
        except DenseModelError as error:
            shapes = {name: list(array.shape) for name, array in zeros.items()}
            raise ModelError(
                f"{self.path}: the first run, on zeros {shapes}, failed: {error}"
            ) from None
        return best * 1e6

    def close(self) -> None:
        """Memory goes back when the last run in flight ends."""


def _providers(ort: Any, provider: Provider) -> list[str]:
    have = ort.get_available_providers()
    if provider == "cuda" and "CUDAExecutionProvider" not in have:
        raise ConfigError(
            "dense.provider is cuda, but this ONNX Runtime has only "
            f"{', '.join(have)}; install onnxruntime-gpu in place of onnxruntime, or set it to auto"
        )
    if provider != "cpu" and "CUDAExecutionProvider" in have:
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


def _info(path: Path, node: Any) -> TensorInfo:
    datatype = _DATATYPE_OF.get(node.type)
    if datatype is None:
        raise ModelError(
            f"{path}: tensor {node.name!r} is {node.type}; use one of {', '.join(_DATATYPE_OF)}"
        )
    shape = tuple(size if isinstance(size, int) else -1 for size in node.shape)
    return TensorInfo(node.name, datatype, shape)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
