"""Versions change under load on a server with a GPU cache and workers: loads, rollback, labels, unload."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import numpy as np
import pytest

from benchmarks.peers.hps_server import start_hps
from benchmarks.peers.process import free_ports
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from hps.native import COMPILED
from tests.integration.test_model_switch import ITEMS, USERS, Asking, Server, by_rest, by_triton
from tests.support.small_models import RANKING, network
from tests.support.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COMPILED, reason="workers need the compiled core"),
]
VERSIONS = (1, 2, 3)


def write_versions(root):
    """``clicks``, with a fixed number of keys per sample, as common batches need."""
    spec = copy.deepcopy(RANKING)
    spec["features"][2]["hotness"] = 1
    for version in VERSIONS:

        def table(first, last, dim, version=version):
            keys = np.arange(first, last)
            return keys, version * keys[:, None] + np.arange(dim, dtype=np.float32)

        tables = {"users": table(0, 100, 4), "items": table(-50, 50, 2)}
        model = ModelSpec.model_validate(spec)
        write_version(root, model, version, tables, dense=network(version / 4))


def expected(version):
    """The logits of the requests: rows and weights are multiples of the version."""
    users, items = np.array(USERS)[:, None], np.array(ITEMS)[:, None]
    first = version * users + np.arange(4)
    second = version * items + np.arange(2)
    inputs = np.hstack([first, second, second, np.full((3, 3), 0.25)])
    weights = np.linspace(version / 4, -version / 4, inputs.shape[1], dtype=np.float32)
    return inputs @ weights


@pytest.fixture
def server(tmp_path):
    write_versions(tmp_path / "models")
    port, admin = free_ports(2)
    limits = {"workers": 2, "grpc": {"port": port, "admin": {"port": admin}}}
    tiers = {
        "rocksdb": {"path": str(tmp_path / "rocksdb"), "guard": {"deadline_ms": 20_000}},
        "gpu": {"use": "required", "capacity_bytes": 1 << 28},
    }
    models = {"rollback_s": 2, "serve": {"clicks": {"version": 1}}}
    dense = {"provider": "cuda"}
    with start_hps(tmp_path, limits=limits, tiers=tiers, models=models, dense=dense) as hps:
        found = Server(hps, f"127.0.0.1:{port}", f"127.0.0.1:{admin}")
        until(lambda: found.status()["ready"])
        yield found


def gpu(server):
    (found,) = [each for each in server.status()["tiers"] if each["name"] == "gpu"]
    return found


def test_gpu_server_changes_versions_under_load(server):
    """No request fails, each answer is of one version, and memory of retired versions is given back."""
    path = "/v2/repository/models/clicks"
    first = gpu(server)["bytes"]
    with ExitStack() as stack:
        asks = [by_rest(server.hps.address, stack) for _ in range(3)]
        asking = Asking(*asks, *(by_triton(server.grpc, stack) for _ in range(3)))
        for version in (2, 3, 1, 2):
            asking.more(50)
            assert server.load("clicks", version)[0] == 200
            with ExitStack() as own:
                assert by_rest(server.hps.address, own)()[0] == str(version)
            assert gpu(server)["scheduler"][f"clicks/{version}"]
        asking.more(50)
        assert server.post(f"{path}/rollback")[0] == 200  # to version 1, still in memory
        asking.more(50)
        assert (
            server.post(
                f"{path}/load", {"parameters": {"version": 3, "beside": True, "labels": ["canary"]}}
            )[0]
            == 200
        )
        asking.more(50)
        assert server.post(f"{path}/switch", {"parameters": {"version": "canary"}})[0] == 200
        asking.more(50)
        assert server.post(f"{path}/label", {"parameters": {"label": "canary"}})[0] == 200
        asking.end()
    assert not asking.failures
    for answers in asking.answers:
        assert {version for version, _ in answers} == {"1", "2", "3"}
        for version, scores in answers:
            # Rows and network are of one version; batches of other sizes round otherwise.
            np.testing.assert_allclose(scores, expected(int(version)), rtol=1e-3)
    until(lambda: set(gpu(server)["scheduler"]) == {"clicks/3"})
    assert gpu(server)["scheduler"]["clicks/3"]["requests"] > 0
    assert gpu(server)["bytes"] == first
    assert server.post(f"{path}/unload")[0] == 200
    until(lambda: gpu(server)["bytes"] == 0)
    assert server.load("clicks", 2)[0] == 200
    with ExitStack() as own:
        assert by_rest(server.hps.address, own)()[0] == "2"
