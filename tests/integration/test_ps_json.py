"""A ps.json served unchanged: the rows of HugeCTR folders through RocksDB and the CPU cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.config import Configuration, load_config
from hps.errors import BadRequest
from hps.node.node import Node
from hps.types import JaggedKeys, Source
from hps.updates import Producer
from tests.support.kafka_brokers import shared_broker, unique
from tests.support.waiting import until

ROWS = 500
WIDE = 2**40  # keys beyond 32 bits


def keys_of(table: int) -> Any:
    return np.arange(ROWS, dtype=np.int64) * 7 + WIDE * table


def rows_of(table: int, dim: int) -> Any:
    return (np.arange(ROWS * dim, dtype=np.float32) + 1000 * table).reshape(ROWS, dim)


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    for table, dim in ((0, 4), (1, 2)):
        folder = tmp_path / f"t{table}"
        folder.mkdir()
        keys_of(table).astype("<i8").tofile(folder / "key")
        rows_of(table, dim).astype("<f4").tofile(folder / "emb_vector")
    return {
        "supportlonglong": True,
        "persistent_db": {"type": "rocks_db", "path": "db"},
        "models": [
            {
                "model": "wdl",
                "sparse_files": ["t0", "t1"],
                "embedding_vecsize_per_table": [4, 2],
                "embedding_table_names": ["user", "item"],
                "default_value_for_each_table": [-1.5],
                "maxnum_catfeature_query_per_table_per_sample": [2, 3],
                "max_batch_size": 10,
                "hit_rate_threshold": 1.1,
                "gpucacheper": 0.5,
            }
        ],
    }


Serve = Callable[[dict[str, Any]], Node]


@pytest.fixture
def configure(tmp_path: Path) -> Callable[[dict[str, Any]], Configuration]:
    def _configure(document: dict[str, Any]) -> Configuration:
        path = tmp_path / "ps.json"
        path.write_text(json.dumps(document))
        return load_config(path, environ={})

    return _configure


def by_table(node: Node, table: str, keys: Any) -> tuple[Any, list[int]]:
    found = node.lookup("wdl", {table: keys}, by_table=True, want_source=True)
    return found.vectors[table], found.sources[table].tolist()


def test_every_row_is_served(configure: Any, document: dict[str, Any]) -> None:
    with hps.open(configure(document)) as node:
        for start in range(0, ROWS, 20):
            some = slice(start, start + 20)
            for table, (name, dim) in enumerate([("user", 4), ("item", 2)]):
                vectors, _ = by_table(node, name, keys_of(table)[some])
                assert np.array_equal(vectors, rows_of(table, dim)[some])


def test_unknown_keys_get_the_table_s_default(configure: Any, document: dict[str, Any]) -> None:
    with hps.open(configure(document)) as node:
        vectors, sources = by_table(node, "user", [5, 0])
        assert vectors.tolist() == [[-1.5] * 4, rows_of(0, 4)[0].tolist()]
        assert sources[0] == Source.DEFAULT
        assert by_table(node, "item", [5])[0].tolist() == [[0.0, 0.0]]


def test_cache_holds_its_share(configure: Any, document: dict[str, Any]) -> None:
    with hps.open(configure(document)) as node:
        (cpu,) = [entry for entry in node.tiers if entry.tier.info.cache]
        for table in node.model("wdl").tables.values():
            assert 0.4 * ROWS <= cpu.rows(table) <= 0.6 * ROWS


def test_init_ec_false_starts_with_an_empty_cache(configure: Any, document: dict[str, Any]) -> None:
    document["models"][0]["init_ec"] = False
    with hps.open(configure(document)) as node:
        assert by_table(node, "user", [0])[1] == [Source.ROCKSDB]


def test_default_threshold_answers_without_waiting(
    configure: Any, document: dict[str, Any]
) -> None:
    """When 9 of 10 keys are cached, the tenth gets the default; with fewer, the batch waits."""
    document["models"][0] |= {"init_ec": False, "gpucacheper": 1.0}
    del document["models"][0]["hit_rate_threshold"]  # HPS's default is 0.9
    keys = keys_of(0)
    with hps.open(configure(document)) as node:
        until(lambda: by_table(node, "user", keys[:9])[1] == [Source.CPU] * 9)
        vectors, sources = by_table(node, "user", keys[:10])
        assert sources == [Source.CPU] * 9 + [Source.DEFAULT]
        assert vectors[9].tolist() == [-1.5] * 4
        vectors, sources = by_table(node, "user", keys[[0, 100]])
        assert sources == [Source.CPU, Source.ROCKSDB]
        assert vectors[1].tolist() == rows_of(0, 4)[100].tolist()


@pytest.mark.parametrize(("table", "most"), [("user", 20), ("item", 30)])
def test_request_with_more_keys_than_hps_allows_is_rejected(
    configure: Any, document: dict[str, Any], table: str, most: int
) -> None:
    with hps.open(configure(document)) as node:
        by_table(node, table, np.arange(most))
        with pytest.raises(BadRequest, match=f"takes at most {most} keys per request"):
            by_table(node, table, np.arange(most + 1))
        jagged = JaggedKeys(np.arange(4), 1, np.array([0, 4]))
        with pytest.raises(BadRequest, match=r"keys per sample \(max_hotness\), got 4 keys"):
            node.lookup("wdl", {table: jagged})
        with pytest.raises(BadRequest, match="must be <= 10"):
            node.lookup("wdl", {table: np.arange(11)})


def test_32_bit_keys_are_served(configure: Any, document: dict[str, Any]) -> None:
    document["supportlonglong"] = False
    with hps.open(configure(document)) as node:
        low = keys_of(1) % 2**32
        vectors, _ = by_table(node, "item", low[:20])
        assert np.array_equal(vectors, rows_of(1, 2)[:20])
        vectors, _ = by_table(node, "item", keys_of(1)[:20])
        assert np.array_equal(vectors, rows_of(1, 2)[:20])


def test_rows_come_from_the_database_if_files_are_not_loaded(
    configure: Any, document: dict[str, Any], tmp_path: Path
) -> None:
    """initialize_after_startup false, or read_only: rows come from the database, not the files."""
    hps.open(configure(document)).close()
    rows_of(5, 4).tofile(tmp_path / "t0" / "emb_vector")
    for change in ({"initialize_after_startup": False}, {"read_only": True}):
        other = {**document, "persistent_db": {**document["persistent_db"], **change}}
        with hps.open(configure(other)) as node:
            assert np.array_equal(by_table(node, "user", keys_of(0)[:20])[0], rows_of(0, 4)[:20])


def test_ignored_settings_are_logged_at_start(configure: Any, document: dict[str, Any]) -> None:
    document["models"][0]["refresh_interval"] = 5
    with hps.open(configure(document)) as node:
        assert "models[0].refresh_interval" in "\n".join(node.warnings)


def test_update_source_is_read(configure: Any, document: dict[str, Any]) -> None:
    """Rows are sent as HPS's trainers send them, with a filter that HPS accepts."""
    broker, model = shared_broker(), unique("wdl")
    document["models"][0]["model"] = model
    document["persistent_db"]["update_filters"] = [model]
    document["update_source"] = {
        "type": "kafka_message_queue",
        "brokers": broker.address,
        "metadata_refresh_interval_ms": 300,
    }
    keys = keys_of(0)[:20]
    with hps.open(configure(document)) as node:
        assert "update" not in "\n".join(node.warnings)
        with Producer(broker.address, model=model, format="hps") as producer:
            producer.send("user", keys, np.full((20, 4), 9.0, np.float32))

        def served() -> Any:
            return node.lookup(model, {"user": keys}, by_table=True).vectors["user"]

        until(lambda: (served() == 9.0).all())
