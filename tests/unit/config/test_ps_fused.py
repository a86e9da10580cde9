"""ps.json: fuse_embedding_table, with HPS's databases and topics."""

from __future__ import annotations

from typing import Any

import pytest

from hps.config import Configuration

Ps = Any
DIMS = [16, 4, 16, 8]


@pytest.fixture
def document(ps: Ps) -> dict[str, Any]:
    """Four tables, two of them of one vector size, fused."""
    model = {
        "model": "ctr",
        "sparse_files": ["a", "b", "c", "d"],
        "embedding_table_names": ["user", "item", "shop", "word"],
        "embedding_vecsize_per_table": DIMS,
        "default_value_for_each_table": [1.0, 2.0, 1.0, 3.0],
        "maxnum_catfeature_query_per_table_per_sample": [1, 2, 3, 4],
    }
    return {
        "fuse_embedding_table": True,
        "persistent_db": {"type": "rocks_db"},
        "models": [model],
    }


def tables(configuration: Configuration) -> dict[str, int]:
    return {table.name: table.dim for table in configuration.legacy[0].spec.tables}


def test_tables_of_one_vector_size_are_fused_and_keep_their_request_names(
    ps: Ps, document: dict[str, Any]
) -> None:
    configuration = ps.load(document)
    (model,) = configuration.legacy
    assert tables(configuration) == {
        "fused_embedding0": 4,
        "fused_embedding1": 8,
        "fused_embedding2": 16,
    }
    assert [(f.name, f.table, f.max_hotness, f.pooling) for f in model.spec.features] == [
        ("user", "fused_embedding2", 1, "none"),
        ("item", "fused_embedding0", 2, "none"),
        ("shop", "fused_embedding2", 3, "none"),
        ("word", "fused_embedding1", 4, "none"),
    ]
    assert [table.default for table in model.spec.tables] == [2.0, 3.0, 1.0]
    folders_of_tables = {
        table: [f.name for f in folders] for table, folders in model.directories.items()
    }
    assert folders_of_tables == {
        "fused_embedding0": ["b"],
        "fused_embedding1": ["d"],
        "fused_embedding2": ["a", "c"],
    }
    assert "fuse" not in " ".join(configuration.warnings)


@pytest.mark.parametrize(
    "stores",
    [
        {"volatile_db": {"type": "redis_cluster"}},
        {"update_source": {"type": "kafka_message_queue"}},
        {"persistent_db": {"type": "rocks_db"}},
    ],
)
def test_database_or_stream_of_hps_fuses_tables(
    ps: Ps, document: dict[str, Any], stores: dict[str, Any]
) -> None:
    del document["persistent_db"]
    assert "fused_embedding0" in tables(ps.load(document | stores))


@pytest.mark.parametrize(
    ("top", "model", "fused"),
    [(True, None, True), (True, False, False), (True, True, True), (False, True, False)],
)
def test_model_may_disable_fusion(
    ps: Ps, document: dict[str, Any], top: bool, model: bool | None, fused: bool
) -> None:
    document["fuse_embedding_table"] = top
    if model is not None:
        document["models"][0]["fuse_embedding_table"] = model
    configuration = ps.load(document)
    assert ("fused_embedding0" in tables(configuration)) == fused
    inert = (
        "models[0].fuse_embedding_table: has no effect: the file's fuse_embedding_table is false"
    )
    assert (inert in " ".join(configuration.warnings)) == (model is True and not top)


def test_without_database_or_stream_of_hps_fusion_has_no_effect(
    ps: Ps, document: dict[str, Any]
) -> None:
    document |= {"persistent_db": {}, "volatile_db": {"type": "hash_map"}}
    document["models"][0]["fuse_embedding_table"] = True
    configuration = ps.load(document)
    assert tables(configuration) == dict(zip(["user", "item", "shop", "word"], DIMS, strict=True))
    warning = "fuse_embedding_table, models[0].fuse_embedding_table: has no effect: all tables of a"
    assert warning in " ".join(configuration.warnings)


def test_fused_table_gets_the_default_of_its_last_member(ps: Ps, document: dict[str, Any]) -> None:
    document["models"][0]["default_value_for_each_table"] = [1.0, 2.0, 5.0]
    configuration = ps.load(document)
    assert [table.default for table in configuration.legacy[0].spec.tables] == [2.0, 0.0, 5.0]
    (warning,) = (w for w in configuration.warnings if "default_value" in w)
    assert "user, shop are one table, fused_embedding2, and get one default" in warning


def test_mistakes_name_the_entries_of_the_file(ps: Ps, document: dict[str, Any]) -> None:
    model = document["models"][0]
    dims = {**model, "embedding_vecsize_per_table": [16, 4, 16, 100_000]}
    (line,) = ps.mistakes({**document, "models": [dims]})
    assert "models[0].embedding_vecsize_per_table[3]" in line
    names = {**model, "embedding_table_names": ["user", "item", "user", "word"]}
    (line,) = ps.mistakes({**document, "models": [names]})
    assert "models[0].embedding_table_names[2]" in line


def test_overrides_of_a_model_name_its_fused_tables(ps: Ps, document: dict[str, Any]) -> None:
    document["models"][0] |= {"gpucache": False}
    other = document["models"][0] | {"model": "other", "gpucache": True, "gpucacheper": 0.5}
    document["models"].append(other)
    served = ps.load(document).settings.models.serve
    assert set(served["ctr"].tables) == {f"fused_embedding{i}" for i in range(3)}
