"""AppliedFiles: replay of update files that were applied before a version was served.

Files in ``applied/`` are kept, so that a version that is loaded later gets their rows, too. Which ones it
misses follows from times: a file that was last written before the version was made contains no newer rows,
and each table's store records how far the table has all files, as a stream position in milliseconds. Replays
are harmless: the newest row wins. In HPS's layout, which keeps no versions, files are replayed in the order
in which they were applied."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from hps.config.update_settings import DirectorySettings
from hps.errors import TierError, Unavailable
from hps.observability.meters import UpdateMeter
from hps.observability.metrics import Metrics
from hps.periodic import PeriodicThread
from hps.tiers.positions import StreamPosition, no_changes
from hps.types import EmbeddingTable
from hps.updates.cache_writer import CacheWriter
from hps.updates.files.directory import APPLIED, BLOCK, DirectorySource, is_update_file
from hps.updates.files.update_files import UpdateFile
from hps.updates.ingestor import Ingestor
from hps.updates.source import DeadLetter
from hps.updates.stream_positions import FedStore, StoreStreamPositions
from hps.updates.topics import by_name

log = logging.getLogger(__name__)
_CHECK_EVERY_S = 0.2
POSITION = "updates.directory"
"""In place of a topic's name: before this time, in Unix milliseconds, a table has the applied files."""


class AppliedFiles:
    """The applied files of one folder, and the ``stores`` and ``caches`` that get their rows.

    Any thread may call it; files are applied by one at a time."""

    def __init__(
        self, settings: DirectorySettings, stores: Sequence[FedStore], caches: CacheWriter
    ) -> None:
        self._settings = settings
        self._stores, self._caches = stores, caches
        self._applying = threading.Lock()

    def replay(
        self,
        made_ms: Mapping[EmbeddingTable, int],
        closed: threading.Event | None = None,
        wait_s: float = math.inf,
    ) -> None:
        """Apply the files that the tables of ``made_ms`` miss; it has when their files were made (Unix ms).

        Raises Unavailable once ``closed`` is set, or a store has failed for ``wait_s``. Without effect if
        applied files are not kept."""
        wanted = {t: ms for t, ms in made_ms.items() if self._settings.takes(t.model)}
        if not wanted or not self._settings.keep_applied:
            return
        missing, latest_ms = self._missing(wanted)
        if missing:
            with self._applying:
                missing, latest_ms = self._missing(wanted)
                self._apply(list(wanted), missing, closed or threading.Event(), wait_s)
        self.record(wanted, latest_ms)

    def _missing(self, wanted: Mapping[EmbeddingTable, int]) -> tuple[list[Path], int]:
        """The files that the tables miss, and when the last of all was moved."""
        found = [*self._files()]
        recorded = {table: self._recorded(table) for table in wanted}
        missing = [
            path
            for path, applied_ms, written_ms in found
            if any(written_ms >= wanted[t] and applied_ms >= recorded[t] for t in wanted)
        ]
        return missing, max((applied_ms for _, applied_ms, _ in found), default=0)

    def record(self, tables: Iterable[EmbeddingTable], applied_ms: int) -> None:
        """Record that ``tables`` have the files moved up to this time; later replays begin after it."""
        for table in tables:
            for each in self._stores:
                with suppress(TierError):  # then more is replayed
                    position = StreamPosition(POSITION, 0, applied_ms + 1)
                    each.store.apply(table, no_changes(table), [position])

    def _recorded(self, table: EmbeddingTable) -> int:
        """The time before which all stores have the table's files; 0 if one does not know."""
        found = []
        for each in self._stores:
            try:
                found.append(each.store.applied(table, POSITION, 0) or 0)
            except TierError:
                return 0
        return min(found, default=0)

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        """Yield the applied files in the order in which they were applied.

        With each, in Unix milliseconds: when it was moved here, and when it was written."""
        folder, found = self._settings.path / APPLIED, []
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for each in entries:
                if is_update_file(each):
                    stat = each.stat()
                    found.append((stat.st_ctime_ns, each.name, stat.st_mtime_ns))
        for moved_ns, name, written_ns in sorted(found):
            yield folder / name, moved_ns // 1_000_000, written_ns // 1_000_000

    def _apply(
        self,
        chosen: Sequence[EmbeddingTable],
        paths: Sequence[Path],
        closed: threading.Event,
        wait_s: float,
    ) -> None:
        tables = by_name(chosen)
        positions = StoreStreamPositions(self._stores, lambda _topic: chosen)
        # Its rows were counted, and its faults reported, when the file was applied.
        meter, letters = UpdateMeter(Metrics()), _NoLetters()
        source = DirectorySource(self._settings, tables)
        ingestor = Ingestor(source, tables, positions, self._caches, letters, meter)
        progress_at, rows = time.monotonic(), 0

        def check() -> None:
            if closed.is_set() or time.monotonic() - progress_at > wait_s:
                ingestor.close()  # which ends its wait for a store

        with ExitStack() as stack:
            thread = PeriodicThread(check, _CHECK_EVERY_S, "hps-replay")
            stack.callback(thread.close)
            thread.start()
            for path in paths:
                file = UpdateFile(path, tables, BLOCK, self._settings.max_ahead_s)
                for batch in file.batches():
                    if closed.is_set():
                        raise Unavailable("the node is being closed")
                    ingestor.apply(batch)
                    progress_at, rows = time.monotonic(), rows + batch.rows
        log.info(
            "model %s: %d rows of %d applied files were replayed", chosen[0].model, rows, len(paths)
        )


class _NoLetters:
    """Keeps nothing: dead letters of replayed files are in ``rejected/`` already, or of another table."""

    def keep(self, letters: Sequence[DeadLetter]) -> Sequence[DeadLetter]:
        del letters
        return ()

    def report(self) -> None: ...
