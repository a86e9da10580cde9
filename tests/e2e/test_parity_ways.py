"""The ways in that need more processes: gRPC, workers, a Triton that runs the network, and Triton's ensemble
of our lookup and the network. The same test split, the same scores, the same rows."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import np_to_triton_dtype

import hps
from benchmarks.peers.hps_server import Hps, start_hps
from benchmarks.peers.triton import Triton, start_triton
from hps.models.repository import Repository
from hps.native import COMPILED
from hps.triton.export import export_dense, export_ensemble, export_lookup
from tests.e2e.test_parity import OUTPUTS, TO_EACH_OTHER, TO_TRAINER, joined, tensors
from tests.e2e.test_parity_rows import expected_rows

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not COMPILED, reason="a shared cache needs the native core"),
]
MODEL = "ctr"


@pytest.fixture(scope="module")
def working(publish_example, tmp_path_factory) -> Iterator[Hps]:
    """``hps serve --workers 2``: its cache is shared with them and with Triton's instances."""
    folder = tmp_path_factory.mktemp("workers")
    publish_example(folder)
    (folder / "run").mkdir(mode=0o700)
    shared = {"cpu_cache": {"shared": {"name": f"parity-{os.getpid()}"}}}
    server = {"workers": 2, "runtime": str(folder / "run")}
    with start_hps(folder, limits=server, tiers=shared) as running:
        yield running


@pytest.fixture(scope="module")
def triton(working, published, tmp_path_factory, triton_ready) -> Iterator[Triton]:
    folder = tmp_path_factory.mktemp("triton")
    version = Repository(published / "models").open(MODEL)
    config = tmp_path_factory.getbasetemp() / "workers0" / "config.yaml"
    export_lookup(version, folder, config)
    export_dense(version, folder, "python")
    export_ensemble(version, folder)
    with start_triton(folder) as running:
        yield running


@pytest.fixture(scope="module")
def with_triton(published, triton, tmp_path_factory):
    """A node whose network runs in Triton."""
    settings = {
        "models": {"repository": str(published / "models")},
        "tiers": {"rocksdb": {"path": str(tmp_path_factory.mktemp("dense") / "rocksdb")}},
        "dense": {"triton": {"url": triton.grpc, "timeout_ms": 60_000}},
    }
    with hps.open(settings) as node:
        yield node


def infer(kind, address, model, arrays, outputs):
    """One request to ``model``; its ``outputs`` by name."""
    inputs = []
    for name, array in arrays.items():
        given = kind.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        inputs.append(given.set_data_from_numpy(array))
    wanted = [kind.InferRequestedOutput(name) for name in outputs]
    with kind.InferenceServerClient(address) as client:
        result = client.infer(model, inputs, outputs=wanted)
    return {name: result.as_numpy(name) for name in outputs}


def scores(kind, address, samples, batch):
    return joined(
        [infer(kind, address, MODEL, tensors(some), OUTPUTS) for some in samples.batches(batch)]
    )


WAYS = {
    "gRPC": lambda s: scores(triton_grpc, s["served"].grpc, s["test"], 900),
    "workers, REST": lambda s: scores(triton_http, s["working"].address, s["test"], 512),
    "workers, gRPC": lambda s: scores(triton_grpc, s["working"].grpc, s["test"], 701),
    "Triton's ensemble, HTTP": lambda s: scores(triton_http, s["triton"].address, s["test"], 640),
    "Triton's ensemble, gRPC": lambda s: scores(triton_grpc, s["triton"].grpc, s["test"], 1000),
    "network in Triton": lambda s: joined(
        [s["with_triton"].predict(MODEL, b.keys, b.inputs).outputs for b in s["test"].batches(450)]
    ),
    "REST": lambda s: scores(triton_http, s["served"].address, s["test"], 1024),
}


@pytest.fixture(scope="module")
def answers(example, served, working, triton, with_triton):
    sides = {
        "test": example.test,
        "served": served,
        "working": working,
        "triton": triton,
        "with_triton": with_triton,
    }
    return {way: ask(sides) for way, ask in WAYS.items()}


@pytest.mark.parametrize("way", WAYS)
def test_scores_equal_the_trainers(example, answers, way):
    for name in OUTPUTS:
        np.testing.assert_allclose(
            answers[way][name], example.scores[name], rtol=0, atol=TO_TRAINER[name], err_msg=name
        )


def test_scores_are_equal_over_every_interface(answers):
    for name in OUTPUTS:
        found = np.stack([answers[way][name] for way in WAYS]).astype(np.float64)
        assert np.ptp(found, axis=0).max() <= TO_EACH_OTHER, name


@pytest.mark.parametrize("way", ["gRPC", "workers", "Triton, HTTP", "Triton, gRPC"])
def test_rows_equal_exported_rows_bit_for_bit(example, served, working, triton, way):
    """All keys of the test split, by feature and in HPS's own form."""
    kind, address = {
        "gRPC": (triton_grpc, served.grpc),
        "workers": (triton_http, working.address),
        "Triton, HTTP": (triton_http, triton.address),
        "Triton, gRPC": (triton_grpc, triton.grpc),
    }[way]
    expected = expected_rows(example)
    keys = {name: keys[:, None] for name, keys in example.test.keys.items()}
    found = [
        infer(kind, address, f"{MODEL}.lookup", {n: k[i : i + 1024] for n, k in keys.items()}, keys)
        for i in range(0, len(example.test), 1024)
    ]
    for name, rows in expected.items():
        assert np.concatenate([each[name] for each in found]).tobytes() == rows.tobytes(), name
    counts = np.full((1, len(keys)), len(example.test), np.int32)
    flat = {"KEYS": np.concatenate([*keys.values()]).reshape(1, -1), "NUMKEYS": counts}
    (values,) = infer(kind, address, f"{MODEL}.lookup", flat, ["OUTPUT0"]).values()
    assert values.tobytes() == b"".join(rows.tobytes() for rows in expected.values())
