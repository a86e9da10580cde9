"""Our lookup in Triton's python backend, alone and in an ensemble with the network: a real Triton, attached
to a real node."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from typer.testing import CliRunner

import hps
from benchmarks.peers.triton import start_triton
from hps.cli.triton import app
from hps.config.model_schema import ModelSpec
from hps.errors import NotFound
from hps.models.version_writer import write_version
from hps.native import COMPILED
from services.triton.backend import LookupBackend
from tests.support.small_models import LOOKUP, RANKING, network, write_models
from tests.support.waiting import PATIENT_GUARD, until

pytestmark = [
    pytest.mark.usefixtures("triton_ready"),
    pytest.mark.skipif(not COMPILED, reason="a shared cache needs the native core"),
]
RNG = np.random.default_rng(5)


def write_halved(repository):
    """`clicks` with rows of float16 and the same network, which takes float32."""
    tables = [{**table, "dtype": "float16"} for table in RANKING["tables"]]
    spec = ModelSpec.model_validate({**RANKING, "name": "halved", "tables": tables})
    keys = np.arange(-50, 100)
    rows = {t.name: (keys, RNG.standard_normal((150, t.dim), np.float32)) for t in spec.tables}
    write_version(repository, spec, 1, rows, dense=network())


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The configuration file of a node with a shared cache and a socket."""
    folder = tmp_path_factory.mktemp("node")
    write_models(folder / "models")
    write_halved(folder / "models")
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    config = folder / "config.yaml"
    settings = {
        "models": {"repository": str(folder / "models")},
        "tiers": {
            "rocksdb": {"path": str(folder / "db"), "guard": PATIENT_GUARD},
            "cpu_cache": {"shared": {"name": f"test-{os.getpid()}"}},
        },
        "server": {"runtime": str(runtime)},
    }
    config.write_text(json.dumps(settings))
    return config


@pytest.fixture(scope="module")
def node(config):
    with hps.open(config) as node:
        yield node


@pytest.fixture(scope="module")
def server(node, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("triton")
    for model in ("clicks", "words", "halved"):
        done = CliRunner().invoke(
            app,
            [
                *("export", model, "--out", str(folder), "--dense", "python", "--instances", "2"),
                *("--config", str(config), "--repository", str(config.parent / "models")),
            ],
        )
        assert done.exit_code == 0, done.output
    with start_triton(folder, timeout_s=120) as server:
        yield server


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(request, server):
    kind = triton_http if request.param == "http" else triton_grpc
    address = server.address if request.param == "http" else server.grpc
    with kind.InferenceServerClient(address) as client:
        client.kind = kind
        yield client


def infer(client, model, outputs=None, **inputs):
    sent = []
    for name, array in inputs.items():
        tensor = client.kind.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        sent.append(tensor.set_data_from_numpy(array))
    wanted = [client.kind.InferRequestedOutput(name) for name in outputs or ()] or None
    return client.infer(model, sent, outputs=wanted)


def features(batch):
    return {
        "user": RNG.integers(0, 110, (batch, 1)),
        "item": RNG.integers(-60, 60, (batch, 1)),
        "history": RNG.integers(-60, 60, (batch, 3)),
    }


def test_lookup_by_keys_and_numkeys(client, node):
    users, items = RNG.integers(0, 110, 7), RNG.integers(-60, 60, 5)
    result = infer(
        client,
        "clicks.lookup",
        ["OUTPUT0"],
        KEYS=np.concatenate([users, items])[None],
        NUMKEYS=np.array([[7, 5]], np.int32),
    )
    ours = node.lookup("clicks", {"users": users, "items": items}, by_table=True).vectors
    expected = np.concatenate([ours["users"].reshape(-1), ours["items"].reshape(-1)])
    found = result.as_numpy("OUTPUT0")
    assert found.shape == (1, 7 * 4 + 5 * 2)
    assert found.tobytes() == expected.tobytes()


def test_lookup_with_one_tensor_per_feature(client, node):
    for batch in (1, 6):
        asked = features(batch)
        result = infer(client, "clicks.lookup", ["user", "history"], **asked)
        ours = node.lookup("clicks", asked).vectors
        for name in ("user", "history"):
            assert result.as_numpy(name).tobytes() == ours[name].tobytes()


@pytest.mark.parametrize("model", ["clicks", "halved"])
def test_ensemble_scores_equal_the_nodes(client, node, model):
    for batch in (1, 9, 64):
        asked, dense = features(batch), RNG.standard_normal((batch, 3), dtype=np.float32)
        result = infer(client, model, dense=dense, **asked)
        ours = node.predict(model, asked, {"dense": dense}).outputs
        for name in ("score", "logit"):
            np.testing.assert_allclose(result.as_numpy(name), ours[name], atol=1e-6)


def test_concurrent_requests_get_their_own_answers(client, node):
    asked = [features(int(batch)) for batch in RNG.integers(1, 9, 60)]
    if client.kind is triton_http:
        pytest.skip("Triton's HTTP client is for one thread")
    with ThreadPoolExecutor(12) as pool:
        found = list(
            pool.map(lambda each: infer(client, "clicks.lookup", ["history"], **each), asked)
        )
    for result, each in zip(found, asked, strict=True):
        expected = node.lookup("clicks", {"history": each["history"]}).vectors["history"]
        assert result.as_numpy("history").tobytes() == expected.tobytes()


def test_requests_with_unequal_numbers_of_keys_are_batched(server):
    """Triton passes on waiting requests together, whatever their numbers of keys."""
    with triton_grpc.InferenceServerClient(server.grpc) as client, ThreadPoolExecutor(16) as pool:
        client.kind = triton_grpc
        counted = statistics(client)
        sizes = iter(range(1, 10_000))

        def ask(_):
            keys = RNG.integers(-60, 60, n := next(sizes))
            infer(
                client,
                "clicks.lookup",
                ["OUTPUT0"],
                KEYS=keys[None],
                NUMKEYS=np.array([[0, n]], np.int32),
            )

        def shared():
            list(pool.map(ask, range(32)))
            requests, calls = (
                now - before for now, before in zip(statistics(client), counted, strict=True)
            )
            return calls < requests

        until(shared)


def statistics(client):
    """Requests to ``clicks.lookup`` so far, and the calls they came in."""
    (found,) = client.get_inference_statistics("clicks.lookup").model_stats
    return found.inference_count, found.execution_count


def test_changed_row_is_returned(client, node):
    key, row = np.array([[7]]), np.full((1, 8), float(RNG.integers(1, 1000)), np.float32)
    infer(client, "words.lookup", ["word"], word=key)
    node.write("words", "words", key[0], row)
    assert infer(client, "words.lookup", ["word"], word=key).as_numpy("word").tolist() == [
        row[0].tolist()
    ]


def write_next(config, name, spec, **network):
    """Version 2 of a model, whose rows are ten times those of version 1."""
    keys = {"users": np.arange(100), "items": np.arange(-50, 50), "words": np.arange(1000)}
    tables = {
        table["name"]: (
            keys[table["name"]],
            10 * (keys[table["name"]][:, None] + np.arange(table["dim"], dtype=np.float32) / 8),
        )
        for table in spec["tables"]
    }
    root = config.parent / "models"
    if not (root / name / "2").exists():
        write_version(root, ModelSpec.model_validate(spec), 2, tables, **network)


def test_lookups_without_a_network_follow_the_node(client, node, config):
    key = np.array([[900]])

    def first():
        return infer(client, "words.lookup", ["word"], word=key).as_numpy("word")[0, 0]

    write_next(config, "words", LOOKUP)
    node.load("words", 2)
    until(lambda: first() == 9000)
    assert node.rollback("words") == 1
    until(lambda: first() == 900)
    node.unload("words")
    with pytest.raises(InferenceServerException, match="no longer serves model") as refused:
        first()
    assert refused.value.status() == status(client, 404)
    node.load("words", 1)
    until(lambda: first() == 900)
    node.write("words", "words", key[0], np.full((1, 8), 5, np.float32))
    assert first() == 5
    node.write("words", "words", key[0], np.arange(8, dtype=np.float32)[None] / 8 + 900)


def export(model, version, folder, config):
    done = CliRunner().invoke(
        app,
        [
            *("export", model, "--out", str(folder), "--dense", "python"),
            *("--version", str(version), "--config", str(config)),
            *("--repository", str(config.parent / "models")),
        ],
    )
    assert done.exit_code == 0, done.output


def test_ensemble_changes_its_version_by_tritons_load(node, config, tmp_path):
    """Under requests, none of which fails or mixes rows of one version with the network of another one."""
    write_next(config, "clicks", RANKING, dense=network(0.5))
    node.load("clicks", 1)
    export("clicks", 1, tmp_path, config)
    inputs = {n: v.astype(np.int64) for n, v in features(3).items()}
    inputs["dense"] = np.full((3, 3), 0.25, np.float32)
    right = {}
    for version in (1, 2):
        node.load("clicks", version, switch=False)
        found = node.predict(
            "clicks",
            {n: inputs[n] for n in ("user", "item", "history")},
            {"dense": inputs["dense"]},
            version=version,
        )
        right[version] = found.outputs["logit"]
    names = ["--model-control-mode=explicit", "--load-model=clicks"]
    with start_triton(tmp_path, timeout_s=120, arguments=tuple(names)) as server:
        seen, failed, stop = [], [], threading.Event()

        def ask():
            with triton_http.InferenceServerClient(server.address) as client:
                client.kind = triton_http
                while not stop.is_set():
                    try:
                        scores = infer(client, "clicks", ["logit"], **inputs).as_numpy("logit")
                        seen.append(
                            next(v for v, r in right.items() if np.allclose(scores, r, rtol=1e-4))
                        )
                    except Exception as error:
                        failed.append(error)
                        return

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: len(seen) > 20 or failed)
            node.switch("clicks", 2)  # Triton stays with the rows of its network
            count = len(seen)
            until(lambda: len(seen) > count + 20 or failed)
            assert set(seen) == {1}
            export("clicks", 2, tmp_path, config)
            with triton_http.InferenceServerClient(server.address) as client:
                for name in ("clicks.lookup", "clicks.dense", "clicks"):
                    client.load_model(name)
            count = len(seen)
            until(lambda: len(seen) > count + 20 or failed)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failed, failed
        assert set(seen[-10:]) == {2}
    node.load("clicks", 1)


def test_version_that_the_node_does_not_serve_is_rejected(node, config, tmp_path):
    with pytest.raises(NotFound, match=r"needs version 7 of the node.*hps model load clicks 7"):
        LookupBackend("clicks.lookup", {"config": str(config)}, 7)


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ({"KEYS": np.zeros((1, 3), np.int64)}, "'KEYS' and 'NUMKEYS' go together"),
        (
            {"KEYS": np.zeros((1, 3), np.int64), "NUMKEYS": np.array([[1, 1]], np.int32)},
            "add up to the 3 keys",
        ),
    ],
)
def test_invalid_requests_are_rejected(client, inputs, error):
    with pytest.raises(InferenceServerException, match=error) as refused:
        infer(client, "clicks.lookup", ["OUTPUT0"], **inputs)
    assert refused.value.status() == status(client, 400)


def status(client, number):
    """The HTTP status as each client reports it."""
    codes = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND"}
    return f"StatusCode.{codes[number]}" if client.kind is triton_grpc else str(number)
