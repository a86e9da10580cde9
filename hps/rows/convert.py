"""HPS's layout -> the native one: every row of a store, into another database or other Redis hashes.

The rows get the version of the model's files: nothing that is streamed from then on is refused as older,
and what was streamed before may be streamed again. The source is only read.

What a row needs is decided by what is there already: one that is missing, or is there with other bits and no
newer version, is written. So a conversion that was killed goes on, one that is repeated brings over what
HPS has written in the meantime, and neither takes anything back that the new node has streamed.
"""

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
    """Of one table: rows ``read`` from the source, and how many of them were ``written`` because they
    were not there yet."""

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
    """Bring the rows of ``source_table`` over to ``table`` of ``target``; both have one shape."""
    report = ConversionReport(table.name)
    version = files.row_version(table)
    with progress.task(f"converting {table.name}", source.entries(source_table)) as step:
        for rows in source.scan(source_table):
            some = rows.at(_lacking(rows, target, table, version))
            if len(some.keys):
                versions = np.full(len(some.keys), version, np.uint64)
                vectors = np.ascontiguousarray(some.vectors, table.dtype)
                target.tier.insert(table, np.ascontiguousarray(some.keys), vectors, versions)
            report.read += len(rows.keys)
            report.written += len(some.keys)
            step(len(rows.keys))
    return report


def _lacking(
    rows: TableRows, target: RocksDbRows | RedisRows, table: EmbeddingTable, version: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of ``rows`` are to be written."""
    held = target.get(table, rows.keys)
    equal = held.found.copy()
    equal[equal] = same_bits(
        held.vectors[equal], np.ascontiguousarray(rows.vectors[equal], table.dtype)
    )
    known = held.found | held.deleted
    lacking: np.ndarray[tuple[int], np.dtype[np.bool_]] = ~equal & ~(
        known & (held.versions > np.uint64(version))
    )
    return lacking
