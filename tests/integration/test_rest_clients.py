"""A real server, driven unchanged by tritonclient's HTTP clients, synchronous and asyncio."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

RNG = np.random.default_rng(11)


def tensor(name, array, datatype=None, *, binary=True):
    array = np.asarray(array)
    kind = datatype or triton.np_to_triton_dtype(array.dtype)
    return triton.InferInput(name, list(array.shape), kind).set_data_from_numpy(
        array, binary_data=binary
    )


def row(keys, dim):
    return np.asarray(keys, np.float32)[..., None] + np.arange(dim, dtype=np.float32) / 8


def ranking(batch, *, binary=True):
    """Inputs of ``clicks`` and the scores numpy gives for them."""
    user, item = RNG.integers(0, 100, (batch, 1)), RNG.integers(-50, 50, (batch, 1))
    history = RNG.integers(-50, 50, (batch, 3))
    dense = RNG.standard_normal((batch, 3)).astype(np.float32)
    inputs = {"user": user, "item": item, "history": history, "dense": dense}
    vectors = [row(user[:, 0], 4), row(item[:, 0], 2), row(history, 2).mean(axis=1), dense]
    logit = np.concatenate(vectors, axis=1) @ np.linspace(-1, 1, 11, dtype=np.float32)[:, None]
    return [tensor(n, a, binary=binary) for n, a in inputs.items()], logit


@pytest.fixture(scope="module")
def sync_client(small_server):
    with triton.InferenceServerClient(small_server.address, network_timeout=60) as client:
        yield client


class Blocking:
    """tritonclient's asyncio client, one call at a time."""

    def __init__(self, address):
        self._address = address

    def __getattr__(self, name):
        def call(*args, **options):
            async def once():
                async with triton_aio.InferenceServerClient(
                    self._address, conn_timeout=60
                ) as client:
                    answer = await getattr(client, name)(*args, **options)
                    # Health calls leave the body unread; its end frees the connection.
                    await asyncio.sleep(0.02)
                    return answer

            return asyncio.run(once())

        return call


@pytest.fixture(params=["sync", "aio"])
def client(request, small_server, sync_client):
    return sync_client if request.param == "sync" else Blocking(small_server.address)


def test_health_metadata_and_configuration_are_read(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("clicks")
    assert client.is_model_ready("clicks", "1")
    assert not client.is_model_ready("nope")
    assert not client.is_model_ready("clicks", "2")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("clicks")["inputs"][0]["name"] == "user"
    assert client.get_model_config("clicks")["max_batch_size"] == 64
    names = [entry["name"] for entry in client.get_model_repository_index()]
    assert names == ["clicks", "clicks.lookup", "words", "words.lookup"]
    for method in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match="is not offered") as caught:
            method("clicks")
        assert caught.value.status() == "501"


@pytest.mark.parametrize("binary", [True, False])
def test_ranking_returns_the_networks_scores(client, binary):
    inputs, logit = ranking(5, binary=binary)
    wanted = [
        triton.InferRequestedOutput(n, binary_data=binary)
        for n in ("logit", "score", "item.source")
    ]
    result = client.infer("clicks", inputs, request_id="r7", outputs=wanted)
    np.testing.assert_allclose(result.as_numpy("logit"), logit, rtol=1e-5, atol=1e-5)
    score = 1 / (1 + np.exp(-logit.astype(np.float64)))
    np.testing.assert_allclose(result.as_numpy("score"), score, rtol=1e-4, atol=1e-6)
    assert set(result.as_numpy("item.source").ravel()) <= {2, 4}
    head = result.get_response()
    assert (head["id"], head["model_version"]) == ("r7", "1")
    assert head["parameters"] == {"hps_defaulted": 0, "hps_degraded": ""}


def test_json_and_binary_answers_are_bit_identical(client):
    keys = RNG.integers(0, 1000, (2, 9))
    as_bytes = client.infer("words.lookup", [tensor("word", keys)]).as_numpy("word")
    wanted = [triton.InferRequestedOutput("word", binary_data=False)]
    as_json = client.infer("words.lookup", [tensor("word", keys, binary=False)], outputs=wanted)
    assert as_bytes.tobytes() == as_json.as_numpy("word").tobytes() == row(keys, 8).tobytes()


def test_top_k_returns_the_best_candidates(client):
    inputs, _ = ranking(6)
    user = inputs[0]._get_tensor()
    assert user["shape"] == [6, 1]
    one = [tensor("user", [[7]]), *inputs[1:]]
    everyone = client.infer("clicks", one)
    best = client.infer("clicks", one, parameters={"top_k": 2})
    order = np.argsort(-everyone.as_numpy("score")[:, 0], kind="stable")[:2]
    assert best.as_numpy("top_k_index").tolist() == order.tolist()
    assert best.as_numpy("score").tobytes() == everyone.as_numpy("score")[order].tobytes()


def test_lookup_by_keys_and_numkeys(client):
    keys = np.array([[3, 999, 10**6]])
    counts = np.array([[3]], np.int32)
    result = client.infer("words", [tensor("KEYS", keys), tensor("NUMKEYS", counts)])
    expected = np.concatenate([row([3, 999], 8).ravel(), np.zeros(8, np.float32)])
    assert result.as_numpy("OUTPUT0").tobytes() == expected.tobytes()
    assert result.get_response()["parameters"]["hps_defaulted"] == 1


def test_jagged_keys_are_pooled(client):
    inputs = [
        tensor("history", np.array([1, 3, -5])),
        tensor("history.offsets", np.array([0, 2, 2, 3])),
        tensor("history.weights", np.array([3, 1, 2], np.float32)),
    ]
    found = client.infer("clicks.lookup", inputs).as_numpy("history")
    assert found.tolist() == [[1.5, 1.625], [0, 0], [-5, -4.875]]


def test_errors_have_status_and_message(client):
    cases = [
        ("nope", [tensor("word", [[1]])], "404", "Request for unknown model: 'nope' is not found"),
        (
            "words",
            [tensor("word", [[1]], "INT64"), tensor("x", [[1]])],
            "400",
            "unexpected inference",
        ),
        ("words.lookup", [tensor("word", [[1.0]])], "400", "data-type is"),
        ("clicks", [tensor("user", [[1]])], "400", "missing 'item', 'history', 'dense'"),
    ]
    for model, inputs, status, message in cases:
        with pytest.raises(InferenceServerException, match=message) as caught:
            client.infer(model, inputs)
        assert caught.value.status() == status


def test_concurrent_requests_are_answered(small_server):
    async def flood():
        async with triton_aio.InferenceServerClient(small_server.address) as client:

            async def one(i):
                keys = np.full((1, 4), i % 1000)
                found = await client.infer(
                    "words.lookup", [tensor("word", keys)], request_id=str(i)
                )
                assert found.get_response()["id"] == str(i)
                assert found.as_numpy("word")[0, 0] == i % 1000

            await asyncio.gather(*(one(i) for i in range(300)))

    asyncio.run(asyncio.wait_for(flood(), 120))


def test_admin_port_shows_rows(small_server):
    import json
    import urllib.request

    url = f"http://{small_server.admin}/v1/tables/clicks/items/rows?keys=-3,77"
    with urllib.request.urlopen(url, timeout=60) as reply:
        rows = [SimpleNamespace(**each) for each in json.load(reply)["rows"]]
    assert (rows[0].found, rows[0].vector) == (True, [-3.0, -2.875])
    assert rows[0].source in ("cpu", "rocksdb")
    assert rows[0].age_s >= 0
    assert (rows[1].found, rows[1].source, rows[1].vector) == (False, "default", [1.0, 2.0])
