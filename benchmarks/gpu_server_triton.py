"""A real Triton that serves the model of `benchmarks.gpu_server`, for `benchmarks.gpu_server_peers`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frontend_scene import MODELS
from benchmarks.gpu_server_cells import Target
from benchmarks.gpu_server_scene import Cores, Scene, on_cores
from benchmarks.peers.hps_server import start_hps
from benchmarks.peers.triton import start_triton
from hps.models.repository import ModelVersion, Repository
from hps.triton.export import export_dense, export_ensemble, export_lookup

SHARED = 256 << 20
"""Initial bytes of memory shared by Triton and a Python model, so that it need not grow."""


@dataclass(frozen=True)
class Instances:
    """Triton's instances of lookups, on the CPU, and of the network, on the CPU or the GPU."""

    lookups: int = 4
    networks: int = 2
    gpu: bool = False


def write_triton(scene: Scene, repository: Path, instances: Instances) -> None:
    """The ensemble of `hps triton export`, with the network of this benchmark."""
    version = Repository(scene.folder / "models").open(scene.model)
    export_lookup(version, repository, scene.folder / "config.yaml", instances.lookups)
    write_network(version, repository, instances)
    export_ensemble(version, repository)


def write_network(version: ModelVersion, repository: Path, instances: Instances) -> None:
    """Triton's model ``<m>.dense``, which joins requests and may run on the GPU."""
    folder = export_dense(version, repository, "python")
    shutil.copy(MODELS / "network.py", folder / str(version.version) / "model.py")
    place = "KIND_GPU gpus: [0]" if instances.gpu else "KIND_CPU"
    with (folder / "config.pbtxt").open("a") as config:
        config.write(f"instance_group [ {{ kind: {place} count: {instances.networks} }} ]\n")


@contextmanager
def running_triton(scene: Scene, cores: Cores, instances: Instances) -> Iterator[Target]:
    """Triton, and the node whose rows its lookups read, on the server's cores."""
    tiers = {
        "gpu": {"use": "off"},
        "cpu_cache": {"share": 1.0, "shared": {"name": f"gpu-server-peers-{os.getpid()}"}},
    }
    limits = {"runtime": str(scene.folder / "run")}
    with ExitStack() as stack:
        with on_cores(cores.server):
            dense = {"provider": "cpu"}
            node_of = start_hps(scene.folder, tiers=tiers, limits=limits, dense=dense)
            stack.enter_context(node_of)
            write_triton(scene, scene.folder / "triton", instances)
            arguments = (f"--backend-config=python,shm-default-byte-size={SHARED}",)
            triton_of = start_triton(scene.folder / "triton", arguments=arguments, timeout_s=120.0)
            triton = stack.enter_context(triton_of)
        stack.enter_context(on_cores(cores.load))
        addresses = {"rest": triton.address, "grpc": triton.grpc}
        yield Target("Triton", addresses, triton.process)
