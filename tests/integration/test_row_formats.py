"""Narrow rows between processes: front ends, attached processes and Redis return the vectors of one node."""

import shutil
import tempfile

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.config.server_settings import GrpcSettings, ServerSettings
from hps.lookup.max_norm import scale_to_norm
from hps.lookup.remote.lookup_codec import LookupRequestTemplate
from hps.models.version_writer import write_version
from hps.native import COMPILED
from hps.row_format import row_format
from hps.tiers.stored_rows import to_rows, to_vectors
from hps.types import EmbeddingTable
from services.frontend.auth import Authorizer
from services.frontend.grpc.server import GrpcServer
from services.frontend.state import FrontendState
from tests.support import redis_servers
from tests.support.server_thread import Running
from tests.support.waiting import PATIENT_GUARD

ROWS, DIM, DEFAULT = 500, 24, 0.1
KEYS = np.arange(ROWS)
FORMATS = ["bfloat16", "float8_e4m3", "int8", "int4"]


def vectors():
    return np.random.default_rng(4).standard_normal((ROWS, DIM)).astype(np.float32)


@pytest.fixture
def models(tmp_path):
    tables = [{"name": name, "dim": DIM, "rows": name, "default": DEFAULT} for name in FORMATS]
    features = [{"name": name, "table": name, "pooling": "none"} for name in FORMATS]
    features += [{"name": f"{name}_bag", "table": name} for name in FORMATS]
    features.append({"name": "short", "table": "int8", "pooling": "none", "max_norm": 2.0})
    spec = ModelSpec.model_validate({"name": "m", "tables": tables, "features": features})
    write_version(tmp_path / "models", spec, 1, {name: (KEYS, vectors()) for name in FORMATS})
    return tmp_path / "models"


def settings(models, folder, **tiers):
    rocksdb = {"path": str(folder / "db"), "guard": PATIENT_GUARD}
    tiers = {"rocksdb": rocksdb, **tiers}
    return {"models": {"repository": str(models)}, "tiers": tiers}


def ask(process):
    keys = np.array([3, 1, ROWS + 5, 7])
    features = dict.fromkeys(FORMATS, keys)
    features |= {f"{name}_bag": np.stack([keys, keys[::-1]] * 2) for name in FORMATS}
    return process.lookup("m", features).vectors


def expected(name):
    table = EmbeddingTable.make(name, DIM, rows=name)
    found = to_vectors(table, to_rows(table, vectors()))
    rows = np.stack([found[3], found[1], np.full(DIM, DEFAULT, np.float32), found[7]])
    return rows, ((rows[0] + rows[1]) + rows[2]) + rows[3]


def check(process):
    answers = ask(process)
    for name in FORMATS:
        rows, bag = expected(name)
        np.testing.assert_array_equal(answers[name], rows)
        np.testing.assert_array_equal(answers[f"{name}_bag"][0], bag)


def test_front_ends_answer_the_vectors_of_their_nodes(models, tmp_path, monkeypatch):
    responses = []
    result = LookupRequestTemplate.result

    def recorded(self, response):
        responses.append(response)
        return result(self, response)

    monkeypatch.setattr(LookupRequestTemplate, "result", recorded)
    front = tmp_path / "front"
    shutil.copytree(models, front, ignore=shutil.ignore_patterns("tables"))
    with hps.open(settings(models, tmp_path)) as node:
        check(node)
        state = FrontendState()
        state.serve(node)
        port = Running(GrpcServer(GrpcSettings(port=0), state, ServerSettings(), Authorizer()))
        try:
            config = {
                "models": {"repository": str(front)},
                "lookup": {"nodes": [port.server.url]},
            }
            with hps.connect(config) as connected:
                check(connected)
                assert not responses[-1].stored_rows  # a default is among them
                keys = np.array([3, 1, 7])
                for features in ({"int8": keys}, dict.fromkeys(FORMATS, keys)):
                    for want_source in (False, True):
                        found = connected.lookup("m", features, want_source=want_source)
                        for name in features:
                            rows = expected(name)[0][[0, 1, 3]]
                            np.testing.assert_array_equal(found.vectors[name], rows)
                        size = sum(row_format(name).row_bytes(DIM) for name in features)
                        assert responses[-1].stored_rows
                        assert len(responses[-1].vectors) == 3 * size
                rows = expected("int8")[0][[0, 1, 3]]
                found = connected.lookup("m", {"int8": keys, "short": keys}).vectors
                np.testing.assert_array_equal(found["int8"], rows)
                np.testing.assert_array_equal(found["short"], scale_to_norm(rows, 2.0))
                assert (found["short"] != rows).any()
                found = connected.lookup("m", {"int8": keys}, by_table=True)
                np.testing.assert_array_equal(found.vectors["int8"], expected("int8")[0][[0, 1, 3]])
                assert len(responses[-1].vectors) == 3 * (DIM + 4)
        finally:
            port.stop(force=True)
            port.join()


@pytest.mark.skipif(not COMPILED, reason="a shared cache needs the compiled core")
@pytest.mark.parametrize("mapped", [{}, {"memory_bytes": 0}, {"enabled": False}])
def test_attached_processes_read_the_rows_of_the_node(models, tmp_path, mapped):
    cache = {"share": 0.5, "warm": True}
    with tempfile.TemporaryDirectory(prefix="hps-") as runtime:  # pytest's names are too long
        config = settings(models, tmp_path, cpu_cache=cache, mapped=mapped)
        config["server"] = {"runtime": runtime}
        with hps.open(config) as node, hps.attach(config) as attached:
            check(attached)  # misses are read by the node
            check(node)
            check(attached)


def test_redis_keeps_narrow_rows(models, tmp_path):
    server = redis_servers.shared_server()
    redis = {"addresses": [server.address], "guard": PATIENT_GUARD, "initial_cache_rate": 1.0}
    tiers = {"cpu_cache": {"enabled": False}, "mapped": {"enabled": False}, "redis": redis}
    config = settings(models, tmp_path, **tiers, rocksdb={"enabled": False})
    for _ in range(2):
        with hps.open(config) as node:
            check(node)
