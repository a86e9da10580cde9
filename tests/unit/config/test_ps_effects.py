"""ps.json: effects of several keys together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hps.config import load_config
from hps.config.ps_json.keys import KEYS
from hps.config.ps_json.values import PsJsonReader

Ps = Any


@pytest.mark.parametrize(
    ("threshold", "kind", "rate"),
    [
        (1.1, "wait", 0.0),
        (2, "wait", 0.0),
        (1, "default_then_promote", 1.0),
        (0.9, "default_then_promote", 0.9),
        (0, "default_then_promote", 0.0),
        (-1, "default_then_promote", 0.0),
    ],
)
def test_threshold_becomes_the_miss_policy(
    ps: Ps, threshold: float, kind: str, rate: float
) -> None:
    configuration = ps.load(ps.put("models[].hit_rate_threshold", threshold))
    for table in configuration.legacy[0].spec.tables:
        assert (table.miss_policy.kind, table.miss_policy.min_hit_rate) == (kind, rate)


@pytest.mark.parametrize(("name", "value"), [("gpucache", False), ("use_static_table", True)])
def test_without_a_dynamic_cache_lookups_wait(ps: Ps, name: str, value: bool) -> None:
    configuration = ps.load(ps.put(f"models[].{name}", value))
    assert {t.miss_policy.kind for t in configuration.legacy[0].spec.tables} == {"wait"}


def test_supportlonglong_false_means_uint32_keys(ps: Ps) -> None:
    tables = ps.load({**ps.base, "supportlonglong": False}).legacy[0].spec.tables
    assert {t.key_dtype for t in tables} == {"uint32"}


def test_models_with_different_shares_get_overrides(ps: Ps) -> None:
    second = {**ps.base["models"][0], "model": "n", "gpucacheper": 0.7}
    third = {**ps.base["models"][0], "model": "o", "gpucache": False}
    document = {**ps.base, "volatile_db": {}, "models": [ps.base["models"][0], second, third]}
    settings = ps.load(document).settings
    assert settings.tiers.cpu_cache.share == 0.7
    serve = settings.models.serve or {}
    assert {t.cache_share for t in serve["m"].tables.values()} == {0.2}
    assert {t.cache_rows for t in serve["o"].tables.values()} == {0}
    assert "n" not in serve


@pytest.mark.parametrize(
    ("margin", "partitions", "rows"), [(30, 4, 120), (100, 4, None), (50, 4, None), (49, 4, 196)]
)
def test_overflow_margin_bounds_the_cache(
    ps: Ps, margin: int, partitions: int, rows: int | None
) -> None:
    """A share of 0.2 of 1000 rows is 200; per partition HPS would have held ``margin`` rows."""
    document = ps.put("volatile_db.overflow_margin", margin)
    configuration = ps.load(ps.put("volatile_db.num_partitions", partitions, document))
    serve = configuration.settings.models.serve or {}
    cache_rows = {t.cache_rows for t in serve["m"].tables.values()} if "m" in serve else {None}
    assert cache_rows == {rows}
    assert not [w for w in configuration.warnings if "num_partitions" in w]


def test_default_partitions_multiply_the_overflow_margin(ps: Ps) -> None:
    serve = ps.load(ps.put("volatile_db.overflow_margin", 1)).settings.models.serve or {}
    (rows,) = {t.cache_rows for t in serve["m"].tables.values()}
    assert rows == min(16, os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("policy", "eviction"),
    [("evict_random", "random"), ("least_used", "lfu"), ("evict_oldest", "lru"), (None, None)],
)
def test_overflow_policy_applies_to_tables_bounded_by_the_margin(
    ps: Ps, policy: str | None, eviction: str | None
) -> None:
    document = ps.put("volatile_db.num_partitions", 1, ps.put("volatile_db.overflow_margin", 30))
    if policy is not None:
        document["volatile_db"]["overflow_policy"] = policy
    loaded = ps.load(document)
    tables = (loaded.settings.models.serve or {})["m"].tables.values()
    assert {(t.cache_rows, t.cache_eviction) for t in tables} == {(30, eviction)}
    assert "overflow_policy" not in "\n".join(loaded.warnings)
    loaded = ps.load(ps.put("volatile_db.overflow_margin", 1000, document))
    assert not loaded.settings.models.serve


def test_overflow_policy_without_a_margin_is_a_warning(ps: Ps) -> None:
    loaded = ps.load(ps.put("volatile_db.overflow_policy", "evict_random"))
    (warning,) = loaded.warnings
    assert "overflow_policy: has no effect: it needs overflow_margin" in warning


CLAMPED = {
    "volatile_db.num_node_connections": ("tiers.redis.connections", 5000, 1024),
    "volatile_db.initial_cache_rate": ("tiers.redis.initial_cache_rate", 1.5, 1),
    "persistent_db.num_threads": ("tiers.rocksdb.threads", 0, 1),
    "update_source.receive_buffer_size": ("updates.kafka.max_message_bytes", 2**31, 10**9),
    "models[].num_of_worker_buffer_in_pool": ("tiers.gpu.workspaces", 100, 64),
}


def test_every_bound_has_its_effect_tested() -> None:
    bounded = {key.path for key in KEYS if key.least is not None or key.most is not None}
    assert bounded == set(CLAMPED)


@pytest.mark.parametrize("key", CLAMPED)
def test_number_out_of_bounds_is_clamped_with_a_warning(ps: Ps, key: str) -> None:
    setting, given, expected = CLAMPED[key]
    ps.base["volatile_db"]["type"] = "redis_cluster"
    ps.base["update_source"] = {"type": "kafka"}
    loaded = ps.load(ps.put(key, given))
    value: Any = loaded.settings
    for name in setting.split("."):
        value = getattr(value, name)
    assert value == expected
    (warning,) = [w for w in loaded.warnings if key.replace("[]", "[0]") in w]
    assert f"not as in HPS: {given} is out of range" in warning
    assert warning.endswith(f"using {expected}")


def test_stochastic_cache_type_is_a_single_warning(ps: Ps) -> None:
    (warning,) = ps.load(ps.put("models[].embedding_cache_type", "stochastic")).warnings
    assert warning.endswith("embedding_cache_type=stochastic: works like dynamic, in HPS too")


def test_init_ec_of_one_model_is_a_warning(ps: Ps) -> None:
    second = {**ps.base["models"][0], "model": "n", "init_ec": False}
    configuration = ps.load({**ps.base, "models": [ps.base["models"][0], second]})
    assert configuration.settings.tiers.cpu_cache.warm
    assert "models[1].init_ec: has no effect: the CPU cache is warmed for all models or none" in (
        "\n".join(configuration.warnings)
    )


@pytest.mark.parametrize(
    ("document", "warning"),
    [
        (
            {"volatile_db": {"num_partitions": 4}},
            "volatile_db.type is disabled (the default of type)",
        ),
        ({"volatile_db": {"type": "none", "overflow_margin": 4}}, "volatile_db.type is disabled"),
        (
            {"volatile_db": {"type": "map", "num_partitions": 4}},
            "it needs overflow_margin",
        ),
        ({"persistent_db": {"path": "/x"}}, "persistent_db.type is disabled (the default of type)"),
        ({"persistent_db": {"type": "none", "read_only": True}}, "persistent_db.type is disabled"),
        ({"peristent_db": {"type": "rocks_db"}}, "peristent_db: unknown key; did you mean 'pers"),
        ({"zzzzz": 1}, "zzzzz: unknown key; HPS does not know it either"),
    ],
)
def test_keys_without_effect_are_warnings(ps: Ps, document: dict[str, Any], warning: str) -> None:
    del ps.base["volatile_db"], ps.base["persistent_db"]
    assert warning in "\n".join(ps.load({**ps.base, **document}).warnings)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpucache": False, "gpucacheper": 0.5}, "gpucache is false"),
        ({"use_static_table": True, "hit_rate_threshold": 0.5}, "a static table is in memory"),
        ({"embedding_cache_type": "static", "gpucache": True}, "a static table is in memory"),
    ],
)
def test_cache_keys_without_a_cache_are_warnings(
    ps: Ps, changes: dict[str, Any], reason: str
) -> None:
    ps.base["models"][0] |= changes
    assert reason in "\n".join(ps.load(ps.base).warnings)


def test_models_that_share_an_ignored_key_share_a_line(ps: Ps) -> None:
    one = {**ps.base["models"][0], "slot_num": 3, "label_dim": 1}
    warnings = ps.load({**ps.base, "models": [one, {**one, "model": "n"}]}).warnings
    assert len(warnings) == 1
    assert "models[0,1].slot_num, models[0,1].label_dim: has no effect: HugeCTR" in warnings[0]


def test_key_of_a_model_and_of_the_top_level_is_named_for_both(ps: Ps) -> None:
    document = ps.put("models[].slot_num", 1) | {"slot_num": 2}
    text = "\n".join(ps.load(document).warnings)
    assert "models[0].slot_num: has no effect" in text
    assert ": slot_num: unknown key" in text
    ps.path.write_text("{}")
    reader = PsJsonReader(ps.path)
    for path in (("fuse",), ("models", 0, "fuse"), ("models", 2, "fuse")):
        reader.ignored(path, "one reason")
    assert reader.warnings() == (f"{ps.path}: fuse, models[0,2].fuse: has no effect: one reason",)


def test_paths_start_at_the_file(ps: Ps, tmp_path: Path) -> None:
    configuration = ps.load(ps.put("persistent_db.path", "db"))
    assert configuration.settings.tiers.rocksdb.path == tmp_path / "db"
    assert set(configuration.legacy[0].directories.values()) == {
        (tmp_path / "t0",),
        (tmp_path / "t1",),
    }


def test_read_only_database_is_not_loaded(ps: Ps) -> None:
    rocksdb = ps.load(ps.put("persistent_db.read_only", True)).settings.tiers.rocksdb
    assert (rocksdb.access, rocksdb.load) == ("read_only", False)


def test_overrides_win_over_the_file(ps: Ps, tmp_path: Path) -> None:
    ps.load(ps.base)
    configuration = load_config(
        tmp_path / "ps.json",
        ["tiers.cpu_cache.share=1", "models.serve.m.tables.sparse_embedding0.cache_rows=5"],
        environ={"HPS__SERVER__HTTP__PORT": "81"},
    )
    assert configuration.settings.tiers.cpu_cache.share == 1
    assert configuration.settings.server.http.port == 81
    assert list(configuration.settings.models.serve or {}) == ["m"]


def test_origins_name_the_key_of_the_file(ps: Ps, tmp_path: Path) -> None:
    origins = ps.load(ps.base).origins
    assert origins["tiers.rocksdb.threads"] == f"{tmp_path / 'ps.json'}: persistent_db.num_threads"
    assert origins["server.http.port"] == "default"


def test_gpu_cache_is_sized_as_in_hps(ps: Ps) -> None:
    ps.base["models"][0] |= {"gpucacheper": 0.3, "deployed_device_list": [1, 0]}
    gpu = ps.load(ps.base).settings.tiers.gpu
    assert (gpu.use, gpu.share, gpu.devices, gpu.workspaces) == ("auto", 0.3, [0, 1], 4)
    assert gpu.host_bytes == 0


def test_model_without_a_gpu_cache_gets_no_gpu_rows(ps: Ps) -> None:
    first = ps.base["models"][0]
    off = ps.load(ps.put("models[].gpucache", False)).settings
    assert off.tiers.gpu.use == "off"
    models = [
        {**first, "gpucacheper": 0.3},
        {**first, "model": "n", "gpucache": False},
        {**first, "model": "o", "gpucacheper": 0.1, "deployed_device_list": [3]},
        {**first, "model": "p", "embedding_cache_type": "static"},
    ]
    settings = ps.load({**ps.base, "models": models}).settings
    assert settings.tiers.gpu.share == 1.0
    assert settings.tiers.gpu.devices == [3]
    serve = settings.models.serve or {}
    assert {t.gpu_share for t in serve["m"].tables.values()} == {0.3}
    assert {t.gpu_rows for t in serve["n"].tables.values()} == {0}
    assert {t.gpu_share for t in serve["o"].tables.values()} == {0.1}
    assert {t.gpu_static for t in serve["p"].tables.values()} == {True}


def test_uvm_becomes_pinned_host_memory(ps: Ps) -> None:
    """1000 rows of 32 bytes or less a table, a fifth of them in the GPU's memory."""
    gpu = ps.load(ps.put("models[].embedding_cache_type", "uvm")).settings.tiers.gpu
    assert (gpu.share, gpu.host_bytes) == (1.0, 2 * 800 * 32)
