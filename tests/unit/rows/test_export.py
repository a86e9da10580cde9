"""Exports: contents of the files, and the state after a failure."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hps.errors import ConfigError, HpsError
from hps.rows.base import TableRows
from hps.rows.export import export
from hps.types import EmbeddingTable

TABLE = EmbeddingTable.make("t", 3)


def rows(first: int, n: int, dtype: Any = np.float32) -> TableRows:
    keys = np.arange(first, first + n)
    return TableRows(
        keys, (keys[:, None] + np.arange(3)).astype(dtype), keys.astype(np.uint64) + 10
    )


def read(path: Path) -> dict[str, Any]:
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return dict(archive)
    table = pq.read_table(path)
    found = {name: table[name].to_numpy() for name in ("key", "version", "deleted")}
    return found | {"vector": table["vector"].to_pylist()}


@pytest.mark.parametrize("name", ["t.npz", "t.parquet"])
def test_export_contains_rows_and_deletions(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    report = export(path, TABLE, [rows(0, 5), rows(5, 2)], [rows(100, 1)])
    assert (report.rows, report.deleted, report.newest) == (8, 1, 110)
    found = read(path)
    assert found["key"].tolist() == [*range(7), 100]
    assert found["version"].dtype == np.uint64
    assert found["version"].tolist() == [*range(10, 17), 110]
    assert found["deleted"].tolist() == [False] * 7 + [True]
    vectors = list(found["vector"])
    assert np.array(vectors[:7]).tolist() == rows(0, 7).vectors.tolist()
    assert vectors[7] is None if name == "t.parquet" else not vectors[7].any()
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["t.npz", "t.parquet"])
def test_since_exports_only_newer_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    report = export(path, TABLE, [rows(0, 3), rows(3, 3)], [rows(3, 3)], since=14)
    assert (report.rows, report.deleted, report.newest) == (2, 1, 15)
    assert read(path)["key"].tolist() == [5, 5]
    report = export(path, TABLE, [rows(0, 3)], since=2**64 - 1)
    assert (report.rows, report.newest) == (0, 0)
    assert len(read(path)["key"]) == 0


@pytest.mark.parametrize("name", ["t.npz", "t.parquet"])
def test_half_precision_is_kept(tmp_path: Path, name: str) -> None:
    table = EmbeddingTable.make("t", 3, dtype=np.float16)
    export(tmp_path / name, table, [rows(0, 4, np.float16)])
    vectors = np.array(list(read(tmp_path / name)["vector"]))
    np.testing.assert_array_equal(vectors, rows(0, 4).vectors)


@pytest.mark.parametrize("name", ["t.npz", "t.parquet"])
def test_failure_keeps_the_existing_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("before")

    def broken() -> Any:
        yield rows(0, 5)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(HpsError, match=r"cannot write .*No space left"):
        export(path, TABLE, broken())
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert path.read_text() == "before"


@pytest.mark.parametrize("name", ["t.npz", "t.parquet"])
def test_full_disk_is_reported(tmp_path: Path, name: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(HpsError, match=r"cannot write .*make room, or name another file"):
            export(tmp_path / name, TABLE, [rows(i, 1000) for i in range(0, 20_000, 1000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_other_suffixes_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\*\.parquet, \*\.npz"):
        export(tmp_path / "t.csv", TABLE, [])
    with pytest.raises(ConfigError, match=r"the folder .* does not exist"):
        export(tmp_path / "none" / "t.npz", TABLE, [])
