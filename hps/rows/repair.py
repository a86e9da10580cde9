"""Repair of damaged RocksDB tables from their readable entries and the model's files."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hps.models.external_sort import block_rows
from hps.models.loader import row_version
from hps.models.repository import ModelVersion
from hps.tiers.mapped import MappedTier
from hps.tiers.rocksdb import RocksDbTier, SalvagedTable, UnreadableRange
from hps.tiers.stored_rows import to_rows
from hps.types import EmbeddingTable, KeyArray, Progress


def repair_table(
    tier: RocksDbTier, table: EmbeddingTable, version: ModelVersion | None, progress: Progress
) -> SalvagedTable | None:
    """Repair a table of ``tier``, which was opened for repair; return None if it is not damaged.

    ``version``: its files replace unreadable rows; if None, unreadable rows are lost. Those of a mapped
    table are answered by its file then. Afterwards the
    table has every readable row, and the files' rows in place of unreadable ones. Its stream positions
    are removed, so streams are read again. Raises TierError or ModelError; another call continues an
    interrupted repair."""
    repair = tier.repair(table)
    with progress.task(f"reading {table.name}", 1, "table") as step:
        if not (repair.begun or tier.gaps(table)):
            return None
        saved = repair.save(_keys(table, version))
        step(1)
    repair.put_back()
    mapped = isinstance(tier, MappedTier) and tier.is_mapped(table)
    if version is not None and saved.lost and not mapped:
        files, lost = version.tables[table.name], repair.lost
        stamp = row_version(version, files)
        with progress.task(f"loading {table.name}", files.rows) as step:
            for keys, vectors in files.blocks(block_rows(files.dim)):
                mine = np.isin(tier.codes(table, keys), lost)
                rows = to_rows(table, vectors[mine])
                tier.insert(table, keys[mine], rows, np.full(len(rows), stamp, np.uint64))
                step(len(keys))
    repair.finish(saved)
    return saved


def _keys(table: EmbeddingTable, version: ModelVersion | None) -> Iterator[KeyArray]:
    if version is not None:
        files = version.tables[table.name]
        rows = block_rows(1)
        for start in range(0, files.rows, rows):
            yield table.narrow(files.keys(start, start + rows))


def describe_gaps(tier: RocksDbTier, table: EmbeddingTable, gaps: list[UnreadableRange]) -> str:
    """Return a text that names the keys that cannot be read."""
    parts = [f"{first} to {last}" for first, last in (tier.keys_of(table, gap) for gap in gaps[:3])]
    more = "" if len(gaps) <= 3 else f" and {len(gaps) - 3} more"
    files = ", ".join(sorted(f for f, t in tier.damage.tables().items() if t == table.id))
    return f"{len(gaps)} parts of {files} cannot be read: keys {', '.join(parts)}{more}"
