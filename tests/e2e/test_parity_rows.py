"""Rows of the whole test split: the exported ones to the bit, unknown keys counted, all of it still there
after a restart."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.http as triton

from benchmarks.peers.hps_server import Hps, start_hps
from examples.ctr.data import FEATURES, Samples
from examples.ctr.export import defaults, tables
from hps.client import Admin, Client

pytestmark = pytest.mark.data


def expected_rows(example) -> dict[str, np.ndarray]:
    """The exported rows of the test split's keys, found one by one in a dictionary."""
    found = {}
    for name, (keys, rows) in tables(example.trained).items():
        known = dict(zip(keys.tolist(), rows, strict=True))
        default = defaults(example.trained)[name]
        found[name] = np.stack([known.get(k, default) for k in example.test.keys[name].tolist()])
    return found


def test_lookups_equal_exported_rows_bit_for_bit(example, served, node):
    expected = expected_rows(example)
    with Client(f"http://{served.address}") as client:
        through_server = client.lookup("ctr", example.test.keys)
    through_library = node.lookup("ctr", example.test.keys)
    for name in FEATURES:
        assert through_server.vectors[name].tobytes() == expected[name].tobytes(), name
        assert through_library.vectors[name].tobytes() == expected[name].tobytes(), name
    assert through_server.defaulted == through_library.defaulted == example.unknown > 0


def test_hps_own_lookup_form_gives_the_same_rows(example, served):
    keys = np.concatenate([example.test.keys[name] for name in FEATURES])[None]
    counts = np.full((1, len(FEATURES)), len(example.test), np.int32)
    inputs = [
        triton.InferInput("KEYS", keys.shape, "INT64").set_data_from_numpy(keys),
        triton.InferInput("NUMKEYS", counts.shape, "INT32").set_data_from_numpy(counts),
    ]
    with triton.InferenceServerClient(served.address) as client:
        flat = client.infer("ctr.lookup", inputs).as_numpy("OUTPUT0")
    expected = np.concatenate([rows.ravel() for rows in expected_rows(example).values()])
    assert flat.tobytes() == expected.tobytes()


def test_unknown_keys_are_counted_and_reported(example, served):
    def counted() -> float:
        return sum(
            s.value
            for s in admin.metrics()
            if s.name == "hps_lookup_keys_total" and s.labels["tier"] == "default"
        )

    with Client(f"http://{served.address}") as client, Admin(f"http://{served.admin}") as admin:
        before = counted()
        reported = sum(
            client.predict("ctr", batch.keys, batch.inputs).defaulted
            for batch in example.test.batches(1000)
        )
        assert reported == counted() - before == example.unknown


def score(server: Hps, samples: Samples) -> np.ndarray:
    with Client(f"http://{server.address}") as client:
        answers = [client.predict("ctr", b.keys, b.inputs) for b in samples.batches(1024)]
    return np.concatenate([answer.outputs["logit"].ravel() for answer in answers])


def test_restart_reuses_loaded_rows(publish_example, example, tmp_path, monkeypatch):
    """The second start cannot have read the files: their vectors are gone by then."""
    version = publish_example(tmp_path)
    with start_hps(tmp_path) as server:
        before = score(server, example.test)
    for vectors in version.glob("tables/*/emb_vector"):
        vectors.write_bytes(bytes(vectors.stat().st_size))
    monkeypatch.setenv("HPS__TIERS__CPU_CACHE__WARM", "false")
    with start_hps(tmp_path) as server:
        after = score(server, example.test)
    np.testing.assert_array_equal(after, before)
    np.testing.assert_allclose(after, example.scores["logit"], rtol=0, atol=1e-5)
