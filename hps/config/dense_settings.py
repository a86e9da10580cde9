"""Settings of dense networks: where they run, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from hps.config import checks
from hps.config.model_schema import Name, StrictModel


class TritonTlsSettings(StrictModel):
    """How a Triton is asked over TLS."""

    ca_file: Path | None = None
    """Roots that Triton's certificate must lead to, PEM; null takes the system's."""
    certificate_file: Path | None = None
    """The client's own certificate, PEM, where Triton asks for one."""
    key_file: Path | None = None
    """Its private key."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        files = "certificate_file", self.certificate_file, "key_file", self.key_file
        return self.consistent(checks.pair(*files))


class TritonTarget(StrictModel):
    """What a model's network is called in Triton."""

    name: str = Field(min_length=1)
    """Triton's name of it."""
    version: str = Field("", pattern=r"^[0-9]*$")
    """Which of Triton's versions; empty leaves the choice to Triton's own policy."""


class TritonSettings(StrictModel):
    """A Triton server that runs dense networks."""

    url: str = Field(min_length=1)
    """`host:port` of its gRPC or HTTP port."""
    protocol: Literal["grpc", "http"] = "grpc"
    """Which of the two that is; HTTP takes less time for small batches, see docs/triton.md."""
    tls: TritonTlsSettings | None = None
    """Certificates; null speaks plain text."""
    models: dict[Name, TritonTarget] = {}
    """Which models' networks it runs, and what it calls them; empty: all of them, `<m>` as `<m>.dense`."""
    channels: int = Field(2, ge=1, le=64)
    """gRPC connections that requests take turns on."""
    timeout_ms: float = Field(1_000.0, gt=0)
    """Longest wait for one run, a request's own deadline permitting."""
    retries: int = Field(2, ge=0, le=10)
    """How often a run is repeated that found Triton unavailable or lacking the model, or was cut off."""
    shared_memory: Literal["none", "system", "cuda"] = "none"
    """Send tensors through memory shared with a Triton on this machine that allows it; `cuda`: a GPU's."""
    fallback: bool = False
    """Run `dense.onnx` in this process while Triton is not available."""


class DenseSettings(StrictModel):
    """How dense networks run."""

    provider: Literal["auto", "cpu", "cuda", "tensorrt"] = "auto"
    """Where ONNX Runtime runs; `auto` takes CUDA when onnxruntime-gpu and a GPU are there."""
    precision: Literal["float32", "float16"] = "float32"
    """What a GPU computes in; `float16` narrows the network when it is loaded, inputs and outputs stay."""
    tf32: bool = False
    """Let a GPU round factors of float32 products to 10 bits: faster, but scores differ from the CPU's."""
    graphs: bool = True
    """Record what a repeated batch asks of the GPU, and ask for it in one launch (a CUDA graph)."""
    lanes: int = Field(2, ge=1, le=64)
    """Runs at a time on each GPU that holds the rows; each has a copy of the network."""
    threads: int = Field(1, ge=0)
    """Threads inside one run of the network; 0 lets ONNX Runtime choose."""
    inline_us: float = Field(150.0, ge=0)
    """Networks that answer faster than this, measured at start, run without a thread hop."""
    runs: int | None = Field(None, ge=1)
    """Longer runs at a time, each on a thread. null: 4, without `triton` no more than there are cores."""
    queue: int = Field(1024, ge=1)
    """Runs that may wait for such a thread before new ones are refused (503)."""
    triton: TritonSettings | None = None
    """A Triton server that runs networks instead; null: they run in this process."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        triton = self.triton
        if triton is None:
            return self
        return self.consistent(checks.triton(triton.shared_memory, triton.url))
