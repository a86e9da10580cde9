"""Compaction: fold what was written over a version's tables into a new version.

A table without writes is shared. Of one with a mapped file, the overlay becomes the delta of the new version:
its rows replace those of the base, its tombstones remove them, and nothing else is read. Any other table is
written whole, from a scan. The manifest has the stream positions that the tables contain, so that streams
continue from there. Rows keep the base's version (`TableOrigin.created`): no update behind the positions is
taken for an old one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hps.config.model_schema import TableSpec
from hps.errors import ModelError
from hps.models.delta_files import DeltaFiles
from hps.models.delta_writer import (
    MAX_SHARE,
    Chunk,
    DeltaBase,
    masked_rows,
    open_delta_base,
    write_delta,
)
from hps.models.derived_version import next_version_folder
from hps.models.external_sort import block_rows
from hps.models.manifest import (
    DENSE_FILE,
    TABLES_FOLDER,
    Manifest,
    Offsets,
    TableEntry,
    TableOrigin,
    manifest_time,
)
from hps.models.repository import ModelVersion
from hps.models.table_sharing import BaseVersion, link_file, link_pair, link_table
from hps.models.version_writer import write_mapped_files, write_table
from hps.tiers.mapped import MappedTier
from hps.tiers.rocksdb.layout import family_name
from hps.tiers.stored_rows import to_vectors
from hps.types import EmbeddingTable, KeyArray, Progress


@dataclass(frozen=True, slots=True)
class CompactedTable:
    """What became of a table: ``how`` is ``shared``, ``delta`` or ``whole``.

    ``rows``: written since, tombstones included. ``watermark``: positions that its rows contain."""

    name: str
    how: str
    rows: int
    entry: TableEntry
    watermark: Offsets = field(default_factory=dict)


def compact_version(
    opened: ModelVersion, store: MappedTier, progress: Progress, *, version: int | None = None
) -> tuple[Path, list[CompactedTable]]:
    """Write a version with the rows of ``opened`` and all that ``store`` has been given since.

    ``store`` may be open in another process; what that writes meanwhile is left to the streams. ``version``:
    by default the next one. Returns the new folder, which appears complete or not at all. Raises ModelError,
    also if nothing was written since, and TierError."""
    if opened.manifest is None:
        raise ModelError(f"{opened.folder} has no manifest.json: import the version first")
    base = BaseVersion(opened.folder, opened.manifest)
    with next_version_folder(opened.folder.parent, version) as (folder, publish):
        (folder / TABLES_FOLDER).mkdir()
        tables = opened.embedding_tables()
        compaction = _Compaction(opened, base, store, folder)
        done = [compaction.table(spec, tables[spec.name], progress) for spec in opened.spec.tables]
        if all(each.how == "shared" for each in done):
            raise ModelError(
                f"{store.path} has no updates of model '{opened.name}' version {opened.version}, so there is "
                "nothing to fold into a new version"
            )
        if opened.dense is not None:
            link_file(opened.dense, folder / DENSE_FILE)
        errors = write_mapped_files(folder, opened.spec, _manifest(base.manifest, 1, done))
        return publish(
            lambda number: _manifest(base.manifest, number, done).with_conversions(errors)
        ), done
    raise AssertionError  # unreachable: the context swallows nothing; for the type checker


def _manifest(base: Manifest, number: int, tables: list[CompactedTable]) -> Manifest:
    entries = {}
    for each in tables:
        origin = base.origin(each.name)
        if each.how != "shared":
            origin = TableOrigin(version=number, created=origin.created, watermark=each.watermark)
        entries[each.name] = each.entry.model_copy(update={"origin": origin})
    return Manifest(
        model=base.model,
        version=number,
        created=manifest_time(),
        tables=entries,
        dense=base.dense,
        watermark=base.watermark,
        metadata={**base.metadata, "compacted": base.version},
    )


@dataclass(frozen=True, slots=True)
class _Compaction:
    """The tables of one compaction, written below ``folder``."""

    opened: ModelVersion
    base: BaseVersion
    store: MappedTier
    folder: Path

    def table(self, spec: TableSpec, table: EmbeddingTable, progress: Progress) -> CompactedTable:
        """Write one table."""
        store, name = self.store, spec.name
        entry = self.base.manifest.tables[name]
        written = np.empty(0, np.int64)
        there = family_name(table, store.layout) in store.families() and store.streamed(table)
        if there and store.is_mapped(table):
            written = store.overlay_keys(table)
            there = len(written) > 0
        if not there:
            link_table(self.base, name, self.folder)
            return CompactedTable(name, "shared", 0, entry)
        if table.ttl_s is not None:
            raise ModelError(
                f"table {table.id} has ttl_s: {table.ttl_s:g}, and folded rows would be as old as those "
                "of its files and expire early: publish the table anew instead, or remove ttl_s"
            )
        watermark = _watermark(self.base.manifest.origin(name).watermark, store, table)
        if store.is_mapped(table) and (delta := self._delta(spec, table, written, progress)):
            return CompactedTable(name, "delta", len(written), delta, watermark)
        with progress.task(f"folding {name}", store.rows(table)) as step:
            target = self.folder / TABLES_FOLDER / name
            whole = write_table(target, spec, _scanned(table, store), step)
        return CompactedTable(name, "whole", len(written), whole, watermark)

    def _delta(
        self, spec: TableSpec, table: EmbeddingTable, written: KeyArray, progress: Progress
    ) -> TableEntry | None:
        """Write the overlay as a delta; None if it would be too large, or the table cannot have one."""
        files = self.opened.tables[spec.name]
        base = open_delta_base(self.base, spec)
        if base is None:
            return None
        old = files.masked_rows() if isinstance(files, DeltaFiles) else np.empty(0, np.int64)
        masked = _masked(base, written, old)
        rows = len(written) + (files.delta.rows if isinstance(files, DeltaFiles) else 0)
        if max(rows, int(np.count_nonzero(masked))) > base.files.rows * MAX_SHARE:
            return None
        target = self.folder / TABLES_FOLDER / spec.name
        with progress.task(f"folding {spec.name}", rows) as step:
            chunks = _counted(self._changes(table, written), step)
            delta = write_delta(target, chunks, base, masked_rows(base, masked))
        link_pair(base.files.folder, target)
        return base.entry.model_copy(update={"delta": delta})

    def _changes(self, table: EmbeddingTable, written: KeyArray) -> Iterator[Chunk]:
        """The rows of the version's delta that were not written since, then the overlay's."""
        files = self.opened.tables[table.name]
        if isinstance(files, DeltaFiles):
            for keys, vectors in files.delta.blocks(block_rows(table.dim)):
                kept = ~np.isin(table.narrow(keys), written)
                yield keys[kept], vectors[kept]
        for rows in self.store.overlay_rows(table):
            yield rows.keys, to_vectors(table, rows.vectors, dtype=np.float32)


def _masked(base: DeltaBase, written: KeyArray, old: np.ndarray) -> np.ndarray:
    """Which records (n,) of the base's mapped file are replaced or removed, as a mask."""
    masked = np.zeros(base.mapped.header.rows, bool)
    for keys in (written, base.files.keys_at(old)):
        at = base.positions(keys)
        masked[at[at >= 0]] = True
    return masked


def _counted(chunks: Iterator[Chunk], step: Callable[[int], None]) -> Iterator[Chunk]:
    for keys, vectors in chunks:
        yield keys, vectors
        step(len(keys))


def _scanned(table: EmbeddingTable, store: MappedTier) -> Iterator[Chunk]:
    for rows in store.scan(table):
        yield rows.keys, to_vectors(table, rows.vectors, dtype=np.float32)


def _watermark(
    base: Mapping[str, Mapping[str, int]], store: MappedTier, table: EmbeddingTable
) -> Offsets:
    """The positions that the table's rows contain: the store's, else those of the version."""
    found = {topic: dict(offsets) for topic, offsets in base.items()}
    for (topic, partition), applied in store.positions(table).items():
        found.setdefault(topic, {})[str(partition)] = applied.offset
    return found
