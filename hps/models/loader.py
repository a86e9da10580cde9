"""Repository -> RocksDB: each table's files are sorted by stored key and ingested once.

The memory it takes is bounded, whatever the table's size: keys are sorted in ranges that fit
``KEY_BUDGET`` rows, vectors are gathered from the mapped file block by block. Of a key that stands
several times the last row wins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hps.errors import ModelError
from hps.models.manifest import checksum_file
from hps.models.repository import ModelVersion
from hps.models.tables import TableFiles
from hps.tiers.rocksdb import LoadRecord, RocksDbTier
from hps.tiers.rocksdb_layout import CodeArray
from hps.types import EmbeddingTable, IndexArray, Progress, VectorArray, make_version

# Rows sorted at a time: 16 bytes each for code and position, as much again while sorting.
KEY_BUDGET = 12_000_000
_BLOCK_ROWS = 16_384
_SCAN_ROWS = 1 << 20
_SAMPLE = 1 << 16


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What happened to one table: ``reused`` from an earlier start or loaded; ``rows`` in the store
    after the load, ``duplicates`` dropped, ``seconds``."""

    table: str
    reused: bool
    rows: int
    duplicates: int
    seconds: float


@dataclass(slots=True)
class _Count:
    duplicates: int = 0


def load_tables(
    version: ModelVersion,
    tables: Mapping[str, EmbeddingTable] | Sequence[EmbeddingTable],
    store: RocksDbTier,
    progress: Progress,
    *,
    rebuild: bool = False,
) -> list[LoadReport]:
    """Make ``store`` hold every table of ``version``; returns one report per table.

    A table whose complete load record carries the files' digest is reused as it is, rows streamed
    in since included. An incomplete load is dropped and done again. When the digest differs the
    table is loaded anew, but rows streamed in since must not vanish silently: that is a ModelError
    unless ``rebuild``.
    """
    chosen = list(tables.values() if isinstance(tables, Mapping) else tables)
    store.open_tables(chosen)
    return [_load(version, t, store, progress, rebuild=rebuild) for t in chosen]


def _load(
    version: ModelVersion,
    table: EmbeddingTable,
    store: RocksDbTier,
    progress: Progress,
    *,
    rebuild: bool,
) -> LoadReport:
    began = time.monotonic()
    files = version.tables[table.name]
    record = store.loaded(table)
    if record is not None and not rebuild:
        if (record.digest, record.dim, record.dtype) == (files.digest, table.dim, table.dtype.name):
            return LoadReport(table.name, True, record.rows, 0, time.monotonic() - began)
        if store.streamed(table):
            raise ModelError(
                f"table {table.id}: the files in {files.folder} are not the ones loaded into "
                f"{store.path}, and rows were streamed into that table since, which a new load would "
                "lose. Publish the files as a new version, or load with rebuild to drop those rows"
            )
    _verify(files, progress)
    count = _Count()
    with progress.task(f"loading {table.name}", files.rows) as step:
        done = store.bulk_load(
            table,
            sorted_chunks(files, partial(store.codes, table), count),
            LoadRecord(
                files.digest, files.rows, _row_version(version), table.dim, table.dtype.name
            ),
            step,
        )
    return LoadReport(table.name, False, done.rows, count.duplicates, time.monotonic() - began)


def _row_version(version: ModelVersion) -> int:
    """The version of imported rows: the manifest's time; without one the oldest possible, so that
    any streamed row wins."""
    return make_version(version.manifest.created_unix_ms) if version.manifest else 1


def _verify(files: TableFiles, progress: Progress) -> None:
    """Compare the files with the manifest's checksums."""
    if files.entry is None:
        return
    with progress.task(f"checking {files.name}", files.bytes, "bytes") as step:
        for path, entry in (
            (files.key_path, files.entry.key),
            (files.vector_path, files.entry.emb_vector),
        ):
            found = checksum_file(path, step)
            if found != entry.checksum:
                raise ModelError(
                    f"{path}: the contents do not match the manifest (expected {entry.checksum}, "
                    f"found {found}); the file was damaged or replaced: import the version again"
                )


def sorted_chunks(
    files: TableFiles,
    to_codes: Callable[[np.ndarray], CodeArray],
    count: _Count,
) -> Iterator[tuple[CodeArray, VectorArray]]:
    """Blocks of strictly ascending codes with their vectors (float32, valid until the next block)."""
    if not files.rows:
        return
    vectors = files.vectors()
    block = np.empty((_BLOCK_ROWS, files.dim), np.float32)
    for code, at in _sorted_ranges(files, to_codes):
        if len(code) > 1:
            code, at = _last_of_each(code, at, count)
        for start in range(0, len(code), _BLOCK_ROWS):
            part = slice(start, start + _BLOCK_ROWS)
            rows = block[: len(at[part])]
            np.take(vectors, at[part], axis=0, out=rows, mode="clip")
            yield code[part], rows


def _sorted_ranges(
    files: TableFiles, to_codes: Callable[[np.ndarray], CodeArray]
) -> Iterator[tuple[CodeArray, IndexArray]]:
    """Sorted codes with their row numbers, in ascending ranges of about KEY_BUDGET rows."""
    keys = files.keys()
    if files.rows <= KEY_BUDGET:
        yield _sort(to_codes(np.ascontiguousarray(keys)), None)
        return
    passes = -(-files.rows // (KEY_BUDGET * 3 // 4))
    step = max(1, files.rows // _SAMPLE)
    sample = np.sort(to_codes(np.ascontiguousarray(keys[::step])))
    bounds = np.unique(sample[np.arange(1, passes) * len(sample) // passes])
    for lower, upper in zip([None, *bounds], [*bounds, None], strict=True):
        found, at = [], []
        for start in range(0, files.rows, _SCAN_ROWS):
            code = to_codes(np.ascontiguousarray(keys[start : start + _SCAN_ROWS]))
            mask = np.ones(len(code), bool) if lower is None else code >= lower
            if upper is not None:
                mask &= code < upper
            found.append(code[mask])
            at.append(np.flatnonzero(mask) + start)
        yield _sort(np.concatenate(found), np.concatenate(at))


def _sort(code: CodeArray, at: IndexArray | None) -> tuple[CodeArray, IndexArray]:
    if len(code) < 2 or bool((code[1:] > code[:-1]).all()):
        return code, np.arange(len(code)) if at is None else at
    order = np.argsort(code)
    return code[order], order if at is None else at[order]


def _last_of_each(code: CodeArray, at: IndexArray, count: _Count) -> tuple[CodeArray, IndexArray]:
    """Keep of equal codes the one that stands last in the files."""
    first = np.empty(len(code), bool)
    first[0] = True
    np.not_equal(code[1:], code[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    if len(starts) == len(code):
        return code, at
    count.duplicates += len(code) - len(starts)
    return code[starts], np.maximum.reduceat(at, starts)
