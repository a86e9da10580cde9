"""A node whose tables are in mapped files: nothing is copied, updates go to RocksDB, damage is reported."""

import os
import re
import time

import numpy as np
import pytest

import hps
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.errors import ConfigError, ModelError, Unsupported
from hps.models.mapped_file import MAPPED_FILE, MappedOptions, write_mapped
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.native.mapped_format import HEADER_BYTES, MappedFile, read_header
from hps.node import cache_fill, mapped_memory
from hps.types import JaggedKeys, LookupRequest
from hps.updates.hot_key_snapshot import read_hot_keys
from tests.support.waiting import until

ROWS = 20_000
STORE_ONLY = {"memory_bytes": 0}
SPEC = ModelSpec(
    name="m",
    tables=[TableSpec(name="a", dim=4)],
    features=[FeatureSpec(name="a", table="a", pooling="none")],
)


def rows_of(keys, version=1):
    return np.repeat(np.float32(keys)[:, None] * 10 + version, 4, axis=1)


def publish(folder, version=1):
    keys = np.arange(ROWS)
    path = write_version(folder, SPEC, version, {"a": (keys, rows_of(keys, version))})
    mapped = path / "tables/a" / MAPPED_FILE
    if not mapped.exists():
        files = Repository(folder).open("m", version).tables["a"]
        write_mapped(files, mapped, MappedOptions(threads=1))
    return mapped


@pytest.fixture
def models(tmp_path):
    publish(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture
def open_node(tmp_path, models):
    nodes = []

    def make(**tiers):
        for node in nodes:
            node.close()
        config = {
            "models": {"repository": str(models), "rollback_s": 0},
            "tiers": {
                "cpu_cache": {"warm": False, **tiers.pop("cpu_cache", {})},
                "rocksdb": {"path": str(tmp_path / "db"), **tiers.pop("rocksdb", {})},
                **tiers,
            },
        }
        nodes.append(hps.open(config))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def lookup(node, *keys):
    request = LookupRequest({"a": JaggedKeys.dense(np.array(keys))})
    return node.model("m").engine.submit(request).result(60)


def facts(node):
    (status,) = (each for each in node.tiers if each.tier.info.name == "rocksdb")
    return status.describe()


def test_rows_are_served_from_the_file(open_node):
    node = open_node()
    np.testing.assert_array_equal(lookup(node, 1, 77, 1).vectors["a"], rows_of([1, 77, 1]))
    assert facts(node)["mapped_tables"] == 1
    assert facts(node)["table_bytes"] < 10_000
    (status,) = (each for each in node.tiers if each.tier.info.name == "rocksdb")
    assert status.rows(node.model("m").tables["a"]) == ROWS


def test_writes_survive_a_restart(open_node):
    for again in range(2):
        node = open_node()
        if not again:
            node.write("m", "a", [5, ROWS + 1], rows_of([5, ROWS + 1], 3))
            node.write("m", "a", deleted=[6])
        found = lookup(node, 5, ROWS + 1, 6, 7).vectors["a"]
        np.testing.assert_array_equal(found[[0, 1, 3]], [*rows_of([5, ROWS + 1], 3), *rows_of([7])])
        assert not found[2].any()
        assert facts(node)["mapped_overridden"] == 2


def test_setting_off_loads_into_rocksdb_and_keeps_updates(open_node):
    node = open_node()
    node.write("m", "a", [5], rows_of([5], 3))
    node.write("m", "a", deleted=[6])
    for mapped in ({"enabled": False}, {}):
        node = open_node(mapped=mapped)
        found = lookup(node, 5, 6, 7).vectors["a"]
        np.testing.assert_array_equal(found[[0, 2]], [*rows_of([5], 3), *rows_of([7])])
        assert not found[1].any()
        assert facts(node)["mapped_tables"] == 0


def test_damage_found_in_the_background_is_reported(open_node, models, monkeypatch):
    path = models / "m/1/tables/a" / MAPPED_FILE
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 40)
        file.write(b"\1\2\3\4")
    node = open_node(rocksdb={"on_corruption": "not_ready"})
    until(node.damage)
    assert f"damaged mapped files: {path} of table m/1/a" in node.damage()
    assert "start the node again" in node.not_ready_reason()
    result = lookup(node, *range(2000))
    assert result.degraded == ("rocksdb",)
    assert facts(node)["damaged_files"] == 1
    path.unlink()
    node = open_node()
    assert not node.damage()
    np.testing.assert_array_equal(lookup(node, *range(99)).vectors["a"], rows_of(range(99)))


def test_hot_rows_of_a_large_table_are_cached_in_the_background(open_node, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_fill, "_FIRST_BYTES", 0)
    cpu = {"warm": True, "snapshot": {"path": str(tmp_path / "hot")}, "capacity_bytes": 1 << 20}
    node = open_node(cpu_cache=cpu, mapped=STORE_ONLY)
    cached, table = node.tiers[0], node.model("m").tables["a"]
    lookup(node, *range(3000))
    until(lambda: cached.rows(table) == 3000)
    node.write("m", "a", [5], rows_of([5], 3))
    node = open_node(cpu_cache=cpu, mapped=STORE_ONLY)
    cached, table = node.tiers[0], node.model("m").tables["a"]
    until(lambda: cached.rows(table) == 3000)
    found = lookup(node, 5, 7).vectors["a"]
    np.testing.assert_array_equal(found, [*rows_of([5], 3), *rows_of([7])])
    begun = time.monotonic()
    node.close()
    assert time.monotonic() - begun < 10


def test_a_version_is_loaded_while_the_node_serves(open_node, models):
    node = open_node()
    publish(models, 2)
    assert node.control.load("m") == 2
    np.testing.assert_array_equal(lookup(node, 5).vectors["a"], rows_of([5], 2))
    assert facts(node)["mapped_tables"] in (1, 2)
    until(lambda: facts(node)["mapped_tables"] == 1)


def flip_byte(path):
    """Damage a row of a mapped file; again: repair it."""
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 40)
        byte = file.read(1)
        file.seek(HEADER_BYTES + 40)
        file.write(bytes([byte[0] ^ 0xFF]))


@pytest.mark.parametrize("rocksdb", [{}, {"enabled": False}])
def test_version_with_a_damaged_file_is_not_switched_to(open_node, models, rocksdb):
    node = open_node(rocksdb=rocksdb)
    path = publish(models, 2)
    flip_byte(path)
    with pytest.raises(
        ModelError,
        match=rf"table m/2/a has a damaged mapped file: {path}: wrong checksum in block 0. Restore",
    ):
        node.control.load("m", 2)
    result = lookup(node, 5)
    np.testing.assert_array_equal(result.vectors["a"], rows_of([5], 1))
    assert not result.degraded
    assert not node.damage()
    flip_byte(path)
    assert node.control.load("m", 2) == 2
    result = lookup(node, *range(2000))
    np.testing.assert_array_equal(result.vectors["a"], rows_of(range(2000), 2))
    assert not result.degraded


def test_damaged_index_of_a_loaded_version_is_found(open_node, models):
    node = open_node()
    path = publish(models, 2)
    with path.open("r+b") as file:
        file.seek(int(read_header(path).fields["parts"]) + 40)
        file.write(b"\1\2\3\4")
    with pytest.raises(ModelError, match=r"m/2/a has a damaged mapped file: .*checksum in block"):
        node.control.load("m", 2)
    assert not lookup(node, 5).degraded


def test_file_that_has_not_changed_is_verified_once(open_node, models, monkeypatch):
    monkeypatch.setattr(mapped_memory, "_CHUNK_BYTES", 1 << 16)
    node = open_node(mapped={"verify_bytes_per_s": 0})
    path, verified, real = publish(models, 2), [], MappedFile.damaged_blocks

    def damaged_blocks(file, first=0, n=None):
        verified.append(file.header.path.parents[2].name)
        return real(file, first, n)

    monkeypatch.setattr(MappedFile, "damaged_blocks", damaged_blocks)
    for version in (2, 1, 2, 1):
        node.control.load("m", version)
    assert verified == ["2", "1"]
    os.utime(path, ns=(1, 1))
    node.control.load("m", 2)
    assert verified == ["2", "1", "2"]


def test_file_that_is_not_read_into_memory_is_verified_later(open_node, models):
    node = open_node(mapped=STORE_ONLY)
    flip_byte(publish(models, 2))
    assert node.control.load("m", 2) == 2
    until(node.damage)


def cpu_facts(node):
    return node.tiers[0].describe()


def test_files_in_memory_are_read_on_the_fast_path(open_node):
    node = open_node(cpu_cache={"warm": True})
    table = node.model("m").tables["a"]
    assert cpu_facts(node)["mapped_tables"] == 1
    np.testing.assert_array_equal(lookup(node, *range(3000)).vectors["a"], rows_of(range(3000)))
    node.write("m", "a", [5, ROWS + 1], rows_of([5, ROWS + 1], 3))
    node.write("m", "a", deleted=[6])
    for _ in range(2):  # from the store, then from the CPU cache
        found = lookup(node, 5, ROWS + 1, 6, 7).vectors["a"]
        np.testing.assert_array_equal(found[[0, 1, 3]], [*rows_of([5, ROWS + 1], 3), *rows_of([7])])
        assert not found[2].any()
        until(lambda: node.tiers[0].rows(table) == 2)


def test_updated_rows_stay_in_memory(open_node):
    node = open_node()
    node.write("m", "a", [5, 6], rows_of([5, 6], 3))
    assert node.tiers[0].rows(node.model("m").tables["a"]) == 2
    np.testing.assert_array_equal(lookup(node, 5, 6).vectors["a"], rows_of([5, 6], 3))


def test_budget_decides_which_files_are_read_on_the_fast_path(open_node, models):
    size = (models / "m/1/tables/a" / MAPPED_FILE).stat().st_size
    for budget, mapped in ((size - 1, 0), (size, 1)):
        node = open_node(mapped={"memory_bytes": budget})
        assert cpu_facts(node)["mapped_tables"] == mapped
        np.testing.assert_array_equal(lookup(node, 5).vectors["a"], rows_of([5]))


def test_loaded_version_is_read_on_the_fast_path_once_the_old_one_is_freed(
    open_node, models, tmp_path
):
    size = (models / "m/1/tables/a" / MAPPED_FILE).stat().st_size
    node = open_node(mapped={"memory_bytes": size})
    cache = node.tiers[0].tier
    old, pinned = node.model("m").tables["a"], node.model("m").engine
    publish(models, 2)
    assert node.control.load("m") == 2
    new = node.model("m").tables["a"]
    assert (cache.is_mapped(old), cache.is_mapped(new)) == (True, False)  # both do not fit
    assert re.search(
        r"files of m/2/a do not fit tiers.mapped.memory_bytes .* through the stores until",
        node.control.warnings["m"],
    )
    node.write("m", "a", [5], rows_of([5], 3))
    np.testing.assert_array_equal(
        lookup(node, 5, 6).vectors["a"], [*rows_of([5], 3), *rows_of([6], 2)]
    )
    del pinned  # the last use of version 1
    until(lambda: cache.is_mapped(new))
    assert not cache.is_mapped(old)
    np.testing.assert_array_equal(
        lookup(node, 5, 6).vectors["a"], [*rows_of([5], 3), *rows_of([6], 2)]
    )


def test_no_warning_for_a_file_that_never_fits(open_node, models):
    node = open_node(mapped=STORE_ONLY)
    publish(models, 2)
    assert node.control.load("m") == 2
    assert not node.control.warnings


def test_large_files_are_read_in_the_background(open_node, monkeypatch):
    monkeypatch.setattr(cache_fill, "_FIRST_BYTES", 0)
    monkeypatch.setattr(mapped_memory.MappedMemory, "is_resident", lambda *_: False)
    monkeypatch.setattr(mapped_memory, "_CHUNK_BYTES", 1 << 16)
    node = open_node()
    until(lambda: cpu_facts(node)["mapped_tables"] == 1)
    np.testing.assert_array_equal(lookup(node, 5).vectors["a"], rows_of([5]))


def test_hot_rows_of_a_file_in_memory_are_saved(open_node, tmp_path):
    cpu = {"snapshot": {"path": str(tmp_path / "hot")}}
    node = open_node(cpu_cache=cpu)
    for _ in range(64):
        lookup(node, 3, 4)
    node.close()
    (hot,) = read_hot_keys(tmp_path / "hot").values()
    assert set(hot[0].tolist()) == {3, 4}


def test_damage_takes_rows_off_the_fast_path(open_node, models):
    node = open_node()
    np.testing.assert_array_equal(lookup(node, 5).vectors["a"], rows_of([5]))
    path = models / "m/1/tables/a" / MAPPED_FILE
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 40)
        file.write(b"\1\2\3\4")
    until(node.damage)
    assert lookup(node, *range(2000)).degraded == ("rocksdb",)


def test_files_are_served_without_rocksdb(open_node, models, tmp_path):
    node = open_node(rocksdb={"enabled": False})
    np.testing.assert_array_equal(lookup(node, 1, 77, 1).vectors["a"], rows_of([1, 77, 1]))
    assert not lookup(node, ROWS).vectors["a"].any()
    assert not (tmp_path / "db").exists()
    with pytest.raises(Unsupported, match=r"writes no store: .* tiers.rocksdb.enabled is false"):
        node.write("m", "a", [5], rows_of([5], 3))
    publish(models, 2)
    assert node.control.load("m") == 2
    np.testing.assert_array_equal(lookup(node, 5).vectors["a"], rows_of([5], 2))
    node.control.unload("m")
    node = open_node(rocksdb={"enabled": False}, mapped=STORE_ONLY, cpu_cache={"warm": True})
    np.testing.assert_array_equal(lookup(node, 1, 77).vectors["a"], rows_of([1, 77], 2))
    (status,) = (each for each in node.tiers if each.tier.info.name == "mapped")
    assert status.rows(node.model("m").tables["a"]) == ROWS


def test_without_rocksdb_a_table_needs_a_file(open_node, models):
    mapped = models / "m/1/tables/a" / MAPPED_FILE
    mapped.unlink()
    with pytest.raises(ModelError, match=r"table m/1/a has no usable mapped file, .*rocksdb"):
        open_node(rocksdb={"enabled": False})


def test_without_rocksdb_damage_is_reported(open_node, models):
    path = models / "m/1/tables/a" / MAPPED_FILE
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 40)
        file.write(b"\1\2\3\4")
    node = open_node(rocksdb={"enabled": False})
    until(node.damage)
    assert f"damaged mapped files: {path} of table m/1/a" in node.damage()
    assert lookup(node, *range(2000)).degraded == ("mapped",)


@pytest.mark.parametrize(
    "updates", [{"directory": {"path": "in"}}, {"kafka": {"brokers": "localhost:1"}}]
)
def test_without_rocksdb_updates_are_refused(open_node, models, updates):
    tiers = {"rocksdb": {"enabled": False}}
    with pytest.raises(
        ConfigError, match=r"updates\.\w+.* needs a store .* mapped files do not change"
    ):
        hps.open({"models": {"repository": str(models)}, "tiers": tiers, "updates": updates})
    with pytest.raises(ConfigError, match=r"tiers.mapped.enabled is false; one of them must have"):
        open_node(rocksdb={"enabled": False}, mapped={"enabled": False})


@pytest.mark.parametrize(
    ("cpu_cache", "mapped", "rows"),
    [
        ({}, {}, ROWS),
        ({}, STORE_ONLY, ROWS),
        ({"share": 0.5}, {}, ROWS // 2),
    ],
)
def test_cpu_cache_has_room_for_changed_rows_of_a_table_in_memory(
    open_node, models, cpu_cache, mapped, rows
):
    """At the start, and for a version that is loaded later."""
    publish(models, 2)
    node = open_node(cpu_cache=cpu_cache, mapped=mapped)
    cache = next(each for each in node.tiers if each.tier.info.name == "cpu")
    for version in (2, 1):
        (table,) = node.model("m").tables.values()
        assert cache.capacity(table) == rows
        node.load("m", version)
