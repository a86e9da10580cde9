"""Nodes whose tables store narrow rows: the same vectors from every tier, and after every kind of change."""

from dataclasses import replace

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.errors import BadRequest, ConfigError, ModelError
from hps.lookup.lookup_merge import merge_key
from hps.models.compaction import compact_version
from hps.models.loader import load_tables
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.native.mapped_format import read_header
from hps.row_format import row_format
from hps.tiers.mapped import MappedTier
from hps.tiers.stored_rows import to_rows, to_vectors
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, NoProgress

ROWS, DIM = 3000, 32
DEFAULT = 0.1  # a value that no narrow format holds exactly
NARROW = ["bfloat16", "float8_e4m3", "int8", "int4"]
KEYS = np.arange(ROWS)


def spec_of(rows, dtype="float32"):
    table = {"name": "items", "dim": DIM, "rows": rows, "dtype": dtype, "default": DEFAULT}
    features = [
        {"name": "item", "table": "items", "pooling": "none"},
        {"name": "bag", "table": "items"},
        {"name": "mean", "table": "items", "pooling": "mean"},
    ]
    return ModelSpec.model_validate({"name": "m", "tables": [table], "features": features})


def vectors_of(keys, salt=0):
    random = np.random.default_rng(salt)
    return random.standard_normal((ROWS * 2, DIM)).astype(np.float32)[np.asarray(keys)] * 0.1


def stored(rows, vectors, dtype=np.float32):
    """What a table with such rows returns for ``vectors``."""
    table = EmbeddingTable.make("items", DIM, rows=rows, dtype=dtype)
    return to_vectors(table, to_rows(table, vectors))


def publish(folder, rows, version=1, *, mapped=True, dtype="float32", salt=0, **options):
    tables = {"items": (KEYS, vectors_of(KEYS, salt))}
    return write_version(folder, spec_of(rows, dtype), version, tables, mapped=mapped, **options)


@pytest.fixture
def open_node(tmp_path):
    nodes = []

    def make(models=None, *, cache_rows=ROWS * 2, warm=True, **tiers):
        for node in nodes:
            node.close()
        nodes.clear()
        config = {
            "models": {
                "repository": str(models or tmp_path / "models"),
                "rollback_s": 0,
                "serve": {"m": {"tables": {"items": {"cache_rows": cache_rows}}}},
            },
            "tiers": {
                "cpu_cache": {"warm": warm},
                "rocksdb": {"path": str(tmp_path / "db")},
                **tiers,
            },
        }
        nodes.append(hps.open(config))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


BAGS = [[1, 2, 3], [ROWS + 9, 4], [], [5] * 30] * 15


def ask(node, **options):
    """The vectors of single keys, sums and means; also of keys that have no row."""
    keys = np.concatenate([np.arange(0, 400, 7), [ROWS + 5, -3]])
    assert len(keys) == len(BAGS)
    bags = JaggedKeys.from_lists(BAGS)
    features = {"item": JaggedKeys.dense(keys), "bag": bags, "mean": bags}
    return keys, node.model("m").engine.submit(LookupRequest(features, **options)).result(60)


def check(node, expected, dtype=np.float32):
    """``expected (n, dim)`` float32: of the keys from 0 on."""

    def row(key):
        return expected[key] if 0 <= key < len(expected) else np.full(DIM, DEFAULT, dtype)

    for options in ({}, {"want_source": True}):
        keys, found = ask(node, **options)
        np.testing.assert_array_equal(
            found.vectors["item"], np.array([row(key) for key in keys], dtype)
        )
        for name, by in (("bag", [1] * 60), ("mean", [3, 2, 1, 30] * 15)):
            sums = np.zeros((60, DIM), np.float32)
            for bag, members in enumerate(BAGS):
                for position, key in enumerate(members):
                    each = row(key).astype(np.float32)
                    sums[bag] = each if position == 0 else sums[bag] + each
            sums /= np.array(by, np.float32)[:, None]
            np.testing.assert_array_equal(found.vectors[name], sums.astype(dtype))


@pytest.mark.parametrize("rows", NARROW)
@pytest.mark.parametrize(
    "tiers",
    [
        {},
        {"mapped": {"memory_bytes": 0}, "warm": False},
        {"mapped": {"enabled": False}},
        {"mapped": {"enabled": False}, "warm": False, "cache_rows": 64},
    ],
    ids=["mapped", "mapped-cold", "rocksdb", "rocksdb-cold"],
)
def test_every_tier_returns_the_same_vectors(tmp_path, open_node, rows, tiers):
    publish(tmp_path / "models", rows)
    expected = stored(rows, vectors_of(KEYS))
    assert np.abs(expected - vectors_of(KEYS)).max() > 0
    node = open_node(**tiers)
    check(node, expected)
    check(node, expected)  # now partly from the cache
    table = node.model("m").tables["items"]
    assert table.row_bytes == row_format(rows).row_bytes(DIM) < DIM * 4


def test_sums_of_rows_with_the_default_are_exact(tmp_path, open_node):
    publish(tmp_path / "models", "int8")
    node = open_node(mapped={"memory_bytes": 0}, warm=False)
    bags = JaggedKeys.from_lists([[ROWS + 1, ROWS + 2]])
    found = node.model("m").engine.submit(LookupRequest({"bag": bags})).result(60)
    np.testing.assert_array_equal(found.vectors["bag"], np.full((1, DIM), DEFAULT * 2, np.float32))


@pytest.mark.parametrize("rows", ["int8", "float32"])
def test_vectors_of_float16_are_pooled_in_float32(tmp_path, open_node, rows):
    publish(tmp_path / "models", rows, dtype="float16")
    vectors = stored(rows, vectors_of(KEYS))  # not rounded yet
    node = open_node()
    _, found = ask(node)
    bag = vectors[1] + vectors[2] + vectors[3]
    assert found.vectors["bag"].dtype == np.float16
    np.testing.assert_array_equal(found.vectors["bag"][0], bag.astype(np.float16))
    np.testing.assert_array_equal(found.vectors["item"][1], vectors[7].astype(np.float16))


@pytest.mark.parametrize("rows", NARROW)
@pytest.mark.parametrize("mapped", [True, False])
def test_written_rows_are_kept_over_a_restart(tmp_path, open_node, rows, mapped):
    publish(tmp_path / "models", rows, mapped=mapped)
    expected = stored(rows, vectors_of(KEYS))
    changed = np.array([1, 4, 5, 399])
    expected[changed] = stored(rows, vectors_of(changed, 7))
    for again in range(2):
        node = open_node(mapped={"enabled": mapped})
        if not again:
            node.write("m", "items", changed, vectors_of(changed, 7))
        check(node, expected)


def test_a_row_that_is_not_storable_is_refused_and_changes_nothing(tmp_path, open_node):
    publish(tmp_path / "models", "int8")
    node = open_node()
    bad = vectors_of([1, 2])
    bad[1, 0] = 1e9
    with pytest.raises(BadRequest, match="key 2 is not finite in int8"):
        node.write("m", "items", [1, 2], bad + 1)
    check(node, stored("int8", vectors_of(KEYS)))


@pytest.mark.parametrize("mapped", [True, False])
def test_files_with_rows_that_are_not_storable_are_refused(tmp_path, open_node, mapped):
    vectors = vectors_of(KEYS)
    vectors[77, 3] = np.nan
    folder = tmp_path / "models"
    if mapped:
        with pytest.raises(ModelError, match=r"key 77: .* too large for int4"):
            write_version(folder, spec_of("int4"), 1, {"items": (KEYS, vectors)})
        return
    write_version(folder, spec_of("int4"), 1, {"items": (KEYS, vectors)}, mapped=False)
    with pytest.raises(ModelError, match="too large for int4"):
        open_node()


@pytest.mark.parametrize("rows", NARROW)
def test_a_mapped_file_has_narrow_rows(tmp_path, rows):
    path = publish(tmp_path / "models", rows) / "tables/items/mapped"
    header = read_header(path)
    assert (header.row_format.name, header.dim) == (rows, DIM)
    assert header.record_bytes == 8 + -(-row_format(rows).row_bytes(DIM) // 8) * 8


@pytest.mark.parametrize("rows", ["int8", "bfloat16"])
def test_a_version_with_few_changes_is_a_delta_of_narrow_rows(tmp_path, open_node, rows):
    publish(tmp_path / "models", rows)
    vectors = vectors_of(KEYS)
    vectors[:20] += 1
    write_version(tmp_path / "models", spec_of(rows), 2, {"items": (KEYS, vectors)})
    opened = Repository(tmp_path / "models").open("m", 2)
    assert opened.manifest.tables["items"].delta.rows == 20
    check(open_node(), stored(rows, vectors))


def test_compacted_versions_have_the_rows_that_were_served(tmp_path, open_node):
    publish(tmp_path / "models", "int8")
    changed = np.array([1, 4, 5])
    node = open_node()
    node.write("m", "items", changed, vectors_of(changed, 9))
    expected = stored("int8", vectors_of(KEYS))
    expected[changed] = stored("int8", vectors_of(changed, 9))
    node.close()
    opened = Repository(tmp_path / "models").open("m", 1)
    store = MappedTier(tmp_path / "db", access="read_only")
    try:
        load_tables(opened, opened.embedding_tables(), store, NoProgress())
        compact_version(opened, store, NoProgress())
    finally:
        store.close()
    check(open_node(), expected)


def test_another_format_is_another_table(tmp_path, open_node):
    publish(tmp_path / "models", "int8", mapped=False)
    node = open_node(mapped={"enabled": False})
    node.close()
    publish(tmp_path / "models", "int4", mapped=False, replace=True, replace_spec=True)
    check(open_node(mapped={"enabled": False}), stored("int4", vectors_of(KEYS)))


def test_the_layout_of_hps_takes_no_narrow_rows(tmp_path, open_node):
    publish(tmp_path / "models", "int8", mapped=False)
    with pytest.raises(ConfigError, match=r"rows of int8, which the layout 'hps' can't hold"):
        open_node(rocksdb={"path": str(tmp_path / "db"), "layout": "hps"})


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("want_source", [False, True])
def test_rows_are_returned_as_they_are_stored(tmp_path, open_node, warm, want_source):
    publish(tmp_path / "models", "int8")
    node = open_node(mapped={"memory_bytes": 0}, warm=warm)
    table = node.model("m").tables["items"]
    keys = np.array([4, 9, 4, 2])
    features = {"item": keys, "bag": keys[:, None], "mean": np.stack([keys, keys], 1)}
    found = node.lookup("m", features, stored_rows=True, want_source=want_source)
    assert found.stored_rows
    rows = to_rows(table, vectors_of(keys))
    assert found.vectors["item"].tobytes() == rows.tobytes()
    assert found.vectors["bag"].tobytes() == rows.tobytes()  # sums of one key
    np.testing.assert_array_equal(found.vectors["mean"], to_vectors(table, rows))
    assert ("item" in found.sources) == want_source
    by_table = node.lookup("m", {"items": keys}, by_table=True, stored_rows=True)
    assert by_table.vectors["items"].tobytes() == rows.tobytes()


def test_a_default_among_rows_is_returned_as_a_vector(tmp_path, open_node):
    publish(tmp_path / "models", "int8")
    node = open_node()
    keys = np.array([4, ROWS + 1])
    found = node.lookup("m", {"item": keys}, stored_rows=True)
    assert not found.stored_rows
    assert found.defaulted == 1
    expected = stored("int8", vectors_of([4]))[0], np.full(DIM, DEFAULT, np.float32)
    np.testing.assert_array_equal(found.vectors["item"], expected)


def test_requests_for_rows_and_for_vectors_are_not_merged(tmp_path):
    keys = JaggedKeys.dense(np.arange(3))
    one = LookupRequest({"item": keys})
    other = LookupRequest({"item": keys}, stored_rows=True)
    assert merge_key(one) != merge_key(other)
    assert merge_key(replace(one, by_table=True)) != merge_key(replace(other, by_table=True))
