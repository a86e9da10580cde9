"""Files of a saved table.

A folder with four files. ``keys``, ``values`` and ``scores`` contain the keys (int64), rows and scores
(uint64) one after the other, little-endian, in the same order: as HierarchicalKV's ``LocalKVFile`` reads and
writes them. ``table.json`` has ``version`` (1), ``rows``, ``dim``, ``dtype``, ``policy`` and, in ``crc32``,
the checksum of each file. It is written under a temporary name and renamed: a folder without errors is
complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from hps import native
from hps.errors import BadRequest, ModelError
from hps.table.policy import Policy
from hps.table.results import TableRows

VERSION = 1
_NAMES = ("keys", "values", "scores")
_PIECE = 4 << 20


class RowKind(Protocol):
    """What the rows of a saved table must agree with."""

    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def max_capacity(self) -> int: ...


def save(folder: Path, table: RowKind, batches: Iterable[TableRows]) -> int:
    """Write ``batches`` to the new folder ``folder``. Raises FileExistsError if it exists, OSError."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists: save a table to a new folder")
    hidden = folder.with_name(f".{folder.name}.{uuid4().hex}")
    hidden.mkdir(parents=True)
    try:
        rows = _write(hidden, table, batches)
        hidden.rename(folder)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return rows


def _write(folder: Path, table: RowKind, batches: Iterable[TableRows]) -> int:
    rows, sums = 0, dict.fromkeys(_NAMES, 0)
    with ExitStack() as stack:
        opened = [stack.enter_context((folder / name).open("wb")) for name in _NAMES]
        for batch in batches:
            rows += len(batch.keys)
            for name, file, array in zip(_NAMES, opened, batch, strict=True):
                data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                sums[name] = native.crc32(data, sums[name])
                file.write(data.data)
        for file in opened:
            file.flush()
            os.fsync(file.fileno())
    described = {
        "version": VERSION,
        "rows": rows,
        "dim": table.dim,
        "dtype": table.dtype.name,
        "policy": str(table.policy),
        "crc32": sums,
    }
    (folder / "table.json").write_text(json.dumps(described, indent=1) + "\n")
    return rows


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A folder that `save` wrote, checked."""

    folder: Path
    rows: int
    dim: int
    dtype: np.dtype[Any]

    @classmethod
    def open(cls, folder: Path, table: RowKind) -> SavedTable:
        """Check a folder against ``table``. Raises BadRequest, ModelError, OSError."""
        described = _described(folder)
        own = {"dim": table.dim, "dtype": table.dtype.name, "policy": str(table.policy)}
        for name, value in own.items():
            if described[name] != value:
                raise BadRequest(
                    f"{folder} has {name} {described[name]}, but the table has {value}"
                )
        saved = cls(folder, described["rows"], table.dim, table.dtype)
        if saved.rows > table.max_capacity:
            raise BadRequest(
                f"{folder} has {saved.rows} rows, but max_capacity is {table.max_capacity}: raise it"
            )
        for name, width in zip(_NAMES, saved._widths(), strict=True):
            saved._check(name, saved.rows * width, described["crc32"][name])
        return saved

    def _widths(self) -> tuple[int, int, int]:
        return 8, self.dim * self.dtype.itemsize, 8

    def _check(self, name: str, size: int, crc32: int) -> None:
        path = self.folder / name
        actual = path.stat().st_size
        if actual != size:
            raise ModelError(f"{path} has {actual} bytes, but {self.rows} rows have {size}")
        total = 0
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                total = native.crc32(np.frombuffer(piece, np.uint8), total)
        if total != crc32:
            raise ModelError(f"{path} has crc32 {total}, but table.json states {crc32}")

    def batches(self, rows: int) -> Iterator[TableRows]:
        """Read the rows, at most ``rows`` at a time."""
        with ExitStack() as stack:
            keys, values, scores = (
                stack.enter_context((self.folder / name).open("rb")) for name in _NAMES
            )
            while len(part := np.fromfile(keys, np.int64, rows)):
                vectors = np.fromfile(values, self.dtype, len(part) * self.dim)
                yield TableRows(
                    part,
                    vectors.reshape(len(part), self.dim),
                    np.fromfile(scores, np.uint64, len(part)),
                )


def _described(folder: Path) -> dict[str, Any]:
    text = (folder / "table.json").read_text()
    try:
        described = json.loads(text)
        version = described["version"]
        complete = version != VERSION or (
            isinstance(described["rows"], int)
            and {"dim", "dtype", "policy"} <= described.keys()
            and {*_NAMES} <= described["crc32"].keys()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / 'table.json'} does not describe a table: {error}") from None
    if version != VERSION:
        raise ModelError(f"{folder} has version {version}, but this hps reads version {VERSION}")
    if not complete:
        raise ModelError(f"{folder / 'table.json'} does not describe a table: entries are missing")
    return dict(described)
