"""A real Triton server (2.51, CPU, python backend) without a container."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import require
from benchmarks.peers.process import Server, free_ports, serving


@dataclass(frozen=True)
class Triton(Server):
    """A running Triton; ``address`` is that of HTTP."""

    grpc: str
    metrics: str


@contextmanager
def start_triton(
    repository: Path,
    ports: tuple[int, int, int] | None = None,
    *,
    core: int | None = None,
    env: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
    timeout_s: float = 60.0,
) -> Iterator[Triton]:
    """Serve a Triton model repository on loopback; entered when every model is ready.

    ``ports`` are HTTP, gRPC and metrics; free ones by default. Python models see ``env`` and the
    packages of Triton's own environment (NumPy 1.26). Raises PeerMissing when Triton is not set up,
    RuntimeError with its log when it does not become ready.
    """
    peer = require("triton")
    home = peer.site / "pytriton/tritonserver"
    libraries = f"{peer.site / 'nvidia_pytriton.libs'}:{peer.folder / 'lib'}"
    # A GPU's driver may be in a folder that only this variable names.
    libraries += f":{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    http, grpc, metrics = ports or free_ports(3)
    command = [
        str(home / "bin/tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={home / 'backends'}",
        *("--http-address", "127.0.0.1", "--http-port", str(http)),
        *("--grpc-address", "127.0.0.1", "--grpc-port", str(grpc)),
        *("--metrics-address", "127.0.0.1", "--metrics-port", str(metrics)),
        *("--allow-gpu-metrics", "false"),
        *arguments,
    ]
    settings = {
        "PATH": f"{peer.folder / 'bin'}:{os.environ.get('PATH', '')}",
        "LD_LIBRARY_PATH": libraries,
        **(env or {}),
    }
    with serving(
        command, http, ready_path="/v2/health/ready", env=settings, core=core, timeout_s=timeout_s
    ) as server:
        yield Triton(
            server.address,
            server.process,
            server.log,
            grpc=f"127.0.0.1:{grpc}",
            metrics=f"127.0.0.1:{metrics}",
        )
