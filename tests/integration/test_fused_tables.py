"""A ps.json whose tables HPS fuses: rows under the fused names in HPS's databases and topics."""

from __future__ import annotations

import asyncio
import json
import logging

import confluent_kafka as ck
import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.cli.main import app
from hps.config import load_config
from hps.config.server_settings import ServerSettings
from hps.config.store_settings import RedisSettings
from hps.errors import ModelError
from hps.tiers.redis import RedisTier
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable
from hps.updates.codec import encode_hps
from services.frontend.auth import Authorizer
from services.frontend.http.app import admin_app
from services.frontend.state import FrontendState
from tests.support.kafka_brokers import make_topic, shared_broker, unique
from tests.support.redis_servers import shared_server
from tests.support.rows import constant_rows
from tests.support.waiting import PATIENT_GUARD, until

# name, dim, its keys
TABLES = [("user", 4, range(10)), ("item", 2, range(100, 110)), ("shop", 4, range(200, 210))]
FUSED = {"user": "fused_embedding1", "item": "fused_embedding0", "shop": "fused_embedding1"}


@pytest.fixture
def model():
    return unique("m")


@pytest.fixture
def document(tmp_path, model):
    for name, dim, keys in TABLES:
        folder = tmp_path / name
        folder.mkdir()
        np.array(keys, "<i8").tofile(folder / "key")
        constant_rows(keys, dim).astype("<f4").tofile(folder / "emb_vector")
    described = {
        "model": model,
        "sparse_files": [name for name, _, _ in TABLES],
        "embedding_table_names": [name for name, _, _ in TABLES],
        "embedding_vecsize_per_table": [dim for _, dim, _ in TABLES],
        "default_value_for_each_table": [-1.0] * 3,
        "hit_rate_threshold": 1.1,
    }
    return {
        "supportlonglong": True,
        "fuse_embedding_table": True,
        "persistent_db": {"type": "rocks_db", "path": "db"},
        "models": [described],
    }


@pytest.fixture
def configure(tmp_path, document):
    def configured(*overrides: str, **changes):
        path = tmp_path / "ps.json"
        path.write_text(json.dumps(document | changes))
        return load_config(path, overrides, environ={})

    return configured


def value(node, model: str, feature: str, key: int) -> float:
    return float(node.lookup(model, {feature: np.array([key])}).vectors[feature][0, 0])


def hps_wrote(store, model: str, feature: str, key: int, row: float) -> None:
    """Write a streamed row as HPS does: under the fused table's name."""
    dim = {name: dim for name, dim, _ in TABLES}[feature]
    table = EmbeddingTable.make(FUSED[feature], dim, model=model)
    rows = np.full((1, dim), row, np.float32)
    store.insert(table, np.array([key]), rows, np.zeros(1, np.uint64))


def test_rows_streamed_by_hps_into_rocksdb_are_served(configure, model, tmp_path):
    hps.open(configure()).close()  # loads the files, as HPS does
    store = RocksDbTier(tmp_path / "db", layout="hps")
    hps_wrote(store, model, "user", 3, 33.0)
    hps_wrote(store, model, "shop", 999, 99.0)
    assert {f for f in store.families() if f != "default"} == {
        f"hps_et.{model}.fused_embedding0",
        f"hps_et.{model}.fused_embedding1",
    }
    store.close()
    with hps.open(configure()) as node:
        assert value(node, model, "user", 3) == 33.0
        assert value(node, model, "shop", 999) == 99.0
        assert value(node, model, "user", 4) == 4.0
        assert value(node, model, "shop", 204) == 204.0
        assert value(node, model, "item", 104) == 104.0
        assert value(node, model, "item", 5) == -1.0
        assert not [w for w in node.warnings if "fuse" in w]


def test_rows_in_hpss_redis_are_served(configure, model, tmp_path):
    redis = shared_server().address
    store = RedisTier(RedisSettings(addresses=[redis], layout="hps", partitions=8))
    database = {"type": "redis_cluster", "address": redis, "num_partitions": 8}
    own = f"tiers.rocksdb.path={tmp_path / 'own'}"
    plain = ("tiers.redis.mode=single", "tiers.cpu_cache.enabled=false", own)
    configuration = configure(*plain, volatile_db=database, persistent_db={})
    with hps.open(configuration) as node:
        assert value(node, model, "shop", 204) == 204.0
        hps_wrote(store, model, "shop", 204, 44.0)
        until(lambda: value(node, model, "shop", 204) == 44.0)
        assert {t.name for t in store.find_tables(model)} == {
            "fused_embedding0",
            "fused_embedding1",
        }
    store.close()


def test_rows_of_hps_topics_are_applied_and_others_become_dead_letters(configure, model, caplog):
    broker = shared_broker()
    source = {
        "type": "kafka_message_queue",
        "brokers": broker.address,
        "metadata_refresh_interval_ms": 300,
    }
    for name in ("fused_embedding1", "user"):
        make_topic(broker, f"hps_et.{model}.{name}")

    def send(table: str, key: int, row: float) -> None:
        options = {"bootstrap.servers": broker.address}
        producer = ck.Producer(options, logger=logging.getLogger("test.producer"))
        for payload in encode_hps(np.array([key]), np.full((1, 4), row, np.float32)):
            producer.produce(f"hps_et.{model}.{table}", payload)
        assert producer.flush(60) == 0

    send("user", 4, 55.0)  # a topic that HPS itself writes to a table it never reads
    with hps.open(configure(update_source=source)) as node:
        send("fused_embedding1", 3, 33.0)
        send("fused_embedding1", 203, 44.0)
        until(lambda: value(node, model, "user", 3) == 33.0)
        until(lambda: value(node, model, "shop", 203) == 44.0)

        def letters() -> float:
            lines = node.metrics.render().decode().splitlines()
            (line,) = (
                x
                for x in lines
                if x.startswith("hps_update_dead_letters_total") and "unknown_table" in x
            )
            return float(line.rsplit(" ", 1)[1])

        until(lambda: letters() == 1)
        assert value(node, model, "user", 4) == 4.0
        # Messages of no table are not missing from a store: the stream is not read again for them.
        (stream,) = node.streams._readers.streams
        for _ in range(4):
            assert stream.ingestor._positions.loss() == ""
        assert "read again" not in caplog.text


def infer(node, model: str, keys, counts) -> httpx.Response:
    state = FrontendState()
    state.serve(node)
    asked = admin_app(state, ServerSettings(), Authorizer())
    tensors = [
        {"name": "KEYS", "shape": [1, len(keys)], "datatype": "INT64", "data": keys},
        {"name": "NUMKEYS", "shape": [1, len(counts)], "datatype": "INT32", "data": counts},
    ]

    async def send():
        transport = httpx.ASGITransport(app=asked)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            described = await client.get(f"/v2/models/{model}/config")
            return described, await client.post(
                f"/v2/models/{model}/infer", json={"inputs": tensors}
            )

    return asyncio.run(send())


def test_requests_count_keys_of_the_original_tables(configure, model):
    with hps.open(configure()) as node:
        described, answer = infer(node, model, [3, 4, 104, 203, 5], [2, 1, 2])
        assert answer.status_code == 200, answer.text
        (output,) = answer.json()["outputs"]
        wanted = [3.0] * 4 + [4.0] * 4 + [104.0] * 2 + [203.0] * 4 + [5.0] * 4
        assert output["data"] == wanted
        assert "user" in described.text
        _, answer = infer(node, model, [3], [1])
        assert "has 3 tables: user, item, shop" in answer.json()["error"]


@pytest.mark.parametrize("initialize", [True, False])
def test_overlapping_keys_are_rejected(configure, document, model, tmp_path, initialize):
    document["persistent_db"]["initialize_after_startup"] = initialize
    np.array(range(5, 15), "<i8").tofile(tmp_path / "shop" / "key")
    with pytest.raises(ModelError, match=r"5 keys are in several of .*user, .*shop, but fuse_"):
        hps.open(configure())
    told = CliRunner().invoke(
        app, ["model", "import", str(tmp_path / "ps.json"), "--to", str(tmp_path / "r")]
    )
    assert told.exit_code != 0
    assert "keys are in several" in told.output


def test_import_keeps_fused_tables_and_requests(configure, model, tmp_path):
    configure()
    repository = tmp_path / "models"
    told = CliRunner().invoke(
        app, ["model", "import", str(tmp_path / "ps.json"), "--to", str(repository)]
    )
    assert told.exit_code == 0, told.output
    settings = {
        "models": {"repository": str(repository)},
        "tiers": {"rocksdb": {"path": str(tmp_path / "native"), "guard": PATIENT_GUARD}},
    }
    with hps.open(settings) as node:
        assert set(node.models[model].tables) == {"fused_embedding0", "fused_embedding1"}
        _, answer = infer(node, model, [3, 104, 203], [1, 1, 1])
        assert answer.json()["outputs"][0]["data"] == [3.0] * 4 + [104.0] * 2 + [203.0] * 4


def test_rows_streamed_by_hps_are_converted_into_the_imported_model(configure, model, tmp_path):
    hps.open(configure()).close()
    store = RocksDbTier(tmp_path / "db", layout="hps")
    hps_wrote(store, model, "shop", 999, 99.0)
    store.close()
    repository, native = tmp_path / "models", tmp_path / "native.yaml"
    rocksdb = {"path": str(tmp_path / "native"), "layout": "native"}
    settings = {"models": {"repository": str(repository)}, "tiers": {"rocksdb": rocksdb}}
    native.write_text(json.dumps(settings))  # JSON is YAML
    source = str(tmp_path / "ps.json")
    commands = [
        ["model", "import", source, "--to", str(repository)],
        ["store", "convert", "--config", source, "--into", str(native)],
    ]
    for command in commands:
        told = CliRunner().invoke(app, command)
        assert told.exit_code == 0, told.output
    with hps.open(settings) as node:
        assert value(node, model, "shop", 999) == 99.0
        assert value(node, model, "user", 4) == 4.0
