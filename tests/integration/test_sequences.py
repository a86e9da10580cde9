"""Attention over histories of any length: every way to ask for scores and vectors, and NumPy's result."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper as h

import hps
from benchmarks.peers.hps_server import Hps, start_hps
from hps.client import Client
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from tests.support import onnx_networks
from tests.support.waiting import PATIENT_GUARD

MOST, DIM, ROWS = 50, 8, 20_000
SPEC = {
    "name": "feed",
    "tables": [{"name": "items", "dim": DIM, "default": 0.25}],
    "features": [
        {"name": "item", "table": "items"},
        {
            "name": "history",
            "table": "items",
            "pooling": "none",
            "max_length": MOST,
            "truncation": "keep_last",
            "context": True,
        },
        {"name": "short", "table": "items", "pooling": "none", "max_length": 2},
    ],
    "dense": {
        "masks": {"history": "mask"},
        "lengths": {"history": "length"},
        "outputs": [{"name": "score", "shape": [-1, 1]}],
    },
}
KEYS = np.arange(ROWS)
VECTORS = np.sin(KEYS[:, None] * np.arange(1, DIM + 1) * 0.37).astype(np.float32)


def attention() -> bytes:
    """``score``: the item times its attention over the history; plus a tenth of the history's length."""
    nodes = [
        h.make_node("Unsqueeze", ["item", "two"], ["column"]),
        h.make_node("MatMul", ["history", "column"], ["products"]),
        h.make_node("Squeeze", ["products", "two"], ["logits"]),
        h.make_node("Where", ["mask", "logits", "low"], ["masked"]),
        h.make_node("Softmax", ["masked"], ["weights"], axis=1),
        h.make_node("Unsqueeze", ["weights", "one"], ["row"]),
        h.make_node("MatMul", ["row", "history"], ["mixed"]),
        h.make_node("Squeeze", ["mixed", "one"], ["interest"]),
        h.make_node("Mul", ["interest", "item"], ["product"]),
        h.make_node("ReduceSum", ["product", "one"], ["attention"], keepdims=1),
        h.make_node("Unsqueeze", ["length", "one"], ["lengths"]),
        h.make_node("Mul", ["lengths", "tenth"], ["bonus"]),
        h.make_node("ReduceSum", ["short", "both"], ["shorts"], keepdims=0),
        h.make_node("Unsqueeze", ["shorts", "one"], ["short_sum"]),
        h.make_node("Sum", ["attention", "bonus", "short_sum"], ["score"]),
    ]
    inputs = {
        "item": DIM,
        "history": (T.FLOAT, ["batch", "length", DIM]),
        "short": (T.FLOAT, ["batch", 2, DIM]),
        "mask": (T.BOOL, ["batch", "length"]),
        "length": (T.FLOAT, ["batch"]),
    }
    constants = [
        h.make_tensor("one", T.INT64, [1], [1]),
        h.make_tensor("two", T.INT64, [1], [2]),
        h.make_tensor("both", T.INT64, [2], [1, 2]),
        h.make_tensor("low", T.FLOAT, [1], [-1e9]),
        h.make_tensor("tenth", T.FLOAT, [1], [0.1]),
    ]
    return onnx_networks.network(nodes, inputs, {"score": 1}, constants)


def rows(keys: list[int]) -> np.ndarray:
    """The vectors of ``keys``, with the default where there is no row."""
    wanted = np.array(keys, np.int64)
    found = np.full((len(keys), DIM), 0.25, np.float32)
    known = wanted < ROWS
    found[known] = VECTORS[wanted[known]]
    return found


def scores(items: list[int], histories: list[list[int]], shorts: list[list[int]]) -> np.ndarray:
    """The network's scores, in float64 and without padding."""
    found = []
    for item, history, short in zip(items, histories, shorts, strict=True):
        vector, past = rows([item])[0].astype(np.float64), rows(history[-MOST:]).astype(np.float64)
        score = 0.1 * len(past) + rows(short).astype(np.float64).sum()
        if len(past):
            weights = np.exp(past @ vector)
            score += (weights / weights.sum()) @ past @ vector
        found.append([score])
    return np.array(found)


def samples(
    batch: int, longest: int, seed: int
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(seed)
    items = rng.integers(0, ROWS + 100, batch).tolist()
    histories = [rng.integers(0, ROWS + 100, rng.integers(0, longest + 1)).tolist() for _ in items]
    shorts = [rng.integers(0, ROWS, rng.integers(0, 3)).tolist() for _ in items]
    return items, histories, shorts


CASES = {
    "one": samples(1, MOST, 1),
    "some": samples(7, MOST, 2),
    "cut": samples(9, 3 * MOST, 3),
    "empty histories": ([1, 2], [[], []], [[], []]),
    "same lengths": ([1, 2], [[1, 2, 3], [4, 5, 6]], [[1, 2], [3, 4]]),
    "ten thousand keys": samples(2, 10_000, 4),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sequences") / "models"
    spec = ModelSpec.model_validate(SPEC)
    write_version(root, spec, 1, {"items": (KEYS, VECTORS)}, dense=attention())
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Hps]:
    with start_hps(repository.parent) as running:
        yield running


@pytest.fixture(scope="module")
def workers(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hps]:
    """A server that answers from a worker, and batches requests."""
    folder = tmp_path_factory.mktemp("workers")
    limits = {"workers": 1, "batching": {"max_delay_us": 100}}
    with start_hps(folder, limits=limits, models={"repository": str(repository)}) as running:
        yield running


@pytest.fixture(scope="module", params=["node", "front end", "REST", "gRPC", "worker"])
def way(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[object]:
    """An object with the methods ``predict`` and ``lookup``."""
    folder = tmp_path_factory.mktemp("way")
    if request.param == "node":
        tiers = {"rocksdb": {"path": str(folder / "db"), "guard": PATIENT_GUARD}}
        with hps.open({"models": {"repository": str(repository)}, "tiers": tiers}) as node:
            yield node
        return
    server = request.getfixturevalue("workers" if request.param == "worker" else "server")
    if request.param == "front end":
        front = folder / "models"
        shutil.copytree(repository, front, ignore=shutil.ignore_patterns("tables"))
        settings = {"models": {"repository": str(front)}, "lookup": {"nodes": [server.grpc]}}
        with hps.connect(settings) as connected:
            yield connected
        return
    url = f"grpc://{server.grpc}" if request.param == "gRPC" else f"http://{server.address}"
    with Client(url) as client:
        yield client


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_numpy_without_padding(way, case):
    items, histories, shorts = CASES[case]
    features = {"item": items, "history": histories, "short": shorts}
    for _ in range(2):
        found = way.predict("feed", features).outputs["score"]
        np.testing.assert_allclose(found, scores(items, histories, shorts), rtol=1e-4, atol=1e-4)


def test_one_history_is_scored_with_all_candidates(way):
    items, (history,), shorts = [1, 2, 3, 4], samples(1, 2 * MOST, 5)[1], [[1], [], [2, 3], [4]]
    found = way.predict("feed", {"item": items, "history": [history], "short": shorts})
    expected = scores(items, [history] * 4, shorts)
    np.testing.assert_allclose(found.outputs["score"], expected, rtol=1e-4, atol=1e-4)


def test_long_history_of_a_feature_that_rejects_them_is_rejected(way):
    features = {"item": [1, 2], "history": [[1], [2]], "short": [[1], [2, 3, 4]]}
    with pytest.raises(hps.HpsError, match=r"'short' takes at most 2 keys .*sample 1 has 3"):
        way.predict("feed", features)


def test_sources_are_of_all_keys_of_the_request(way):
    history = list(range(MOST + 2))
    features = {"item": [1], "history": [history], "short": [[]]}
    found = way.predict("feed", features, want_source=True)
    codes = found.sources["history"].reshape(-1)
    assert codes.shape == (MOST + 2,)
    assert codes[:2].tolist() == [0, 0]
    assert codes[2:].all()


@pytest.mark.parametrize("case", CASES)
def test_lookup_returns_one_vector_per_key(way, case):
    _, histories, _ = CASES[case]
    found = way.lookup("feed", {"history": histories})
    every = [key for history in histories for key in history]
    assert found.vectors["history"].tobytes() == rows(every).tobytes()
    assert found.defaulted == sum(key >= ROWS for key in every)


def padded(histories: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    vectors = np.zeros((len(histories), MOST, DIM), np.float32)
    mask = np.zeros((len(histories), MOST), bool)
    for i, history in enumerate(histories):
        kept = history[-MOST:]
        vectors[i, : len(kept)], mask[i, : len(kept)] = rows(kept), True
    return vectors, mask


@pytest.mark.parametrize("case", CASES)
def test_padded_lookup_returns_vectors_and_mask(way, case):
    _, histories, _ = CASES[case]
    keys = hps.JaggedKeys.from_lists(histories)
    vectors, mask = padded(histories)
    if isinstance(way, Client):
        inputs = {"history": keys.keys, "history.offsets": keys.offsets}
        names = ["history.padded", "history.mask", "history.offsets", "history"]
        found = way.infer("feed.lookup", inputs, outputs=names).outputs
        assert list(found) == names
        assert found["history.padded"].tobytes() == vectors.tobytes()
        assert found["history.padded"].shape == vectors.shape
        assert found["history.mask"].dtype == np.bool_
        assert found["history.mask"].tolist() == mask.tolist()
        assert found["history.offsets"].tolist() == keys.offsets.tolist()
        assert len(found["history"]) == len(keys.keys)
    else:
        found = way.lookup("feed", {"history": keys}, padded=True)
        assert found.vectors["history"].tobytes() == vectors.tobytes()
        assert found.vectors["history"].shape == vectors.shape
        assert found.masks["history"].tolist() == mask.tolist()
        assert (
            way.lookup("feed", {"history": keys}).offsets["history"].tolist()
            == keys.offsets.tolist()
        )


def test_padded_lookup_rejects_long_samples_of_such_a_feature(way):
    keys = hps.JaggedKeys.from_lists([[1], [2, 3, 4]])
    if isinstance(way, Client):
        inputs = {"short": keys.keys, "short.offsets": keys.offsets}
        ask = partial(way.infer, "feed.lookup", inputs, outputs=["short.mask"])
    else:
        ask = partial(way.lookup, "feed", {"short": keys}, padded=True)
    with pytest.raises(hps.HpsError, match=r"'short' takes at most 2 keys .*sample 1 has 3"):
        ask()
    assert len(way.lookup("feed", {"short": keys}).vectors["short"]) == 4  # as they are


def test_padded_vectors_in_json(server):
    body = {
        "inputs": [{"name": "short", "datatype": "INT64", "shape": [2, 1], "data": [1, ROWS]}],
        "outputs": [{"name": "short.offsets"}, {"name": "short.padded"}, {"name": "short.mask"}],
    }
    connection = http.client.HTTPConnection(server.address, timeout=60)
    for _ in range(3):  # a repeated request is prepared
        connection.request("POST", "/v2/models/feed.lookup/infer", json.dumps(body))
        reply = connection.getresponse()
        answer = json.loads(reply.read())
        assert reply.status == 200, answer
        offsets, vectors, mask = answer["outputs"]
        assert (offsets["datatype"], offsets["data"]) == ("INT64", [0, 1, 2])
        assert (vectors["datatype"], vectors["shape"]) == ("FP32", [2, 2, DIM])
        found = np.array(vectors["data"], np.float32).reshape(2, 2, DIM)
        assert found[:, 0].tobytes() == rows([1, ROWS]).tobytes()
        assert not found[:, 1].any()
        assert (mask["datatype"], mask["shape"]) == ("BOOL", [2, 2])
        assert mask["data"] == [True, False, True, False]
    connection.close()


def test_metadata_names_the_outputs_of_sequences(server):
    with Client(f"http://{server.address}") as client:
        parameters = client.metadata("feed.lookup")["parameters"]
    assert parameters["sequence_outputs"] == [
        *("history.offsets", "history.padded", "history.mask"),
        *("short.offsets", "short.padded", "short.mask"),
    ]
