"""Differences of stores to files and to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hps.models.loader import load_tables
from hps.rows import compare as module
from hps.rows.compare import compare
from hps.rows.files import FileRows
from hps.rows.tiers import RocksDbRows
from hps.tiers.rocksdb import RocksDbTier
from hps.types import NoProgress

KEYS = np.arange(-50, 50)
VECTORS = np.arange(200, dtype=np.float32).reshape(100, 2)
QUIET = NoProgress()


@pytest.fixture
def loaded(write: Any, store: RocksDbRows) -> Any:
    """The store with the files' rows, the table, the files and their version."""
    version = write(KEYS, VECTORS)
    (table,) = version.embedding_tables().values()
    load_tables(version, [table], store.tier, QUIET)
    files = FileRows(version)
    return store, table, files, files.row_version(table)


def put(store: RocksDbRows, table: Any, keys: list[int], value: float, version: int) -> None:
    rows = np.full((len(keys), 2), value, np.float32)
    store.tier.insert(table, np.array(keys), rows, np.full(len(keys), version, np.uint64))


def test_loaded_table_equals_its_files(loaded: Any) -> None:
    store, table, files, _ = loaded
    found = compare(store, files, table, QUIET)
    assert (found.compared, found.equal, found.counts.total()) == (100, 100, 0)
    assert not found.differs()


def test_every_kind_of_difference_to_files_is_counted(loaded: Any) -> None:
    store, table, files, version = loaded
    put(store, table, [1, 2], 7, version + 1)
    put(store, table, [3], 7, version)
    store.tier.delete(table, np.array([4]), np.array([version + 1], np.uint64))
    store.tier.evict(table, np.array([5, 6]))
    put(store, table, [1000, -1000], 7, version)
    found = compare(store, files, table, QUIET)
    assert found.examples == {
        "newer": [1, 2],
        "other": [3],
        "deleted": [4],
        "missing": [5, 6],
        "extra": [-1000, 1000],
    }
    assert {kind: len(keys) for kind, keys in found.examples.items()} == dict(found.counts)
    assert found.equal == 100 - 6
    assert found.differs(("newer", "other", "deleted", "missing"))
    assert not found.differs(("newer", "other", "deleted", "missing", "extra"))


def test_rows_with_equal_bits_match_files_of_any_age(loaded: Any) -> None:
    store, table, files, version = loaded
    store.tier.insert(table, KEYS[:1], VECTORS[:1], np.array([version + 5], np.uint64))
    assert compare(store, files, table, QUIET).equal == 100


def test_rows_are_compared_by_their_bits(write: Any, store: RocksDbRows) -> None:
    version = write([1, 2], [[np.nan, 0.0], [1.0, 0.0]])
    (table,) = version.embedding_tables().values()
    load_tables(version, [table], store.tier, QUIET)
    files = FileRows(version)
    assert compare(store, files, table, QUIET).equal == 2
    rows = np.array([[1.0, -0.0]], np.float32)
    store.tier.insert(table, np.array([2]), rows, np.array([files.row_version(table)], np.uint64))
    assert compare(store, files, table, QUIET).examples == {"other": [2]}


def test_versions_count_between_stores(loaded: Any, tmp_path: Path) -> None:
    store, table, _, version = loaded
    tier = RocksDbTier(tmp_path / "other")
    other = RocksDbRows(tier)
    put(store, table, [1, 2, 3], 7, version + 2)
    put(other, table, KEYS.tolist(), 7, version)
    put(other, table, [1], 7, version + 3)
    put(other, table, [2], 7, version + 1)
    put(other, table, [3], 7, version + 2)
    found = compare(store, other, table, QUIET)
    assert (found.examples["older"], found.examples["newer"], found.equal) == ([1], [2], 1)
    assert found.counts["other"] == 97
    tier.close()


def test_only_values_count_in_hps_layout(loaded: Any, tmp_path: Path) -> None:
    store, table, _, version = loaded
    tier = RocksDbTier(tmp_path / "hps", layout="hps")
    tier.insert(table, KEYS, VECTORS, np.zeros(100, np.uint64))
    put(store, table, [1], 7, version + 1)
    found = compare(store, RocksDbRows(tier), table, QUIET)
    assert (found.equal, dict(found.counts)) == (99, {"other": 1})
    tier.close()


def test_sample_finds_frequent_differences(loaded: Any) -> None:
    store, table, files, version = loaded
    store.tier.evict(table, KEYS[::2].copy())
    put(store, table, list(range(1000, 2000)), 7, version)
    sample = files.draw(table, 60)
    found = compare(store, files, table, QUIET, sample=sample)
    assert found.sampled
    assert found.compared == len(sample)
    assert found.counts["missing"] == np.isin(sample, KEYS[::2]).sum() > 0
    assert found.counts["extra"] > 0


def test_number_of_examples_is_bounded(loaded: Any) -> None:
    store, table, files, _ = loaded
    store.tier.evict(table, KEYS)
    found = compare(store, files, table, QUIET)
    assert found.counts["missing"] == 100
    assert len(found.examples["missing"]) == module.EXAMPLES
