"""Scores of the whole test split: the trainer's own, and by every way in.

Each way sends batches of a size of its own, so that what is compared is not one and the same run of
the network.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from pyarrow import csv, parquet

from benchmarks.peers.hps_server import Hps
from examples.ctr.data import FEATURES, Samples
from examples.ctr.training import auc
from hps.client import Client
from hps.node.node import Node

pytestmark = pytest.mark.data

OUTPUTS = ("click", "logit")
TO_EACH_OTHER = 1e-6
# A logit's last bit is worth up to 4.8e-7.
TO_TRAINER = {"click": 1e-6, "logit": 2e-6}

Scores = dict[str, np.ndarray]


def tensors(samples: Samples, unsigned: bool = False) -> dict[str, np.ndarray]:
    """One request's tensors by name; all are ``(n, 1)``."""
    kind = np.uint64 if unsigned else np.int64
    return {n: k.view(kind)[:, None] for n, k in samples.keys.items()} | samples.inputs


def datatype(array: np.ndarray) -> str:
    return {"int64": "INT64", "uint64": "UINT64", "float32": "FP32"}[array.dtype.name]


def joined(parts: list[Scores]) -> Scores:
    return {name: np.concatenate([part[name].ravel() for part in parts]) for name in parts[0]}


def post(address: str, body: bytes, headers: dict[str, str]) -> tuple[dict[str, str], bytes]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("POST", "/v2/models/ctr/infer", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return {name.lower(): value for name, value in answer.getheaders()}, content
    finally:
        connection.close()


# -- the ways in -----------------------------------------------------------------------------------


def by_json(server: Hps, samples: Samples) -> Scores:
    """Unsigned keys as they stand in the file, numbers as JSON writes them."""

    def ask(batch: Samples) -> Scores:
        inputs = [
            {"name": name, "shape": a.shape, "datatype": datatype(a), "data": a.tolist()}
            for name, a in tensors(batch, unsigned=True).items()
        ]
        headers = {"Content-Type": "application/json"}
        _, content = post(server.address, json.dumps({"inputs": inputs}).encode(), headers)
        return {o["name"]: np.array(o["data"], np.float32) for o in json.loads(content)["outputs"]}

    return joined([ask(batch) for batch in samples.batches(500)])


def by_bytes(server: Hps, samples: Samples) -> Scores:
    """The binary tensor extension, written by hand."""

    def ask(batch: Samples) -> Scores:
        arrays = tensors(batch)
        inputs = [
            {
                "name": name,
                "shape": array.shape,
                "datatype": datatype(array),
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, array in arrays.items()
        ]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        body = head + b"".join(array.tobytes() for array in arrays.values())
        headers, content = post(
            server.address, body, {"Inference-Header-Content-Length": str(len(head))}
        )
        start = int(headers["inference-header-content-length"])
        found = {}
        for output in json.loads(content[:start])["outputs"]:
            size = output["parameters"]["binary_data_size"]
            found[output["name"]] = np.frombuffer(content[start : start + size], np.float32)
            start += size
        assert start == len(content)
        return found

    return joined([ask(batch) for batch in samples.batches(777)])


def triton_inputs(batch: Samples) -> list[triton.InferInput]:
    inputs = []
    for name, array in tensors(batch).items():
        given = triton.InferInput(name, list(array.shape), datatype(array))
        inputs.append(given.set_data_from_numpy(array))
    return inputs


def by_tritonclient(server: Hps, samples: Samples) -> Scores:
    with triton.InferenceServerClient(server.address) as client:
        parts = [client.infer("ctr", triton_inputs(batch)) for batch in samples.batches(1024)]
    return joined([{name: part.as_numpy(name) for name in OUTPUTS} for part in parts])


def by_tritonclient_aio(server: Hps, samples: Samples) -> Scores:
    async def ask() -> list[triton.InferResult]:
        async with triton_aio.InferenceServerClient(server.address) as client:
            batches = [triton_inputs(batch) for batch in samples.batches(64)]
            return await asyncio.gather(*(client.infer("ctr", batch) for batch in batches))

    return joined([{n: part.as_numpy(n) for n in OUTPUTS} for part in asyncio.run(ask())])


def by_file(server: Hps, samples: Samples, folder: Path, source: str, out: str) -> Scores:
    """``hps predict`` on a file; the scores as it writes them."""
    table = pa.table({n: a[:, 0] for n, a in tensors(samples, unsigned=True).items()})
    write = parquet.write_table if source.endswith(".parquet") else csv.write_csv
    write(table, folder / source)
    command = [sys.executable, "-m", "hps.cli.main", "predict", "ctr", str(folder / source)]
    command += ["--out", str(folder / out), "--server", f"http://{server.address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if out.endswith(".npz"):
        with np.load(folder / out) as scored:
            return {name: scored[name].ravel() for name in OUTPUTS}
    scored = parquet.read_table(folder / out)
    return {name: scored[name].to_numpy() for name in OUTPUTS}


def by_library(node: Node, samples: Samples) -> Scores:
    batches = samples.batches(333)
    return joined([node.predict("ctr", batch.keys, batch.inputs).outputs for batch in batches])


# -- and what they answer --------------------------------------------------------------------------

WAYS = ("json", "binary", "tritonclient", "tritonclient.aio", "parquet", "csv", "library")


@pytest.fixture(scope="module")
def answers(example, served, node, tmp_path_factory) -> dict[str, Scores]:
    """Scores of the whole test split by way in."""
    folder = tmp_path_factory.mktemp("files")
    scores = {
        "json": by_json(served, example.test),
        "binary": by_bytes(served, example.test),
        "tritonclient": by_tritonclient(served, example.test),
        "tritonclient.aio": by_tritonclient_aio(served, example.test),
        "parquet": by_file(served, example.test, folder, "in.parquet", "out.parquet"),
        "csv": by_file(served, example.test, folder, "in.csv", "out.npz"),
        "library": by_library(node, example.test),
    }
    assert tuple(scores) == WAYS
    return scores


@pytest.mark.parametrize("way", WAYS)
def test_scores_equal_the_trainers(example, answers, way):
    assert len(example.test) == 7989
    for name in OUTPUTS:
        np.testing.assert_allclose(
            answers[way][name], example.scores[name], rtol=0, atol=TO_TRAINER[name], err_msg=name
        )


def test_scores_are_equal_over_every_interface(answers):
    for name in OUTPUTS:
        scores = np.stack([answers[way][name] for way in WAYS]).astype(np.float64)
        assert np.ptp(scores, axis=0).max() <= TO_EACH_OTHER, name


def test_scores_do_not_depend_on_batch_size(example, served, answers):
    some = example.test.take(np.arange(100))
    with Client(f"http://{served.address}") as client:
        found = joined([client.predict("ctr", s.keys, s.inputs).outputs for s in some.batches(1)])
    for name in OUTPUTS:
        difference = np.abs(found[name] - answers["binary"][name][:100]).max()
        assert difference <= TO_EACH_OTHER, name


def test_served_auc_equals_the_trainers(example, answers):
    """Samples that the model can't tell apart are ties, whose last bits depend on where in a batch
    they stand; they take the score of the first of them."""
    places = example.trained.vocabulary.places(example.test)
    seen = np.concatenate([places, *example.test.inputs.values()], axis=1)
    _, first, twin = np.unique(seen, axis=0, return_index=True, return_inverse=True)
    same = first[twin.ravel()]
    offline = auc(example.test.clicked, example.scores["logit"][same])
    assert offline > 0.68  # hashed logistic regression: 0.674 on this split
    for way in WAYS:
        through_server = auc(example.test.clicked, answers[way]["logit"][same])
        assert abs(through_server - offline) <= 1e-6, way


def test_candidates_share_the_user_and_the_query(example, served, node):
    """One impression's context with batch 1, the ads of 50 others, and the 5 best of them."""
    candidates = example.test.take(np.arange(50))
    context = example.test.take(np.arange(50, 51))
    shared = ("user", "query", "depth")
    keys = {n: (context if n in shared else candidates).keys[n] for n in FEATURES}
    inputs = {n: (context if n in shared else candidates).inputs[n] for n in candidates.inputs}
    whole = Samples(
        {name: np.broadcast_to(values, 50) for name, values in keys.items()},
        {name: np.broadcast_to(values, (50, 1)) for name, values in inputs.items()},
        candidates.clicked,
    )
    expected = example.trained.score(whole)
    with Client(f"http://{served.address}") as client:
        for ask in (client.predict, node.predict):
            everyone = ask("ctr", keys, inputs).outputs
            best = ask("ctr", keys, inputs, top_k=5).outputs
            order = np.argsort(-everyone["click"].ravel(), kind="stable")[:5]
            assert best["top_k_index"].tolist() == order.tolist()
            for name in OUTPUTS:
                np.testing.assert_allclose(
                    everyone[name].ravel(), expected[name], rtol=0, atol=TO_TRAINER[name]
                )
                assert best[name].tobytes() == everyone[name][order].tobytes()
