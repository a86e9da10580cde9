"""Preload: writes a share of each table's rows into Redis, or all of them if it is the only store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from hps.models.check import check_disjoint_tables
from hps.models.external_sort import block_rows
from hps.models.loader import row_version, stored_rows
from hps.models.manifest import checksum_file, compare_checksum
from hps.models.repository import ModelVersion
from hps.models.tables import TableFiles
from hps.types import EmbeddingTable, KeyArray, Progress, VectorArray

if TYPE_CHECKING:
    from hps.tiers.redis import RedisTier


def preload_tables(
    version: ModelVersion,
    tables: Mapping[str, EmbeddingTable],
    redis: RedisTier,
    share: float,
    progress: Progress,
) -> int:
    """Put a ``share`` of every table of ``version`` into ``redis``; return the number of rows written.

    Newer rows in Redis stay (in the ``hps`` layout no row is newer than another); rows that an earlier
    call for the same files wrote are skipped. Raises ModelError, before a row is written, for files
    that do not match their manifest. Raises TierError when Redis rejects a table or is unavailable;
    another call continues from there."""
    from hps.tiers.redis import RedisLoadSource  # not before a Redis is used: redis-py takes time

    rows = 0
    for name, table in tables.items():
        files = version.tables[name]
        with progress.task(f"loading {name} into {redis.info.name}", files.rows) as step:
            source = RedisLoadSource(
                _PreloadChunks(files, table),
                row_version(version, files),
                share,
                files.digest,
                partial(_verify, files, table),
            )
            rows += redis.preload(table, source, step)
    return rows


def _verify(files: TableFiles, table: EmbeddingTable) -> None:
    check_disjoint_tables(files, table.key_bits)
    for path, entry in files.entries():
        compare_checksum(path, entry.checksum, checksum_file(path))


class _PreloadChunks:
    """The rows in the order of the files, so that the last row of a key wins. Can be iterated again."""

    def __init__(self, files: TableFiles, table: EmbeddingTable) -> None:
        self._files = files
        self._table = table

    def __iter__(self) -> Iterator[tuple[KeyArray, VectorArray]]:
        for keys, vectors in self._files.blocks(block_rows(self._files.dim)):
            yield self._table.narrow(keys), stored_rows(self._table, vectors)
        self._files.check_unchanged()
