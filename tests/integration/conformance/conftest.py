"""Two servers of the same models: ours, and a real Triton whose lookup instances attach to ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from benchmarks.peers.hps_server import Hps, start_hps
from benchmarks.peers.triton import Triton, start_triton
from hps.config.model_schema import ModelSpec
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.native import COMPILED
from hps.tools.conformance import CheckedServer, SampleRequest
from hps.triton.export import export_dense, export_ensemble, export_lookup
from tests.support.onnx_networks import network
from tests.support.small_models import write_models

RNG = np.random.default_rng(7)
# Tensors of the types that clicks and words do not have.
TYPES = {
    "name": "types",
    "tables": [{"name": "halves", "dim": 4, "dtype": "float16"}],
    "features": [{"name": "half", "table": "halves", "hotness": 2, "pooling": "none"}],
    "dense": {
        "inputs": [
            {"name": "flags", "shape": [-1, 2], "datatype": "BOOL"},
            {"name": "numbers", "shape": [-1, 3], "datatype": "FP16"},
            {"name": "counts", "shape": [-1, 1], "datatype": "INT32"},
        ],
        "outputs": [
            {"name": "not", "shape": [-1, 2], "datatype": "BOOL"},
            {"name": "twice", "shape": [-1, 3], "datatype": "FP16"},
            {"name": "negative", "shape": [-1, 1], "datatype": "INT32"},
            {"name": "vectors", "shape": [-1, 2, 4], "datatype": "FP32"},
        ],
    },
    "max_batch_size": 64,
}


def _network() -> bytes:
    nodes = [
        helper.make_node("Not", ["flags"], ["not"]),
        helper.make_node("Add", ["numbers", "numbers"], ["twice"]),
        helper.make_node("Neg", ["counts"], ["negative"]),
        helper.make_node("Cast", ["half"], ["vectors"], to=TensorProto.FLOAT),
    ]
    inputs = {
        "half": (TensorProto.FLOAT16, ["batch", 2, 4]),
        "flags": (TensorProto.BOOL, ["batch", 2]),
        "numbers": (TensorProto.FLOAT16, ["batch", 3]),
        "counts": (TensorProto.INT32, ["batch", 1]),
    }
    outputs = {
        "not": inputs["flags"],
        "twice": inputs["numbers"],
        "negative": inputs["counts"],
        "vectors": (TensorProto.FLOAT, ["batch", 2, 4]),
    }
    return network(nodes, inputs, outputs)


def _samples() -> tuple[SampleRequest, ...]:
    clicks = {
        "user": RNG.integers(0, 110, (3, 1)),
        "item": RNG.integers(-60, 60, (3, 1)),
        "history": RNG.integers(-60, 60, (3, 2)),
    }
    types = {
        "half": RNG.integers(0, 100, (2, 2)),
        "flags": RNG.integers(0, 2, (2, 2)).astype(bool),
        "numbers": RNG.standard_normal((2, 3)).astype(np.float16),
        "counts": RNG.integers(-9, 9, (2, 1)).astype(np.int32),
    }
    dense = {"dense": RNG.standard_normal((3, 3)).astype(np.float32)}
    return (
        SampleRequest("clicks", clicks | dense, ("score", "logit")),
        SampleRequest("types", types, ("not", "twice", "negative", "vectors")),
        SampleRequest("types.lookup", {"half": types["half"]}, ("half",)),
        SampleRequest("clicks.lookup", clicks, ("user", "history")),
        SampleRequest("words.lookup", {"word": RNG.integers(0, 1000, (1, 26))}, ("word",)),
    )


SAMPLES = _samples()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of our server, with its models."""
    folder = tmp_path_factory.mktemp("conformance")
    write_models(folder / "models")
    keys = np.arange(100)
    rows = (keys[:, None] + np.arange(4) / 8).astype(np.float32)
    spec = ModelSpec.model_validate(TYPES)
    write_version(folder / "models", spec, 1, {"halves": (keys, rows)}, dense=_network())
    return folder


@pytest.fixture(scope="session")
def ours(home: Path) -> Iterator[Hps]:
    """``hps serve``, with a shared cache and a socket for those that attach."""
    runtime = home / "run"
    runtime.mkdir(mode=0o700)
    shared = {"cpu_cache": {"shared": {"name": f"conformance-{os.getpid()}"}}} if COMPILED else {}
    limits = {"runtime": str(runtime), "shared_memory": True}
    models = {"control": "all"}
    with start_hps(home, limits=limits, tiers=shared, models=models) as server:
        yield server


@pytest.fixture(scope="session")
def triton(
    ours: Hps, home: Path, triton_ready: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Triton]:
    """Triton, its models loaded and unloaded by request."""
    if not COMPILED:
        pytest.skip("a shared cache needs the native core")
    folder = tmp_path_factory.mktemp("triton")
    repository = Repository(home / "models")
    for model in ("clicks", "types", "words"):
        version = repository.open(model)
        export_lookup(version, folder, home / "config.yaml")
        if version.dense is not None:
            export_dense(version, folder, "python")
            export_ensemble(version, folder)
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    with start_triton(folder, arguments=explicit) as server:
        yield server


@pytest.fixture(scope="session")
def target_of(request: pytest.FixtureRequest) -> Callable[[str], CheckedServer]:
    """``target_of("ours")`` or ``("triton")``."""

    def find(server: str) -> CheckedServer:
        running = request.getfixturevalue(server)
        return CheckedServer(running.address, running.grpc, SAMPLES)

    return find
