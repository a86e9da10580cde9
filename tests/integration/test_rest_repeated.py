"""Requests that repeat earlier ones take fast paths: the answers must be the same."""

from __future__ import annotations

import json
import re
import urllib.request
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.load import exchange, http_request
from benchmarks.peers.hps_server import Hps

RNG = np.random.default_rng(5)


def infer(server: Hps, model: str, keys: dict[str, np.ndarray]):
    """Vectors by feature and the response's parameters, in binary."""
    inputs = [
        {
            "name": name,
            "datatype": "INT64",
            "shape": list(value.shape),
            "parameters": {"binary_data_size": value.nbytes},
        }
        for name, value in keys.items()
    ]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = header + b"".join(value.tobytes() for value in keys.values())
    path = f"/v2/models/{model}/infer"
    # In one piece, and with the same head each time.
    request = http_request(path, body, {"Inference-Header-Content-Length": str(len(header))})
    lines, answer = exchange(server.address, request)
    # Without a byte behind it, the header is the whole body and its length is not stated.
    stated = re.search(rb"inference-header-content-length: (\d+)", lines)
    size = int(stated[1]) if stated else len(answer)
    said, raw, at = json.loads(answer[:size]), answer[size:], 0
    vectors = {}
    for output in said["outputs"]:
        end = at + output["parameters"]["binary_data_size"]
        vectors[output["name"]] = np.frombuffer(raw[at:end], np.float32).reshape(output["shape"])
        at = end
    assert at == len(raw)
    return vectors, said["parameters"]


def rows(keys: np.ndarray, first: int, last: int, default: list[float]) -> np.ndarray:
    """The rows that ``write_models`` writes for a table with the keys ``first…last - 1``."""
    dim = len(default)
    made = keys.reshape(-1, 1) + np.arange(dim, dtype=np.float32) / 8
    held = ((keys >= first) & (keys < last)).reshape(-1, 1)
    return np.where(held, made, np.float32(default)).astype(np.float32)


def inferences(server: Hps, model: str) -> int:
    with urllib.request.urlopen(f"http://{server.address}/v2/models/{model}/stats") as answer:
        return int(json.load(answer)["model_stats"][0]["inference_count"])


@pytest.mark.parametrize("shape", [(1, 26), (3, 2), (1, 0), (1, 3000)])
def test_repeated_requests_for_unpooled_keys(small_server, shape):
    before = inferences(small_server, "words.lookup")
    for last in (1000, 1000, 1010, 1000, 3000):  # with unknown keys now and then
        keys = RNG.integers(0, last, shape)
        vectors, parameters = infer(small_server, "words.lookup", {"word": keys})
        np.testing.assert_array_equal(vectors["word"], rows(keys, 0, 1000, [0.0] * 8))
        assert parameters["hps_defaulted"] == (keys >= 1000).sum()
    assert inferences(small_server, "words.lookup") == before + 5 * shape[0]


def test_repeated_requests_for_several_features_of_one_table(small_server):
    for low, high in ((0, 50), (0, 50), (-60, 120), (0, 50)):
        user = RNG.integers(low, high, (4, 1))
        item = RNG.integers(low, high, (4, 1))
        history = RNG.integers(low, high, (4, 3))
        keys = {"history": history, "user": user, "item": item}
        vectors, parameters = infer(small_server, "clicks.lookup", keys)
        assert list(vectors) == list(keys)
        np.testing.assert_array_equal(vectors["user"], rows(user, 0, 100, [0.5] * 4))
        np.testing.assert_array_equal(vectors["item"], rows(item, -50, 50, [1.0, 2.0]))
        bags = rows(history, -50, 50, [1.0, 2.0]).reshape(4, 3, 2).sum(axis=1)
        np.testing.assert_array_equal(vectors["history"], bags / np.float32(3))
        unknown = sum(((k < -50) | (k >= 50)).sum() for k in (item, history))
        assert parameters["hps_defaulted"] == unknown + ((user < 0) | (user >= 100)).sum()


def test_repeated_requests_by_keys_and_numkeys(small_server):
    """``KEYS`` and ``NUMKEYS`` are two inputs, as many as the model has tables."""
    for users, items in ((2, 1), (1, 2), (3, 0), (0, 3), (2, 1)):
        flat = RNG.integers(0, 50, (1, 3))
        keys = {"KEYS": flat, "NUMKEYS": np.array([[users, items]])}
        vectors, parameters = infer(small_server, "clicks.lookup", keys)
        wanted = [
            rows(flat[0, :users], 0, 100, [0.5] * 4).ravel(),
            rows(flat[0, users:], -50, 50, [1.0, 2.0]).ravel(),
        ]
        np.testing.assert_array_equal(vectors["OUTPUT0"].ravel(), np.concatenate(wanted))
        assert parameters["hps_defaulted"] == 0


def test_repeated_requests_with_jagged_bags(small_server):
    for ends in ([0, 2, 5], [0, 0, 5], [0, 5, 5], [0, 2, 5]):
        flat = RNG.integers(0, 50, 5)
        keys = {"history": flat, "history.offsets": np.array(ends)}
        vectors, _ = infer(small_server, "clicks.lookup", keys)
        all_rows = rows(flat, -50, 50, [1.0, 2.0])
        for bag, (start, end) in zip(vectors["history"], pairwise(ends), strict=True):
            mean = all_rows[start:end].mean(axis=0) if end > start else [0.0, 0.0]
            np.testing.assert_allclose(bag, mean, rtol=1e-6)
