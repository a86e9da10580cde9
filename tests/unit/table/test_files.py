"""save and load of tables: HierarchicalKV's cases for each policy, files byte by byte, damage."""

import json

import numpy as np
import pytest

from hps.errors import BadRequest, ModelError
from tests.support.tables import BACKENDS, POLICIES, everything, make, rows_of, scores_for

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def saved(backend, tmp_path):
    table, keys = make(backend, 1 << 11), np.arange(1000)
    table.insert_or_assign(keys, rows_of(keys), keys + 5)
    assert table.save(tmp_path / "table") == 1000
    return tmp_path / "table"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loaded_table_equals_the_saved_one(backend, policy, tmp_path):
    table, keys = make(backend, 1 << 11, policy=policy), np.arange(1500)
    table.epoch = 101
    table.insert_or_assign(keys, rows_of(keys), scores_for(table, keys))
    assert table.save(tmp_path / "saved") == table.size
    other = make(backend, 128, max_capacity=1 << 12, policy=policy)
    assert other.load(tmp_path / "saved") == table.size
    assert everything(other) == everything(table)
    assert other.capacity == 1 << 12


def test_files_are_arrays_in_the_same_order(backend, saved):
    assert sorted(path.name for path in saved.parent.iterdir()) == ["table"]
    keys = np.fromfile(saved / "keys", np.int64)
    assert sorted(keys.tolist()) == [*range(1000)]
    values = np.fromfile(saved / "values", np.float32).reshape(1000, 4)
    np.testing.assert_array_equal(values, rows_of(keys))
    np.testing.assert_array_equal(np.fromfile(saved / "scores", np.uint64), keys + 5)
    described = json.loads((saved / "table.json").read_text())
    assert described["rows"] == 1000


def test_load_merges_into_a_table(backend, saved):
    table = make(backend, 1 << 11)
    table.insert_or_assign([5, 5000], rows_of([1, 2], 1), [1, 2])
    table.load(saved)
    assert table.size == 1001
    assert everything(table)[5] == (rows_of([5])[0].tolist(), 10)


def test_a_folder_that_exists_is_not_overwritten(backend, saved):
    table = make(backend)
    with pytest.raises(FileExistsError, match="exists: save a table to a new folder"):
        table.save(saved)
    assert make(backend, 1 << 11).load(saved) == 1000


def test_an_empty_table_is_saved_and_loaded(backend, tmp_path):
    assert make(backend).save(tmp_path / "a" / "b") == 0
    table = make(backend)
    assert table.load(tmp_path / "a" / "b") == table.size == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 5}, "has dim 4, but the table has 5"),
        ({"dtype": "f2"}, "has dtype float32, but the table has float16"),
        ({"policy": "lru"}, "has policy customized, but the table has lru"),
        ({"init_capacity": 100}, "has 1000 rows, but max_capacity is 128"),
    ],
)
def test_folders_of_another_kind_are_refused(backend, saved, options, message):
    table = make(backend, **{"init_capacity": 1 << 11, **options})
    with pytest.raises(BadRequest, match=message):
        table.load(saved)
    assert table.size == 0


def damage_bit(path):
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: damage_bit(f / "values"), "values has crc32"),
        (lambda f: damage_bit(f / "keys"), "keys has crc32"),
        (lambda f: (f / "scores").write_bytes(b""), "scores has 0 bytes, but 1000 rows have 8000"),
        (lambda f: (f / "table.json").write_text("{"), "does not describe a table"),
        (lambda f: (f / "table.json").write_text('{"version": 1, "rows": 1}'), "not describe"),
        (lambda f: (f / "table.json").write_text('{"version": 2}'), "version 2, but .* version 1"),
        (lambda f: (f / "table.json").write_text("[]"), "does not describe a table"),
    ],
    ids=["values", "keys", "scores", "json", "entries", "version", "list"],
)
def test_damaged_folders_are_refused_before_anything_changes(backend, saved, damage, message):
    damage(saved)
    table = make(backend, 1 << 11)
    with pytest.raises(ModelError, match=message):
        table.load(saved)
    assert table.size == 0


def test_a_failed_save_leaves_nothing(backend, tmp_path, monkeypatch):
    table = make(backend)
    monkeypatch.setattr(table, "export_batch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        table.save(tmp_path / "table")
    assert [*tmp_path.iterdir()] == []


def test_a_missing_folder_is_an_os_error(backend, tmp_path):
    with pytest.raises(FileNotFoundError):
        make(backend).load(tmp_path / "absent")
