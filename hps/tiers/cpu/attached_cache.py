"""AttachedCache: another process's CPU cache, read where it lies."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock

from hps.errors import TierError
from hps.tiers.bags import Ask, Bags
from hps.tiers.base import FetchContext, Part
from hps.tiers.cpu.cache_reads import CacheReads
from hps.tiers.cpu.segments import SHARED_MEMORY, CacheReaderLock, attach, catalog
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

log = logging.getLogger(__name__)
# How long a table that the owner made, replaced or dropped may go unnoticed.
LOOK_S = 0.2


class AttachedCache(CacheReads):
    """The tables of the shared cache ``name``, of another process, as far as they are among ``tables``.

    Reads take no locks and mark what was used; the owner may be killed at any moment. A table, or an
    owner, that is not there misses, and is looked for again. ``promote`` must not block: it has the
    owner put the rows of keys into the cache. Only the owner changes rows: `update`, `delete` and
    `evict` raise TierError. Any number of threads may call.
    """

    def __init__(
        self,
        name: str,
        tables: Iterable[EmbeddingTable],
        promote: Callable[[EmbeddingTable, KeyArray], None],
        *,
        folder: Path = SHARED_MEMORY,
        threads: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(threads=threads, clock=clock)
        self.promote = promote
        self._known = {table.id: table for table in tables}
        self._path = folder / f"hps.{name}"
        self._seen: tuple[int, int] | None = None
        self._files: dict[str, str] = {}
        self._registered: CacheReaderLock | None = None
        self._look_at = 0.0
        self._lock = Lock()
        self._look()

    def know(self, tables: Iterable[EmbeddingTable]) -> None:
        """Read ``tables`` too. One takes the place of another with its id, which misses from then on."""
        with self._lock:
            self._known = self._known | {table.id: table for table in tables}
            self._seen = None
            self._look()

    def forget(self, tables: Iterable[EmbeddingTable]) -> None:
        """Read ``tables`` no more, and let go of their memory."""
        gone = set(tables)
        with self._lock:
            self._known = {name: t for name, t in self._known.items() if t not in gone}
            self._tables = {t: held for t, held in self._tables.items() if t not in gone}

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        self._look_now_and_then()
        super().fetch(parts, ctx)

    def gather(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
        self._look_now_and_then()
        return super().gather(asks, bags)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        """Has the owner do it, with the rows that the stores hold then."""
        self.promote(table, keys)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        raise self._refused(table)

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        raise self._refused(table)

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        raise self._refused(table)

    def close(self) -> None:
        with self._lock:
            self._look_at = math.inf  # a late call must not attach again
            self._tables = {}
            self._unregister()

    def _unregister(self) -> None:
        if self._registered:
            self._registered.close()
            self._registered = None

    def _refused(self, table: EmbeddingTable) -> TierError:
        return TierError(
            "cpu", f"rows of {table.id} in {self._path} are changed by its owner alone"
        )

    def _look_now_and_then(self) -> None:
        if time.monotonic() < self._look_at or not self._lock.acquire(blocking=False):
            return
        try:
            self._look()
        finally:
            self._lock.release()

    def _look(self) -> None:
        """Attach to what is there now, if that has changed."""
        self._look_at = time.monotonic() + LOOK_S
        try:
            found = os.stat(self._path / "tables.json")
            seen = found.st_ino, found.st_mtime_ns
        except OSError:
            seen = None
        if seen == self._seen:
            return
        shown = catalog(self._path) if seen else {}
        held = {}
        for name, entry in shown.items():
            table = self._known.get(name)
            if table is None:
                continue
            if self._files.get(name) == entry["file"] and table in self._tables:
                held[table] = self._tables[table]
                continue
            try:
                held[table] = attach(self._path, table, entry)
                held[table].threads = self._threads
            except FileNotFoundError:
                pass  # replaced meanwhile: it will be seen next time
            except (OSError, ValueError) as error:
                log.warning("the shared cache of table %s can't be used: %s", name, error)
        self._files = {name: entry["file"] for name, entry in shown.items()}
        self._tables, self._seen = held, seen
        if seen:
            self._unregister()  # the owner may be another one, with a folder of its own
            with contextlib.suppress(OSError):
                self._registered = CacheReaderLock(self._path)
