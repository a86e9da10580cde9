"""2,000 small tables in one model, among them an empty one and very narrow and wide ones: imported,
mapped or loaded into RocksDB, answered by a server, and reused at the next start."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
import tritonclient.http as triton

from benchmarks.peers.hps_server import start_hps
from hps.config import configuration_from
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from hps.node.build import open_node
from hps.types import version_now

ROWS, UNKNOWN = 20, 99
DIMS = {"empty": 8, "narrow": 1, "wide": 4096} | {f"t{i}": 8 for i in range(1997)}


def row(table: int, key: int, dim: int) -> list[float]:
    """Row of table number ``table`` for ``key``: different in every table."""
    return [float(table * ROWS + key + 1)] * dim


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    tables = {}
    for number, (name, dim) in enumerate(DIMS.items()):
        keys = np.arange(0 if name == "empty" else ROWS)
        rows = [row(number, key, dim) for key in keys]
        tables[name] = keys, np.array(rows, np.float32).reshape(-1, dim)
    described = [{"name": name, "dim": dim} for name, dim in DIMS.items()]
    spec = ModelSpec.model_validate({"name": "many", "tables": described})
    write_version(folder / "models", spec, 1, tables)
    return folder


def check(vectors) -> None:
    """The answer for keys 3 and UNKNOWN in every table."""
    assert len(vectors) == len(DIMS)
    for number, (name, dim) in enumerate(DIMS.items()):
        known = [0.0] * dim if name == "empty" else row(number, 3, dim)
        np.testing.assert_array_equal(vectors[name], [known, [0.0] * dim], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
def test_library_answers_every_table_also_after_a_restart(folder, caplog, mapped):
    caplog.set_level(logging.INFO, "hps.models.loader")
    settings = {
        "models": {"repository": str(folder / "models")},
        "tiers": {
            "rocksdb": {
                "path": str(folder / f"library-{mapped}"),
                "guard": {"deadline_ms": 20_000},
            },
            "mapped": {"enabled": mapped},
        },
    }
    for loaded in (0 if mapped else len(DIMS), 0):
        caplog.clear()
        began = time.monotonic()
        with open_node(configuration_from(settings)) as node:
            opened = time.monotonic()
            answer = node.lookup("many", {name: [3, UNKNOWN] for name in DIMS})
            tables = node.model("many").tables
            for number, (name, dim) in enumerate(DIMS.items()):
                if name != "empty":
                    version = np.array([version_now()], np.uint64)
                    rows = np.array([row(number, 3, dim)], np.float32)
                    node.tiers[-1].tier.insert(tables[name], np.array([3]), rows, version)
            closing = time.monotonic()
        # Table by table, RocksDB rewriting a file at each and waiting for the disk at each flush, it
        # took four minutes, and half a minute to stop. Quiet, it is 30 s and 2 s.
        assert opened - began < 200
        assert time.monotonic() - closing < 100
        assert sum(": loaded" in message for message in caplog.messages) == loaded
        check(answer.vectors)
        assert answer.defaulted == len(DIMS) + 1
        assert answer.degraded == ()


@pytest.mark.slow
def test_server_answers_every_table(folder):
    with start_hps(folder) as server, triton.InferenceServerClient(server.address) as client:
        inputs = []
        for name in DIMS:
            keys = triton.InferInput(name, [2, 1], "INT64")
            inputs.append(keys.set_data_from_numpy(np.array([[3], [UNKNOWN]])))
        answer = client.infer("many", inputs)
        check({name: answer.as_numpy(name) for name in DIMS})
        parameters = answer.get_response()["parameters"]
        assert parameters["hps_defaulted"] == len(DIMS) + 1
        assert parameters["hps_degraded"] == ""
