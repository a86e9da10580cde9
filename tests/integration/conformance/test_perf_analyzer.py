"""The real perf_analyzer drives our lookups, and every answer is right, bit by bit.

Scores it compares itself (``test_tools.py``). It can't compare an output that has its input's name (a
feature's vectors) or a variable dimension (``OUTPUT0``), so there the answers are compared here, under its
load.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import np_to_triton_dtype

from benchmarks.peers.perf_analyzer import perf_analyzer

pytestmark = pytest.mark.usefixtures("perf_analyzer_ready")
SCORES = ["score", "logit"]
RNG = np.random.default_rng(7)


@pytest.fixture(scope="module")
def client(small_server):
    with triton.InferenceServerClient(small_server.address) as client:
        yield client


def answered(client, model, inputs, outputs):
    """``inputs`` of one sample, without the batch dimension, and the server's outputs for them."""
    tensors = []
    for name, value in inputs.items():
        kind = np_to_triton_dtype(value.dtype)
        tensor = triton.InferInput(name, [1, *value.shape], kind)
        tensor.set_data_from_numpy(value[None])
        tensors.append(tensor)
    result = client.infer(model, tensors)
    return inputs, {name: result.as_numpy(name) for name in outputs}


def for_one(step):
    """Outputs in perf_analyzer's form: without the batch dimension."""
    inputs, outputs = step
    return inputs, {name: value[0] for name, value in outputs.items()}


def statistics(client, model):
    stats = client.get_inference_statistics(model)["model_stats"][0]["inference_stats"]
    return stats["success"]["count"], stats["fail"]["count"]


def keys(low, high, count):
    """Keys of a table whose own are ``low…high``, a few unknown ones among them."""
    return RNG.integers(low, high + 5, count)


def sample():
    return {"user": keys(0, 100, 1), "item": keys(-50, 50, 1), "history": keys(-50, 50, 3)}


def test_driver_detects_a_wrong_answer(small_server, client):
    inputs = {**sample(), "dense": np.zeros(3, np.float32)}
    _, outputs = for_one(answered(client, "clicks", inputs, SCORES))
    outputs["logit"] = np.nextafter(outputs["logit"], np.float32(np.inf))
    with pytest.raises(RuntimeError, match="Output doesn't match expected output"):
        perf_analyzer(small_server.address, "clicks", [(inputs, outputs)])


def drive_and_compare(server, client, model, steps, *arguments):
    """Run perf_analyzer on ``steps``, and compare answers to the same requests under its load.

    They must be the bytes from before. Every request of both must succeed."""
    outputs = [output["name"] for output in client.get_model_metadata(model)["outputs"]]
    expected = [answered(client, model, inputs, outputs)[1] for inputs in steps]
    before, compared = statistics(client, model), 0
    with ThreadPoolExecutor(1) as thread:
        load = [(inputs, {}) for inputs in steps]
        running = thread.submit(perf_analyzer, server.address, model, load, *arguments)
        while not running.done():
            for inputs, right in zip(steps, expected, strict=True):
                for name, value in answered(client, model, inputs, outputs)[1].items():
                    np.testing.assert_array_equal(value, right[name])
                compared += 1
        running.result()
    after = statistics(client, model)
    assert after[0] - before[0] >= 200 + compared
    assert after[1] == before[1]
    assert compared > 0


def test_lookup_by_feature(small_server, client):
    drive_and_compare(small_server, client, "clicks.lookup", [sample() for _ in range(5)])


def test_lookup_of_unpooled_keys(small_server, client):
    steps = [{"word": keys(0, 1000, n)} for n in (26, 1, 100)]
    drive_and_compare(small_server, client, "words.lookup", steps)


def test_hps_own_form_of_a_model_without_a_dense_part(small_server, client):
    steps = [{"KEYS": keys(0, 1000, n), "NUMKEYS": np.array([n], np.int32)} for n in (26, 1, 100)]
    drive_and_compare(small_server, client, "words", steps)


def test_random_keys_of_all_64_bits(small_server, client):
    before = statistics(client, "words.lookup")
    perf_analyzer(small_server.address, "words.lookup", [], "--shape", "word:26")
    after = statistics(client, "words.lookup")
    assert after[0] - before[0] >= 200
    assert after[1] == before[1]


@pytest.mark.alone
def test_tensors_in_shared_memory(small_server, client):
    steps = [({"KEYS": keys(0, 1000, 26), "NUMKEYS": np.array([26], np.int32)}, {})]
    room = ("--shared-memory", "system", "--output-shared-memory-size", "1024")
    before = statistics(client, "words")
    perf_analyzer(small_server.grpc, "words", steps, *room, protocol="grpc")
    after = statistics(client, "words")
    assert after[0] - before[0] >= 200
    assert after[1] == before[1]
