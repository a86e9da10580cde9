"""ps.json: fp8_quant stores the rows of static tables as float8_e4m3."""

from __future__ import annotations

from typing import Any

import pytest

from hps.config import Configuration
from hps.config.effective_settings import convert_ps_json
from hps.config.ps_json.converter import read_ps_json

Ps = Any


@pytest.fixture
def document(ps: Ps) -> dict[str, Any]:
    """A static model with ``fp8_quant``, and no database of HPS."""
    del ps.base["persistent_db"]
    ps.base["models"][0] |= {"fp8_quant": True, "embedding_cache_type": "static"}
    return dict(ps.base)


def rows(configuration: Configuration, model: int = 0) -> list[str | None]:
    return [table.rows for table in configuration.legacy[model].spec.tables]


def about(configuration: Configuration) -> list[str]:
    return [warning for warning in configuration.warnings if "fp8_quant" in warning]


@pytest.mark.parametrize("kind", [{"embedding_cache_type": "static"}, {"use_static_table": True}])
@pytest.mark.parametrize("memory", [{"type": "hash_map"}, {"type": "multi_process_hash_map"}, {}])
def test_static_tables_are_stored_as_float8(
    ps: Ps, document: dict[str, Any], kind: dict[str, Any], memory: dict[str, Any]
) -> None:
    del document["models"][0]["embedding_cache_type"]
    document["models"][0] |= kind
    configuration = ps.load(document | {"volatile_db": memory})
    assert rows(configuration) == ["float8_e4m3"] * 2
    assert {t.dtype for t in configuration.legacy[0].spec.tables} == {"float32"}
    assert about(configuration) == []


@pytest.mark.parametrize("given", [None, False])
def test_without_it_rows_are_float32(ps: Ps, document: dict[str, Any], given: bool | None) -> None:
    del document["models"][0]["fp8_quant"]
    if given is not None:
        document["models"][0]["fp8_quant"] = given
    configuration = ps.load(document)
    assert {t.row_format for t in configuration.legacy[0].spec.tables} == {"float32"}
    assert about(configuration) == []


@pytest.mark.parametrize("kind", ["dynamic", "uvm", "stochastic"])
def test_tables_that_are_not_static_keep_float32_rows_with_a_warning(
    ps: Ps, document: dict[str, Any], kind: str
) -> None:
    document["models"][0]["embedding_cache_type"] = kind
    configuration = ps.load(document)
    assert rows(configuration) == [None, None]
    (warning,) = about(configuration)
    expected = f"models[0].fp8_quant: has no effect: embedding_cache_type is {kind}; as in HPS only"
    assert expected in warning


@pytest.mark.parametrize(
    ("stores", "store"),
    [
        ({"persistent_db": {"type": "rocks_db"}}, "persistent_db.type is rocks_db"),
        ({"volatile_db": {"type": "redis"}}, "volatile_db.type is redis_cluster"),
    ],
)
def test_databases_in_the_layout_of_hps_keep_float32_rows_with_a_warning(
    ps: Ps, document: dict[str, Any], stores: dict[str, Any], store: str
) -> None:
    configuration = ps.load(document | stores)
    assert rows(configuration) == [None, None]
    (warning,) = about(configuration)
    reason = f"{store}, and HPS's layout there holds float32 rows, not float8_e4m3"
    assert warning.endswith(f"models[0].fp8_quant: has no effect: {reason}")


def test_every_reason_is_reported(ps: Ps, document: dict[str, Any]) -> None:
    document["models"][0]["embedding_cache_type"] = "dynamic"
    configuration = ps.load(document | {"persistent_db": {"type": "rocks_db"}})
    assert len(about(configuration)) == 2


def test_other_models_keep_float32_rows(ps: Ps, document: dict[str, Any]) -> None:
    other = {**document["models"][0], "model": "n", "fp8_quant": False}
    configuration = ps.load(document | {"models": [other, document["models"][0]]})
    assert rows(configuration, 0) == [None, None]
    assert rows(configuration, 1) == ["float8_e4m3"] * 2


def test_fused_tables_are_stored_as_float8(ps: Ps, document: dict[str, Any]) -> None:
    """Kafka alone: HPS's names, and a RocksDB in the native layout."""
    document |= {"fuse_embedding_table": True, "update_source": {"type": "kafka_message_queue"}}
    document["models"][0]["embedding_vecsize_per_table"] = [4, 4]
    configuration = ps.load(document)
    assert [t.name for t in configuration.legacy[0].spec.tables] == ["fused_embedding0"]
    assert rows(configuration) == ["float8_e4m3"]


def test_converted_description_has_the_row_format(ps: Ps, document: dict[str, Any]) -> None:
    ps.load(document)
    files = convert_ps_json(read_ps_json(ps.path))
    assert files["models/m/model.yaml"].count("rows: float8_e4m3") == 2


@pytest.mark.parametrize("given", ["yes", 1, None])
def test_value_that_is_no_bool_is_rejected(ps: Ps, document: dict[str, Any], given: Any) -> None:
    document["models"][0]["fp8_quant"] = given
    (line,) = ps.mistakes(document)
    assert "models[0].fp8_quant: expected true or false" in line
