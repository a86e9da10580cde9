"""ps.json: documented defaults and spellings hold."""

from __future__ import annotations

import os
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from hps.config.ps_json.keys import KEYS, REQUIRED, PsKey

Ps = Any


CONCRETE = [
    k
    for k in KEYS
    if k.default is not REQUIRED
    and k.kind != "object"
    and (
        k.kind not in ("int", "list", "path") or not isinstance(k.default, str) or k.kind == "path"
    )
    and k.path not in ("models[].fuse_embedding_table", "persistent_db.path")
    and k.name not in ("num_partitions", "embedding_table_names")
]


@pytest.mark.parametrize("key", CONCRETE, ids=lambda k: k.path)
def test_absent_key_has_the_documented_default(ps: Ps, key: PsKey) -> None:
    without = deepcopy(ps.base)
    if key.name == "type" and key.section != "update_source":
        without[key.section] = {}
    assert ps.outcome(ps.load(ps.put(key, key.default, without))) == ps.outcome(ps.load(without))


def test_computed_defaults_are_those_of_hps(ps: Ps) -> None:
    configuration = ps.load(ps.base)
    assert configuration.settings.tiers.rocksdb.path == Path(tempfile.gettempdir()) / "rocksdb"
    tables = configuration.legacy[0].spec.tables
    assert [t.name for t in tables] == ["sparse_embedding0", "sparse_embedding1"]
    assert configuration.settings.tiers.lookup_threads == max(16, os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("given", "total"), [([], [0.0, 0.0]), ([2.5], [2.5, 0.0]), ([1, 2.5], [1.0, 2.5])]
)
def test_default_values_are_padded(ps: Ps, given: list[float], total: list[float]) -> None:
    configuration = ps.load(ps.put("models[].default_value_for_each_table", given))
    assert [t.default for t in configuration.legacy[0].spec.tables] == total


@pytest.mark.parametrize(
    ("block", "share"), [(None, 1.0), ({}, None), ({"type": "disabled"}, None)]
)
def test_absent_block_is_a_hash_map_and_empty_block_is_disabled(
    ps: Ps, block: dict[str, Any] | None, share: float | None
) -> None:
    """Without a GPU cache the hash map alone decides whether rows are kept in memory."""
    del ps.base["volatile_db"]
    document = ps.put("models[].gpucache", False)
    if block is not None:
        document["volatile_db"] = block
    cache = ps.load(document).settings.tiers.cpu_cache
    assert cache.share == share
    assert cache.enabled == (share is not None)


ENUMS = [k for k in KEYS if k.kind == "enum"]


@pytest.mark.parametrize(
    ("key", "spelling"),
    [(k, spelling) for k in ENUMS for spelling in k.aliases],
    ids=lambda value: value.path if isinstance(value, PsKey) else value,
)
def test_every_spelling_means_its_canonical_name(ps: Ps, key: PsKey, spelling: str) -> None:
    canonical = key.aliases[spelling]
    one, other = (ps.load(ps.put(key, value)) for value in (spelling, canonical))
    assert ps.outcome(one) == ps.outcome(other)
    named = [w for w in one.warnings if f"{key.path.replace('[]', '[0]')}={spelling}" in w]
    assert bool(named) == (canonical in key.ignored_values)


def test_spellings_are_those_of_hps() -> None:
    aliases = {k.path: set(k.aliases) for k in ENUMS}
    types = "disabled disable none hash_map hashmap hash map parallel_hash_map parallel_hashmap "
    types += "parallel_hash parallel_map multi_process_hash_map multi_process_hashmap "
    types += "multi_process_hash multi_process_map redis_cluster redis"
    policies = "evict_random random evict_least_used least_used evict_oldest oldest"
    assert aliases == {
        "volatile_db.type": set(types.split()),
        "volatile_db.overflow_policy": set(policies.split()),
        "persistent_db.type": {"disabled", "disable", "none", "rocks_db", "rocksdb", "rocks"},
        "update_source.type": {"null", "none", "kafka_message_queue", "kafka_mq", "kafka"},
        "models[].embedding_cache_type": {"dynamic", "static", "uvm", "stochastic"},
    }


@pytest.mark.parametrize("key", ENUMS, ids=lambda k: k.path)
def test_names_are_case_sensitive_and_unknown_ones_are_rejected(ps: Ps, key: PsKey) -> None:
    some = next(iter(key.aliases))
    for value in (some.upper(), "xyzzy", 5, None):
        (line,) = ps.mistakes(ps.put(key, value))
        assert f"{key.path.replace('[]', '[0]')}: expected one of {', '.join(key.aliases)}" in line
    assert f"did you mean '{some}'?" in ps.mistakes(ps.put(key, some.upper()))[0]
