"""The difference of two scans turns one into the other, however they are split."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.rows.base import TableRows
from hps.rows.files import FileRows
from hps.rows.version_diff import all_rows, diff_scans, diff_versions

keys_and_values = st.dictionaries(
    st.integers(-20, 20) | st.sampled_from([-(2**63), 2**63 - 1]), st.integers(0, 2), max_size=30
)


def parts(rows: dict[int, int], cuts: list[int]) -> list[TableRows]:
    """A scan of the rows in as many parts as there are cuts, some of them empty."""
    keys = np.array(sorted(rows), np.int64)
    vectors = np.array([[rows[k], 1] for k in keys.tolist()], np.float32).reshape(-1, 2)
    bounds = [0, *sorted(min(c, len(keys)) for c in cuts), len(keys)]
    whole = TableRows(keys, vectors, np.zeros(len(keys), np.uint64))
    return [whole.at(slice(*pair)) for pair in pairwise(bounds)]


cuts = st.lists(st.integers(0, 30), max_size=6)


@given(keys_and_values, keys_and_values, cuts, cuts)
def test_diff_has_exactly_the_changed_rows(base, new, base_cuts, new_cuts):
    written: dict[int, float] = {}
    gone: list[int] = []
    for rows, deleted in diff_scans(parts(base, base_cuts), parts(new, new_cuts)):
        assert len(rows.keys) == len(rows.vectors) == len(rows.versions)
        assert not written.keys() & set(rows.keys.tolist())
        written |= dict(zip(rows.keys.tolist(), rows.vectors[:, 0].tolist(), strict=True))
        gone += deleted.tolist()
    assert written == {k: v for k, v in new.items() if base.get(k) != v}
    assert sorted(gone) == sorted(base.keys() - new.keys())
    assert len(set(gone)) == len(gone)


def test_diff_compares_bits():
    one = TableRows(
        np.array([1, 2]), np.array([[0.0], [np.nan]], np.float32), np.zeros(2, np.uint64)
    )
    other = TableRows(
        np.array([1, 2]), np.array([[-0.0], [np.nan]], np.float32), np.zeros(2, np.uint64)
    )
    ((rows, gone),) = diff_scans([one], [other])
    assert (rows.keys.tolist(), gone.tolist()) == ([1], [])


def test_diff_of_model_versions_has_changed_rows_and_deletions(write, tmp_path):
    old = write([3, -1, 5], np.arange(6).reshape(3, 2), dtype="float16")
    new_keys, new_rows = np.array([5, 7, 3]), np.array([[4, 5], [8, 8], [0, 2]], np.float32)
    write_version(tmp_path / "models", old.spec, 2, {"t": (new_keys, new_rows)})
    new = Repository(tmp_path / "models").open("m", 2)
    tables = old.embedding_tables()["t"], new.embedding_tables()["t"]
    found = list(diff_versions(FileRows(old), tables[0], FileRows(new), tables[1], 99))
    assert np.concatenate([each.keys for each in found]).tolist() == [3, 7]
    assert np.concatenate([each.deleted for each in found]).tolist() == [-1]
    assert {v for each in found for v in [*each.versions, *each.deleted_versions]} == {99}
    assert all(each.vectors.dtype == np.float16 for each in found)
    everything = list(all_rows(FileRows(new), tables[1], 7))
    assert np.concatenate([each.keys for each in everything]).tolist() == [3, 5, 7]
