"""Settings of the dense networks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from hps.config.checks import ConfigFinding, finding, is_address, is_loopback
from hps.config.model_schema import Name, StrictModel
from hps.config.server_settings import ClientTlsSettings


class TritonTlsSettings(ClientTlsSettings):
    """TLS of the connections to Triton."""


class TritonTarget(StrictModel):
    """Name and version of a model's network in Triton."""

    name: str = Field(min_length=1)
    """The network's name in Triton."""
    version: str = Field("", pattern=r"^[0-9]*$")
    """The version in Triton; empty: Triton's version policy decides."""


class TritonSettings(StrictModel):
    """A Triton server that runs dense networks."""

    url: str = Field(min_length=1)
    """`host:port` of Triton's gRPC or HTTP port."""
    protocol: Literal["grpc", "http"] = "grpc"
    """The protocol of that port; HTTP is faster for small batches, see docs/triton.md."""
    tls: TritonTlsSettings | None = None
    """TLS certificates; null: plain text."""
    models: dict[Name, TritonTarget] = {}
    """Models whose networks Triton runs, with their names there; empty: all, `<m>` as `<m>.dense`."""
    channels: int = Field(2, ge=1, le=64)
    """gRPC connections, used in turn."""
    timeout_ms: float = Field(1_000.0, gt=0)
    """Timeout of one run, within the request's deadline."""
    retries: int = Field(2, ge=0, le=10)
    """Retries of a run after Triton was unavailable, misses the model, or the connection was cut."""
    shared_memory: Literal["none", "system", "cuda"] = "none"
    """Pass tensors to a Triton on this machine through shared memory; `cuda`: of a GPU."""
    fallback: bool = False
    """Run `dense.onnx` in this process while Triton is unavailable."""


class DenseSettings(StrictModel):
    """Execution of the dense networks."""

    provider: Literal["auto", "cpu", "cuda", "tensorrt"] = "auto"
    """Device of ONNX Runtime; `auto`: CUDA if onnxruntime-gpu and a GPU are available, else the CPU."""
    precision: Literal["float32", "float16"] = "float32"
    """Precision on a GPU; `float16` converts the network when it is loaded, except inputs and outputs."""
    tf32: bool = False
    """Let a GPU round factors of float32 products to 10 bits: faster, but scores differ from the CPU's."""
    graphs: bool = True
    """Record the GPU work of repeated batch sizes as a CUDA graph and launch it as one."""
    scheduler: bool = True
    """Run predictions of all requests, and of all workers, in common batches where the GPU holds the rows."""
    lanes: int = Field(2, ge=1, le=64)
    """Concurrent runs per GPU that holds the rows; each has a copy of the network."""
    threads: int = Field(1, ge=0)
    """Threads per run of the network; 0: ONNX Runtime decides."""
    inline_us: float = Field(250.0, ge=0)
    """Networks that run faster than this, as measured by runs, run on the caller's thread."""
    runs: int | None = Field(None, ge=1)
    """Threads for longer runs. null: 4, without `triton` at most the number of cores."""
    queue: int = Field(1024, ge=1)
    """Runs that may wait for such a thread; more get 503."""
    triton: TritonSettings | None = None
    """A Triton server that runs the networks; null: they run in this process."""

    def violations(self) -> Iterator[ConfigFinding]:
        triton = self.triton
        if triton is None:
            return
        if not is_address(triton.url):
            message = f"expected host:port without a scheme, found {triton.url!r}"
            yield finding("triton.url", message)
        elif triton.shared_memory != "none" and not is_loopback(triton.url.rpartition(":")[0]):
            message = f"is {triton.shared_memory}, but {triton.url} is not this machine"
            yield finding("triton.shared_memory", message, "triton.url")
