"""A model's files as a source of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.errors import HpsError
from hps.rows import files as module
from hps.rows.files import FileRows
from hps.rows.tiers import SeenKeys

KEYS = [5, -1, 2**63 - 1, -(2**63), 5, 0]
VECTORS = np.arange(12).reshape(6, 2)
LAST = {-1: 1, 2**63 - 1: 2, -(2**63): 3, 5: 4, 0: 5}
"""The last row of each key, which wins where a key is repeated."""


def test_scan_and_get_return_the_last_row_of_each_key(write: Any) -> None:
    version = write(KEYS, VECTORS)
    (table,) = version.embedding_tables().values()
    source = FileRows(version)
    found = {}
    for rows in source.scan(table):
        assert set(rows.versions.tolist()) == {source.row_version(table)}
        found |= dict(zip(rows.keys.tolist(), rows.vectors.tolist(), strict=True))
    assert found == {key: VECTORS[at].tolist() for key, at in LAST.items()}
    queried = np.array([0, 7, 5, -(2**63)])
    held = source.get(table, queried)
    assert held.found.tolist() == [True, False, True, True]
    assert held.vectors[held.found].tolist() == [
        VECTORS[LAST[k]].tolist() for k in (0, 5, -(2**63))
    ]
    assert [k.tolist() for k in source.missing_keys(table, [queried[:1], queried[1:]])] == [[7]]


def test_key_file_is_read_in_blocks(write: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_READ", 2)
    monkeypatch.setattr(module, "_SEARCHED_KEYS", 2)
    version = write(KEYS, VECTORS)
    (table,) = version.embedding_tables().values()
    source = FileRows(version)
    held = source.get(table, np.array([5]))
    assert held.vectors.tolist() == [VECTORS[4].tolist()]
    missing = source.missing_keys(table, [np.array([1]), np.array([5, 9]), np.array([11])])
    assert np.concatenate(list(missing)).tolist() == [1, 9, 11]


def test_keys_of_32_bits_are_narrowed(write: Any) -> None:
    version = write([2**32 + 3, 4], VECTORS[:2], key_dtype="uint32")
    (table,) = version.embedding_tables().values()
    held = FileRows(version).get(table, np.array([3, 4]))
    assert held.found.all()
    assert set(FileRows(version).draw(table, 100).tolist()) == {3, 4}


def test_draw_from_an_empty_table_returns_no_keys(write: Any) -> None:
    version = write([], np.empty((0, 2)))
    (table,) = version.embedding_tables().values()
    assert len(FileRows(version).draw(table, 10)) == 0
    assert next(iter(FileRows(version).missing_keys(table, [np.array([1])]))).tolist() == [1]


@given(st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=12))
def test_seen_keys_are_new_once(parts: list[list[int]]) -> None:
    seen, known = SeenKeys(), set()
    for part in parts:
        fresh = seen.fresh(np.array(part, np.int64))
        expected = [k not in known and k not in part[:i] for i, k in enumerate(part)]
        assert fresh.tolist() == expected
        known |= set(part)


def test_full_disk_during_a_sort_is_reported(write: Any, monkeypatch: Any) -> None:
    def full(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    version = write(KEYS, VECTORS)
    (table,) = version.embedding_tables().values()
    monkeypatch.setattr(module, "sorted_chunks", full)
    with pytest.raises(HpsError, match=r"No space left on device; make room there.* TMPDIR"):
        list(FileRows(version).scan(table))
