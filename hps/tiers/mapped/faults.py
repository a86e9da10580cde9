"""Faults of mapped files: bad blocks, unreadable pages. Their rows are hidden, each file is reported once."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hps.errors import ModelError
from hps.tiers.mapped.overlaid_table import OverlaidTable
from hps.tiers.rocksdb.damage import DamagedFiles
from hps.types import EmbeddingTable

log = logging.getLogger(__name__)


class MappedFaults:
    """Records faults in ``damage`` and logs them with the ``remedy``, a sentence without its end.

    ``lock``: what other writers of a table's bits hold. As thread-safe as that."""

    def __init__(
        self,
        damage: DamagedFiles,
        remedy: str,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._damage, self._remedy = damage, remedy
        self._lock = nullcontext() if lock is None else lock

    def set_unreadable(
        self, table: EmbeddingTable, mapped: OverlaidTable, reason: Exception, block: int = 0
    ) -> None:
        """Hide all rows of a table of which a page, near ``block``, could not be read."""
        mapped.unreadable = str(reason)
        self._report(table, mapped.file_of_block(block), str(reason))

    def check_blocks(
        self, table: EmbeddingTable, mapped: OverlaidTable, first: int = 0, n: int | None = None
    ) -> int:
        """Verify ``n`` blocks of a table's files from ``first`` on; return the number of bad ones.

        Their rows are hidden from then on: they are answered by the default, and marked degraded."""
        try:
            damaged = mapped.damaged_blocks(first, n)
        except ModelError as error:
            self.set_unreadable(table, mapped, error, first)
            return 1
        if damaged:
            with self._lock:
                for block in damaged:
                    mapped.mark_damaged(block)
            reason = f"wrong checksum in block {damaged[0]}"
            self._report(table, mapped.file_of_block(damaged[0]), reason)
        return len(damaged)

    def _report(self, table: EmbeddingTable, path: Path, reason: str) -> None:
        if not self._damage.add(path, table.id):
            return
        log.error(
            "mapped file %s of table %s is damaged: %s. Rows in the damaged part are answered by the "
            "default, and marked degraded. %s",
            path,
            table.id,
            reason,
            self._remedy,
        )
        self._damage.changed()
