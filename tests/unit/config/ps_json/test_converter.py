"""HPS's ps.json: the golden example, and every key has an effect or a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hps.config.ps_json.keys import KEYS, PsKey

Ps = Any


# Every key that HPS reads from JSON, documents, or takes in Python, section by section.
INVENTORY = {
    "": "supportlonglong fuse_embedding_table volatile_db persistent_db update_source models",
    "volatile_db": """type address user_name password num_partitions allocation_rate
        shared_memory_size shared_memory_name shared_memory_auto_remove num_node_connections
        max_batch_size enable_tls tls_ca_certificate tls_client_certificate tls_client_key
        tls_server_name_identification overflow_margin overflow_policy overflow_resolution_target
        initial_cache_rate cache_missed_embeddings update_filters initialize_after_startup""",
    "persistent_db": """type path num_threads read_only max_batch_size update_filters
        initialize_after_startup backend""",
    "update_source": """type brokers metadata_refresh_interval_ms receive_buffer_size
        poll_timeout_ms max_batch_size failure_backoff_ms max_commit_interval""",
    "models[]": """model sparse_files dense_file network_file non_trainable_params_file
        max_batch_size gpucache gpucacheper hit_rate_threshold num_of_worker_buffer_in_pool
        num_of_refresher_buffer_in_pool cache_refresh_percentage_per_iteration deployed_device_list
        maxnum_catfeature_query_per_table_per_sample embedding_vecsize_per_table
        default_value_for_each_table embedding_table_names maxnum_des_feature_per_sample
        refresh_delay refresh_interval fuse_embedding_table embedding_cache_type use_static_table
        use_context_stream use_hctr_cache_implementation thread_pool_size init_ec enable_pagelock
        fp8_quant label_dim slot_num use_mixed_precision scaler use_algorithm_search use_cuda_graph
        i64_input_key""",
}
INVENTORY_KEYS = {
    f"{section}.{name}" if section else name
    for section, names in INVENTORY.items()
    for name in names.split()
}

EXAMPLE = """
{"supportlonglong": true,
 "volatile_db": {"type": "redis_cluster", "address": "127.0.0.1:7000", "num_partitions": 8,
                 "num_node_connections": 5, "overflow_margin": 10000000,
                 "overflow_policy": "evict_oldest", "update_filters": [".+"]},
 "persistent_db": {"type": "rocks_db", "path": "/var/hps/rocksdb", "update_filters": [".+"]},
 "update_source": {"type": "kafka_message_queue", "brokers": "127.0.0.1:9092"},
 "models": [{"model": "wdl", "sparse_files": ["/m/wdl/1/t0", "/m/wdl/1/t1"],
             "num_of_worker_buffer_in_pool": 4, "deployed_device_list": [0], "max_batch_size": 64,
             "maxnum_catfeature_query_per_table_per_sample": [2, 26],
             "embedding_vecsize_per_table": [1, 16], "default_value_for_each_table": [0.0, 0.0],
             "embedding_table_names": ["t0", "t1"], "gpucache": true, "gpucacheper": 0.5,
             "hit_rate_threshold": 1.1, "cache_refresh_percentage_per_iteration": 0.2,
             "embedding_cache_type": "dynamic"}]}
"""


def test_example_is_converted(ps: Ps) -> None:
    configuration = ps.load(EXAMPLE)
    settings = configuration.settings
    assert settings.models.serve == {}
    assert settings.tiers.cpu_cache.share == 0.5
    rocksdb = settings.tiers.rocksdb
    assert (rocksdb.path, rocksdb.layout, rocksdb.threads) == (Path("/var/hps/rocksdb"), "hps", 16)
    assert (rocksdb.access, rocksdb.load) == ("primary", True)
    redis = settings.tiers.redis
    assert redis is not None
    assert (redis.addresses, redis.mode, redis.layout) == (["127.0.0.1:7000"], "cluster", "hps")
    assert (redis.partitions, redis.connections, redis.overflow_margin) == (8, 5, 10_000_000)
    assert (redis.overflow_policy, redis.initial_cache_rate) == ("oldest", 1.0)
    assert not redis.cache_missed_embeddings
    kafka = settings.updates.kafka
    assert kafka is not None
    assert (kafka.brokers, kafka.models, kafka.shared_writer) == ("127.0.0.1:9092", [".+"], "nodes")
    (model,) = configuration.legacy
    assert model.directories == {"t0": (Path("/m/wdl/1/t0"),), "t1": (Path("/m/wdl/1/t1"),)}
    spec = model.spec
    assert (spec.name, spec.max_batch_size, spec.dense) == ("wdl", 64, None)
    assert [(t.name, t.dim, t.default, t.key_dtype) for t in spec.tables] == [
        ("t0", 1, 0.0, "int64"),
        ("t1", 16, 0.0, "int64"),
    ]
    assert {t.miss_policy.kind for t in spec.tables} == {"wait"}
    assert [(f.name, f.table, f.pooling, f.max_hotness) for f in spec.features] == [
        ("t0", "t0", "none", 2),
        ("t1", "t1", "none", 26),
    ]


def test_example_has_the_expected_warnings(ps: Ps) -> None:
    text = "\n".join(ps.load(EXAMPLE).warnings)
    assert "models[0].cache_refresh_percentage_per_iteration" in text
    redis = ("redis_cluster", "address", "partitions", "connections", "overflow")
    others = ("gpucache", "worker_buffer", "device_list", "hit_rate", "vecsize", "supportlong")
    others += ("maxnum", "persistent_db.path", "update_filters", "update_source")
    for acts in (*redis, *others):
        assert acts not in text


def test_key_table_has_every_key_of_hps() -> None:
    assert sorted(INVENTORY_KEYS - {key.path for key in KEYS}) == []
    assert len({key.path for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize("key", [k for k in KEYS if k.ignored], ids=lambda k: k.path)
def test_ignored_key_is_a_warning_and_changes_nothing(ps: Ps, key: PsKey) -> None:
    samples = {"bool": True, "int": 3, "float": 0.5, "text": "x", "path": "x", "list": []}
    configuration = ps.load(ps.put(key, samples[key.kind]))
    named = key.path.replace("[]", "[0]")
    about = [w for w in configuration.warnings if named in w]
    assert len(about) == 1
    assert about[0].endswith(f"has no effect: {key.ignored}")
    assert ps.outcome(configuration) == ps.outcome(ps.load(ps.base))


# What every acting key does, shown by two values with different outcomes.
VARIED: dict[str, tuple[Any, Any]] = {
    "supportlonglong": (True, False),
    "fuse_embedding_table": (False, True),
    "volatile_db": ({"type": "hash_map", "initialize_after_startup": False}, {"type": "hash_map"}),
    "persistent_db": ({"type": "rocks_db"}, {}),
    "models[].model": ("a", "b"),
    "models[].version": (1, 2),
    "models[].sparse_files": (["t0", "t1"], ["t1", "t0"]),
    "models[].max_batch_size": (64, 65),
    "models[].gpucache": (True, False),
    "models[].gpucacheper": (0.2, 0.3),
    "models[].deployed_device_list": ([0], [0, 1]),
    "models[].num_of_worker_buffer_in_pool": (5, 6),
    "models[].hit_rate_threshold": (0.9, 1.1),
    "models[].maxnum_catfeature_query_per_table_per_sample": ([1, 2], [1, 3]),
    "models[].embedding_vecsize_per_table": ([4, 8], [8, 4]),
    "models[].default_value_for_each_table": ([1.5], [1.5, 2.5]),
    "models[].embedding_table_names": (["a", "b"], ["a", "c"]),
    "models[].embedding_cache_type": ("dynamic", "static"),
    "models[].use_static_table": (False, True),
    "models[].thread_pool_size": (500, 501),
    "models[].init_ec": (True, False),
    "persistent_db.type": ("disabled", "rocks_db"),
    "persistent_db.path": ("/a", "/b"),
    "persistent_db.num_threads": (1, 2),
    "persistent_db.read_only": (False, True),
    "persistent_db.initialize_after_startup": (False, True),
    "update_source": ({"type": "kafka_message_queue"}, {}),
    "update_source.type": ("kafka_message_queue", "null"),
    "volatile_db.initialize_after_startup": (False, True),
}
# These act only together with another key and have tests of their own below.
TOGETHER = {
    "models[].fuse_embedding_table",
    "models[].fp8_quant",
    "models",
    "volatile_db.type",
    "volatile_db.num_partitions",
    "volatile_db.overflow_margin",
    "volatile_db.overflow_policy",
}


def test_every_other_key_has_its_effect_tested() -> None:
    acting = {key.path for key in KEYS if not key.ignored}
    assert acting == set(VARIED) | TOGETHER


@pytest.mark.parametrize("key", VARIED)
def test_effective_key_changes_the_settings(ps: Ps, key: str) -> None:
    one, other = (ps.load(ps.put(key, value)) for value in VARIED[key])
    assert ps.outcome(one) != ps.outcome(other)
    assert f"{key.replace('[]', '[0]')}:" not in "\n".join([*one.warnings, *other.warnings])


def test_null_update_source_has_no_warning(ps: Ps) -> None:
    for kind in ("null", "none"):
        assert ps.load({**ps.base, "update_source": {"type": kind}}).warnings == ()


def test_hash_map_of_several_processes_becomes_a_shared_cache(ps: Ps) -> None:
    shared = {"type": "multi_process_map", "shared_memory_size": 1 << 30}
    loaded = ps.load(ps.base | {"volatile_db": shared})
    assert loaded.settings.tiers.cpu_cache.shared.name == "hctr_mp_hash_map_database"
    assert "multi_process" not in " ".join(loaded.warnings)
    named = shared | {"shared_memory_name": "ours"}
    loaded = ps.load(ps.base | {"volatile_db": named})
    assert loaded.settings.tiers.cpu_cache.shared.name == "ours"
    assert loaded.origins["tiers.cpu_cache.shared.name"].endswith("volatile_db.shared_memory_name")
    other = {"type": "hash_map", "shared_memory_name": "ours"}
    loaded = ps.load(ps.base | {"volatile_db": other})
    assert loaded.settings.tiers.cpu_cache.shared.name is None
    (warning,) = (w for w in loaded.warnings if "shared_memory_name" in w)
    assert "volatile_db.type is not multi_process_hash_map" in warning
    (line,) = ps.mistakes(ps.base | {"volatile_db": shared | {"shared_memory_name": "a/b"}})
    assert "volatile_db.shared_memory_name" in line
