"""One feature's keys select rows of several tables: sent once, answered with a vector per table."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hps
from benchmarks.peers.hps_server import Hps, start_hps
from hps.client import Client
from hps.config.model_schema import ModelSpec
from hps.errors import BadRequest
from hps.models.version_writer import write_version
from hps.types import JaggedKeys
from tests.support.onnx_networks import summing_network
from tests.support.waiting import PATIENT_GUARD

SPEC = {
    "name": "deepfm",
    "tables": [{"name": "deep", "dim": 4}, {"name": "wide", "dim": 1, "default": 0.5}],
    "features": [
        {"name": "ad", "table": ["deep", "wide"], "key_offset": 10},
        {"name": "user", "table": "deep"},
    ],
    "dense": {
        "embeddings": {"ad.deep": "ad_deep", "ad.wide": "ad_wide"},
        "outputs": [{"name": "logit", "shape": [-1, 1]}],
    },
}
BAGS = [[1, 2], [], [99]]


def network() -> bytes:
    """``logit``: the sum of all inputs."""
    return summing_network({"ad_deep": 4, "ad_wide": 1, "user": 4}, "logit")


def write_models(root: Path) -> Path:
    """Keys 0…99: a row of ``deep`` is its key four times, of ``wide`` its key's negative."""
    keys = np.arange(100)
    rows = keys[:, None].astype(np.float32)
    tables = {"deep": (keys, np.repeat(rows, 4, axis=1)), "wide": (keys, -rows)}
    write_version(root, ModelSpec.model_validate(SPEC), 1, tables, dense=network())
    return root


def expected(bags: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Sums per sample; key 99 + 10 has no row."""
    deep = [[sum(k + 10 for k in bag if k + 10 < 100)] * 4 for bag in bags]
    wide = [[sum(-(k + 10.0) if k + 10 < 100 else 0.5 for k in bag)] for bag in bags]
    return np.array(deep, np.float32), np.array(wide, np.float32)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hps.Node]:
    folder = tmp_path_factory.mktemp("node")
    settings = {
        "models": {"repository": str(write_models(folder / "models"))},
        "tiers": {"rocksdb": {"path": str(folder / "db"), "guard": PATIENT_GUARD}},
    }
    with hps.open(settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hps]:
    folder = tmp_path_factory.mktemp("server")
    write_models(folder / "models")
    with start_hps(folder) as started:
        yield started


def test_lookup_answers_a_vector_per_table(node: hps.Node) -> None:
    deep, wide = expected(BAGS)
    found = node.lookup("deepfm", {"ad": BAGS, "user": [[1], [2], [3]]}, want_source=True)
    np.testing.assert_array_equal(found.vectors["ad.deep"], deep)
    np.testing.assert_array_equal(found.vectors["ad.wide"], wide)
    assert list(found.vectors) == ["ad.deep", "ad.wide", "user"]
    assert found.sources["ad.wide"].tolist()[-1] == 0
    assert found.defaulted == 2


def test_lookup_fills_arrays_of_the_caller(node: hps.Node) -> None:
    out = {"ad.deep": np.zeros((2, 4), np.float32), "ad.wide": np.zeros((2, 1), np.float32)}
    node.lookup("deepfm", {"ad": [1, 2]}, out=out)
    assert out["ad.deep"][:, 0].tolist() == [11, 12]
    assert out["ad.wide"][:, 0].tolist() == [-11, -12]


def test_predict_feeds_every_vector_to_the_network(node: hps.Node) -> None:
    deep, wide = expected(BAGS)
    outputs = node.predict("deepfm", {"ad": BAGS, "user": [[1], [2], [3]]}).outputs
    logit = deep.sum(axis=1) + wide[:, 0] + np.array([4, 8, 12])
    assert outputs["logit"][:, 0].tolist() == logit.tolist()


def test_predict_names_the_missing_feature_as_requests_do(node: hps.Node) -> None:
    with pytest.raises(BadRequest, match=r"misses feature 'ad'$"):
        node.predict("deepfm", {"user": [1]})
    with pytest.raises(BadRequest, match=r"no feature 'adx'"):
        node.predict("deepfm", {"user": [1], "adx": [1]})
    with pytest.raises(BadRequest, match=r"misses feature 'ad'$"):
        node.predict("deepfm", {"user": [1], "ad.deep": [1]})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_server_takes_the_keys_once(server: Hps, protocol: str) -> None:
    at = server.address if protocol == "http" else server.grpc
    deep, wide = expected(BAGS)
    with Client(f"{protocol}://{at}") as client:
        assert [t["name"] for t in client.metadata("deepfm")["inputs"]] == ["ad", "user"]
        names = [t["name"] for t in client.metadata("deepfm.lookup")["outputs"]]
        assert names == ["ad.deep", "ad.wide", "user"]
        found = client.lookup("deepfm", {"ad": BAGS}, want_source=True)
        np.testing.assert_array_equal(found.vectors["ad.deep"], deep)
        np.testing.assert_array_equal(found.vectors["ad.wide"], wide)
        assert list(found.sources) == ["ad.deep", "ad.wide"]
        features = {"ad": BAGS, "user": [[1], [2], [3]]}
        scores = client.predict("deepfm", features, want_source=True)
        logit = deep.sum(axis=1) + wide[:, 0] + np.array([4, 8, 12])
        assert scores.outputs["logit"][:, 0].tolist() == logit.tolist()
        assert set(scores.sources) == {"ad.deep", "ad.wide", "user"}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_of_one_form_are_answered_alike(server: Hps, protocol: str) -> None:
    at = server.address if protocol == "http" else server.grpc
    with Client(f"{protocol}://{at}") as client:
        for key in range(5):  # from the second on, the lookup is prepared
            found = client.lookup("deepfm", {"user": [key, 1], "ad": [key, key]}).vectors
            assert found["ad.deep"][:, 0].tolist() == [key + 10, key + 10]
            assert found["ad.wide"][:, 0].tolist() == [-key - 10, -key - 10]
            assert found["user"][:, 0].tolist() == [key, 1]
        for last in range(3):  # as many tensors as features, one of them offsets
            keys = JaggedKeys(np.array([1, 2, last]), 2, np.array([0, last, 3]))
            found = client.lookup("deepfm", {"ad": keys}).vectors
            deep, _ = expected([[1, 2, last][:last], [1, 2, last][last:]])
            np.testing.assert_array_equal(found["ad.deep"], deep)


def test_front_end_asks_its_lookup_node(server: Hps, node: hps.Node, tmp_path: Path) -> None:
    repository = Path(tmp_path / "models")
    write_models(repository)
    shutil.rmtree(repository / "deepfm" / "1" / "tables")
    settings = {"models": {"repository": str(repository)}, "lookup": {"nodes": [server.grpc]}}
    features = {"ad": BAGS, "user": [[1], [2], [3]]}
    with hps.connect(settings) as front:
        here = node.lookup("deepfm", features).vectors
        remote = front.lookup("deepfm", features).vectors
        assert {n: v.tolist() for n, v in remote.items()} == {
            n: v.tolist() for n, v in here.items()
        }
        assert (
            front.predict("deepfm", features).outputs["logit"].tolist()
            == node.predict("deepfm", features).outputs["logit"].tolist()
        )
