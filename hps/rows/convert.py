"""Conversion of tables from HPS's layout to the native one, into another database or other Redis hashes.

The rows get the version of the model's files. So updates that are streamed later are not rejected as older,
and earlier ones may be streamed again. The source is only read.

A row is written if the target misses it, or holds another row or a tombstone that is not newer. So a
killed conversion can be continued, a repeated one copies what HPS has written since, and neither
overwrites what the new node has streamed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hps.rows.base import RowSource, TableRows
from hps.rows.compare import same_bits
from hps.rows.files import FileRows
from hps.rows.tiers import RedisRows, RocksDbRows
from hps.types import EmbeddingTable, Progress


@dataclass(slots=True)
class ConversionReport:
    """Result for one table: ``read`` rows of the source, ``written`` ones in the target."""

    table: str
    read: int = 0
    written: int = 0


def convert(
    source: RowSource,
    source_table: EmbeddingTable,
    target: RocksDbRows | RedisRows,
    table: EmbeddingTable,
    files: FileRows,
    progress: Progress,
) -> ConversionReport:
    """Copy the rows of ``source_table`` to ``table`` of ``target``, of the same dim and dtype."""
    report = ConversionReport(table.name)
    version = files.row_version(table)
    with progress.task(f"converting {table.name}", source.entries(source_table)) as step:
        for rows in source.scan(source_table):
            some = rows.at(_rows_to_write(rows, target, table, version))
            if len(some.keys):
                versions = np.full(len(some.keys), version, np.uint64)
                vectors = np.ascontiguousarray(some.vectors, table.row_dtype)
                target.tier.insert(table, np.ascontiguousarray(some.keys), vectors, versions)
            report.read += len(rows.keys)
            report.written += len(some.keys)
            step(len(rows.keys))
    return report


def _rows_to_write(
    rows: TableRows, target: RocksDbRows | RedisRows, table: EmbeddingTable, version: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return a mask of the ``rows`` that must be written."""
    held = target.get(table, rows.keys)
    equal = held.found.copy()
    equal[equal] = same_bits(
        held.vectors[equal], np.ascontiguousarray(rows.vectors[equal], table.row_dtype)
    )
    known = held.found | held.deleted
    to_write: np.ndarray[tuple[int], np.dtype[np.bool_]] = ~equal & ~(
        known & (held.versions > np.uint64(version))
    )
    return to_write
