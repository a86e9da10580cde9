"""Load a version into RocksDB: each table's files are sorted by stored key and ingested, once.

A table with a file ``mapped`` (`hps.models.mapped_file`) is not loaded if the store is a `MappedTier` that
has no row of it: it is *mapped*, and served from that file (`hps.tiers.mapped`). For every other table its
load record decides at a start:

* Complete, with the digest of the files: the table is reused as it is, with rows streamed in since.
* No record: the table is loaded, or merged (see below) if it holds streamed rows.
* Incomplete, because the load was killed: it is continued if the files are unchanged, else started again.
* No record, but an overlay record of a mapped file that cannot be used any more: the files' rows are
  inserted for the keys that the overlay does not have.
* Another digest: the files under this version number were replaced. The table is loaded again. If rows were
  streamed in since, a new load would lose them, so that is an error. Exception: without a manifest
  (HugeCTR directories of a `ps.json`, which have no version numbers) the files are merged into the table;
  per key, the newer of the files' time and the row's version wins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from hps.errors import ModelError, TierError
from hps.models.check import check_disjoint_tables
from hps.models.external_sort import Chunk, DuplicateCounter, block_rows, prefetch, sorted_chunks
from hps.models.manifest import checksum_file, compare_checksum
from hps.models.mapped_file import MAPPED_FILE
from hps.models.repository import ModelVersion
from hps.models.tables import TableFiles
from hps.native.mapped_format import read_header
from hps.threads import rest
from hps.tiers.mapped import MappedFileTier, MappedTier
from hps.tiers.mapped.masked_positions import MASKED_POSITIONS_FILE, read_masked_positions
from hps.tiers.rocksdb import LoadRecord, RocksDbTier
from hps.tiers.stored_rows import NotStorable, to_rows
from hps.types import EmbeddingTable, Progress, RowArray, VectorArray, make_version

log = logging.getLogger(__name__)
How = Literal["mapped", "reused", "loaded", "merged"]
# Smaller files are sorted without a thread, which would cost more than it saves.
_THREAD_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result for one table.

    ``rows``: loaded, without the ``duplicates``. ``seconds``: time taken."""

    table: str
    how: How
    rows: int
    duplicates: int
    seconds: float

    @property
    def reused(self) -> bool:
        """True if no row was written."""
        return self.how in ("mapped", "reused")


def load_tables(
    version: ModelVersion,
    tables: Mapping[str, EmbeddingTable] | Sequence[EmbeddingTable],
    store: RocksDbTier,
    progress: Progress,
    *,
    rebuild: bool = False,
) -> list[LoadReport]:
    """Make ``store`` hold every table of ``version``; return one report per table.

    See the module for what is loaded. ``rebuild``: load every table again, even one that could be
    reused or whose streamed rows would be lost. Raises ModelError for files that do not match their
    manifest, TierError when writing fails. Takes at most 512 MB in addition to what the store's
    settings allow, whatever a table's size."""
    chosen = list(tables.values() if isinstance(tables, Mapping) else tables)
    store.open_tables(chosen)
    if store.layout == "hps":  # this layout has no version that keeps rows of another shape apart
        for table in chosen:
            store.check(table)
    reports = []
    for table in chosen:
        reports.append(_load(version, table, store, progress, rebuild=rebuild))
        rest()
    for table, report in zip(chosen, reports, strict=True):
        _log(table, report)
    if any(not report.reused for report in reports):
        store.flush()
    return reports


def version_of_rows(store: RocksDbTier, table: EmbeddingTable, files: TableFiles) -> int | None:
    """Return the one version of all rows that ``store`` loaded from ``files``.

    None if the rows may have other versions, so that they must be read: other files were loaded, a key is
    repeated, or rows were written since."""
    record = store.loaded(table)
    if record is None or (record.digest, record.rows) != (files.digest, files.rows):
        return None
    if store.streamed(table):
        return None
    return record.version if store.layout == "native" else 0


def _log(table: EmbeddingTable, report: LoadReport) -> None:
    if report.reused:
        log.debug("table %s: %s, %d rows", table.id, report.how, report.rows)
        return
    log.info("table %s: %s, %d rows in %.1f s", table.id, report.how, report.rows, report.seconds)
    if report.duplicates:
        log.warning(
            "table %s: %d rows repeat the key of a later row and are not served",
            table.id,
            report.duplicates,
        )


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
    if not rebuild and map_table(version, table, store):
        return LoadReport(table.name, "mapped", files.rows, 0, time.monotonic() - began)
    how = _decide(files, table, store, rebuild=rebuild)
    if how == "reused":
        record = store.loaded(table)
        assert record is not None
        return LoadReport(table.name, how, record.rows, 0, time.monotonic() - began)
    if store.access != "primary":
        raise TierError(
            store.info.name,
            f"table {table.id} is not loaded into {store.path}, and access: {store.access} forbids loading; "
            "load it once with access: primary",
        )
    check_disjoint_tables(files, table.key_bits)
    record = _record(version, table, files)
    duplicates = DuplicateCounter()
    with _ChecksumVerifier(files) as verifier:
        if how == "merged":
            with progress.task(f"merging {table.name}", files.rows) as step:
                rows = _merge(files, table, store, record, step)
            verifier.check()
            store.adopt(table, record, rows)
        else:
            chunks = _chunks(files, table, store, duplicates, progress)
            with progress.task(f"loading {table.name}", files.rows) as step, closing(chunks):
                done = store.bulk_load(table, verifier.checked_at_end(chunks), record, step)
            rows = done.rows
    return LoadReport(table.name, how, rows, duplicates.count, time.monotonic() - began)


def map_table(version: ModelVersion, table: EmbeddingTable, store: RocksDbTier) -> bool:
    """Serve ``table`` from its mapped file if ``store`` can; return whether it is served so.

    Raises ModelError as `load_tables`, and TierError."""
    if not isinstance(store, MappedTier) or not store.maps or store.layout != "native":
        return False
    found = _mapped_files(version, table)
    return found is not None and store.map(table, *found)


def open_mapped_tables(
    version: ModelVersion, tables: Iterable[EmbeddingTable], store: MappedFileTier
) -> None:
    """Serve ``tables`` of ``version`` from their mapped files. Raises ModelError if one has none."""
    for table in tables:
        check_disjoint_tables(version.tables[table.name], table.key_bits)
        found = _mapped_files(version, table)
        if found is None:
            raise ModelError(
                f"table {table.id} has no usable mapped file, and there is no store to load its rows into: "
                "import the version again, or set tiers.rocksdb.enabled to true"
            )
        path, record, delta = found
        try:
            store.open(table, path, record.version, delta)
        except OSError as error:
            raise ModelError(f"table {table.id}: cannot serve {path}: {error}") from error


def _mapped_files(
    version: ModelVersion, table: EmbeddingTable
) -> tuple[Path, LoadRecord, Path | None] | None:
    """The table's mapped file, the record of its rows, and the delta if there is one.

    None, with a warning, if a file is unusable."""
    files = version.tables[table.name]
    paths = [pair.folder / MAPPED_FILE for pair in files.pairs]
    if not all(path.exists() for path in paths):
        return None
    rows = 0
    for pair, path in zip(files.pairs, paths, strict=True):
        try:
            header = read_header(path)
        except ModelError as error:
            log.warning("table %s: its mapped file is not used: %s", table.id, error)
            return None
        if not header.is_of(pair.digest, table):
            log.warning("table %s: %s is not used: it was made from other files", table.id, path)
            return None
        rows += header.rows
    record = _record(version, table, files)
    if len(paths) == 1:
        return paths[0], replace(record, rows=rows), None
    try:
        digest, masked = read_masked_positions(
            paths[1].with_name(MASKED_POSITIONS_FILE), read_header(paths[0])
        )
    except ModelError as error:
        log.warning("table %s: its mapped files are not used: %s", table.id, error)
        return None
    if digest != files.digest:
        log.warning("table %s: %s is not used: it was made from other files", table.id, paths[1])
        return None
    return paths[0], replace(record, rows=rows - len(masked)), paths[1]


def _record(version: ModelVersion, table: EmbeddingTable, files: TableFiles) -> LoadRecord:
    stamp = " ".join(map(str, files.stamps))
    written = row_version(version, files)
    return LoadRecord(
        files.digest, files.rows, written, table.dim, table.row_format.name, stamp=stamp
    )


def _decide(files: TableFiles, table: EmbeddingTable, store: RocksDbTier, *, rebuild: bool) -> How:
    if rebuild:
        return "loaded"
    record = store.loaded(table)
    if record is None:
        # A table may hold streamed rows although it was never loaded: they are kept too.
        return "merged" if store.streamed(table) and store.layout == "native" else "loaded"
    like_table = table.dim, table.row_format.name
    if (record.digest, record.dim, record.dtype) == (files.digest, *like_table):
        if isinstance(store, MappedTier) and store.is_mapped(table):
            return "merged" if store.streamed(table) else "loaded"
        return "reused"
    if not store.streamed(table):
        return "loaded"
    if files.entry is None and (record.dim, record.dtype) == like_table:
        return "merged" if store.layout == "native" else "loaded"
    changed = f"the files in {files.folder} are not the ones loaded into {store.path}"
    if record.dtype != table.row_format.name:
        changed = f"{store.path} holds its rows as {record.dtype}, not as {table.row_format.name}"
    raise ModelError(
        f"table {table.id}: {changed}, and rows were streamed into that table since, which a new load would "
        "lose. Publish the files as a new version; or, to lose those rows, remove the database: everything "
        "is loaded again"
    )


def _chunks(
    files: TableFiles,
    table: EmbeddingTable,
    store: RocksDbTier,
    duplicates: DuplicateCounter,
    progress: Progress,
) -> Generator[Chunk, None, None]:
    scratch = store.scratch / f"{time.monotonic_ns()}"
    spreading = partial(progress.task, f"sorting {files.name}", files.rows)
    chunks = sorted_chunks(files, partial(store.codes, table), duplicates, scratch, spreading)
    rows = ((codes, stored_rows(table, vectors)) for codes, vectors in chunks)
    return prefetch(rows) if files.bytes >= _THREAD_BYTES else rows


def stored_rows(table: EmbeddingTable, vectors: VectorArray) -> RowArray:
    """Return the rows ``(n, row_width)`` of a table's files. Raises ModelError if a vector does not fit."""
    try:
        return to_rows(table, vectors)
    except NotStorable as error:
        raise ModelError(
            f"table '{table.name}': {error}; correct the files, or take another format (rows: float32; in a "
            "ps.json fp8_quant: false)"
        ) from error


def _merge(
    files: TableFiles,
    table: EmbeddingTable,
    store: RocksDbTier,
    record: LoadRecord,
    step: Callable[[int], None],
) -> int:
    """Insert the files' rows by the version rule, so that newer rows in the store stay.

    Entries of an overlay all stay: they were written over rows of the files' version."""
    overlay = store if isinstance(store, MappedTier) and store.unmap(table) else None
    for keys, vectors in files.blocks(block_rows(files.dim)):
        if overlay is not None:
            at = np.flatnonzero(~overlay.has_entries(table, keys))
            keys, vectors = keys[at], vectors[at]
        versions = np.full(len(keys), record.version, np.uint64)
        store.insert(table, keys, stored_rows(table, vectors), versions)
        step(len(keys))
    return files.rows


def row_version(version: ModelVersion, files: TableFiles) -> int:
    """Return the version of imported rows: the time of the table's origin, else the files'."""
    if version.manifest is not None:
        created = version.manifest.origin(files.name).created
        return make_version(int(created.timestamp() * 1000))
    return make_version(max(stamp.mtime_ns for stamp in files.stamps) // 1_000_000)


class _ChecksumVerifier:
    """Compares a table's files with the manifest's checksums, in parallel to the load.

    At the end of the load it also checks that the files have not changed since they were opened."""

    def __init__(self, files: TableFiles) -> None:
        self._files = files

    def __enter__(self) -> _ChecksumVerifier:
        self._pool = ThreadPoolExecutor(1, "hps-verify")
        self._sums = [
            (path, entry.checksum, self._pool.submit(checksum_file, path))
            for path, entry in self._files.entries()
        ]
        return self

    def check(self) -> None:
        """Wait for the checksums. Raises ModelError if the files differ or have changed."""
        self._files.check_unchanged()
        for path, expected, future in self._sums:
            compare_checksum(path, expected, future.result())

    def checked_at_end(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks, then `check`: it raises before the store records the load as complete."""
        yield from chunks
        self.check()

    def __exit__(self, *_exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)
