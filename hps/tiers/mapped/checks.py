"""Checksums of mapped files, verified in the background while their tables are served."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress

from hps.errors import TierError
from hps.native.mapped_format import BLOCK_BYTES
from hps.threads import paced, rest
from hps.tiers.mapped.file_tier import MappedFileTier
from hps.tiers.mapped.tier import MappedTier
from hps.tiers.mapped.verified_files import FileStamp, VerifiedFiles
from hps.types import EmbeddingTable

log = logging.getLogger(__name__)
_BLOCKS = 8
_SHARE = 0.02


class MappedChecks:
    """Verifies the mapped files of each of ``tables`` once, on a thread, at most ``bytes_per_s``.

    The thread works a fiftieth of the time, as requests need the processors and the interpreter lock.
    A file that is served again later, or is among the ``verified`` ones, is not verified again, unless it was
    replaced. ``tables`` is read again every ``every_s`` seconds: more may be served later. Close it before
    the tier."""

    def __init__(
        self,
        tier: MappedTier | MappedFileTier,
        tables: Callable[[], Iterable[EmbeddingTable]],
        bytes_per_s: int,
        *,
        every_s: float = 5.0,
        verified: VerifiedFiles | None = None,
    ) -> None:
        self._tier, self._tables, self._bytes_per_s = tier, tables, bytes_per_s
        self._every_s = every_s
        self._verified = VerifiedFiles() if verified is None else verified
        self._closed = threading.Event()
        self._done: dict[str, Hashable] = {}  # by table: the stamps of the files
        self._thread = threading.Thread(target=self._run, name="hps-mapped-checks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            tables = {table.id: table for table in self._tables()}
            for name, table in tables.items():
                stamp = self._stamp(table)
                if self._done.get(name) != stamp and not self._closed.is_set():
                    self._done[name] = stamp
                    with paced(_SHARE):
                        self._verify(table)

    def _stamp(self, table: EmbeddingTable) -> Hashable:
        """What changes when a table's files are replaced; None if it has no files now."""
        with suppress(OSError, TierError):
            mapped = self._tier.mapped(table)
            if mapped is not None:
                return tuple(FileStamp.of(file) for file in mapped.files)
        return None

    def _verify(self, table: EmbeddingTable) -> None:
        try:
            mapped = self._tier.mapped(table)
            first = 0
            for file in () if mapped is None else mapped.files:
                stamp, blocks = FileStamp.of(file), file.header.blocks
                if stamp not in self._verified and self._verify_blocks(table, first, blocks):
                    self._verified.add(stamp)
                first += blocks
        except (OSError, TierError) as error:
            log.warning("table %s: its mapped file was not verified: %s", table.id, error)

    def _verify_blocks(self, table: EmbeddingTable, first: int, blocks: int) -> bool:
        """Verify ``blocks`` of a table from ``first`` on; return whether all were, and are not damaged."""
        began, damaged = time.monotonic(), 0
        for done in range(0, blocks, _BLOCKS):
            n = min(_BLOCKS, blocks - done)
            damaged += self._tier.check_blocks(table, first + done, n)
            rest()
            allowed = began + (done + n) * BLOCK_BYTES / self._bytes_per_s
            if self._closed.wait(max(0.0, allowed - time.monotonic())):
                return False
        if not damaged:
            seconds = time.monotonic() - began
            log.debug("table %s: mapped file verified in %.1f s", table.id, seconds)
        return not damaged
