"""AttachedCache: another process's CPU cache, read in shared memory."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock

from hps.errors import ModelError, TierError
from hps.native import CacheTable, LayeredTable
from hps.tiers.base import Ask, Bags, FetchContext, Part
from hps.tiers.cpu.cache_reads import CacheReads
from hps.tiers.cpu.segments import (
    SHARED_MEMORY,
    CacheReaderLock,
    Entry,
    attach,
    attach_mapped,
    catalog,
)
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

log = logging.getLogger(__name__)
# Interval of the polls that notice a table that the owner made, replaced or dropped.
POLL_S = 0.2


class AttachedCache(CacheReads):
    """Reads ``tables`` from the shared cache ``name`` that another process owns.

    Reads take no locks and mark rows as used; the owner may be killed at any moment. If the table or
    the owner is missing, reads miss, and both are polled for again. ``promote`` asks the owner to load
    keys into the cache; it must not block. Only the owner changes rows: `update`, `delete` and `evict`
    raise TierError. Thread-safe."""

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
        self._uses = Counter(tables)
        self._known = {table.id: table for table in self._uses}
        self._path = folder / f"hps.{name}"
        self._seen: tuple[int, int] | None = None
        self._entries: dict[str, Entry] = {}
        self._registered: CacheReaderLock | None = None
        self._poll_at = 0.0
        self._lock = Lock()
        self._poll()

    def add_tables(self, tables: Iterable[EmbeddingTable]) -> None:
        """Read ``tables`` too, until they are removed as often as they were added.

        A table replaces another one with the same ID, which then misses."""
        with self._lock:
            added = list(tables)
            self._uses.update(added)
            self._known = self._known | {table.id: table for table in added}
            self._seen = None
            self._poll()

    def remove_tables(self, tables: Iterable[EmbeddingTable]) -> None:
        """Stop reading ``tables`` that are not used any more, and free their memory."""
        with self._lock:
            self._uses.subtract(tables)
            removed = {table for table, uses in self._uses.items() if uses <= 0}
            for table in removed:
                del self._uses[table]
            self._known = {name: t for name, t in self._known.items() if t not in removed}
            self._tables = {t: held for t, held in self._tables.items() if t not in removed}
            self._caches = {t: held for t, held in self._caches.items() if t not in removed}
            self._use_counts = {t: n for t, n in self._use_counts.items() if t not in removed}

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        self._poll_if_due()
        super().fetch(parts, ctx)

    def gather(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
        self._poll_if_due()
        return super().gather(asks, bags)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        """Ask the owner to load the keys from its stores; ``vectors`` and ``versions`` are not sent."""
        self.promote(table, keys)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        raise self._owner_only(table)

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        raise self._owner_only(table)

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        raise self._owner_only(table)

    def close(self) -> None:
        with self._lock:
            self._poll_at = math.inf  # a late call must not attach again
            self._tables, self._caches, self._use_counts = {}, {}, {}
            self._unregister()

    def _unregister(self) -> None:
        if self._registered:
            self._registered.close()
            self._registered = None

    def _owner_only(self, table: EmbeddingTable) -> TierError:
        return TierError("cpu", f"only the owner of {self._path} may change rows of {table.id}")

    def _poll_if_due(self) -> None:
        if time.monotonic() < self._poll_at or not self._lock.acquire(blocking=False):
            return
        try:
            self._poll()
        finally:
            self._lock.release()

    def _poll(self) -> None:
        """Attach to the current tables if the catalog has changed."""
        self._poll_at = time.monotonic() + POLL_S
        try:
            stat = os.stat(self._path / "tables.json")
            seen = stat.st_ino, stat.st_mtime_ns
        except OSError:
            seen = None
        if seen == self._seen:
            return
        shown = catalog(self._path) if seen else {}
        caches: dict[EmbeddingTable, CacheTable] = {}
        tables: dict[EmbeddingTable, CacheTable | LayeredTable] = {}
        for name, entry in shown.items():
            table = self._known.get(name)
            if table is None:
                continue
            held = self._attach(table, entry)
            if held is not None:
                caches[table], tables[table] = held, self._with_mapped(table, entry, held)
        self._entries, self._seen = shown, seen
        self._caches, self._tables = caches, tables
        if seen:
            self._unregister()  # the owner may be a new one, with a new folder
            with contextlib.suppress(OSError):
                self._registered = CacheReaderLock(self._path)

    def _attach(self, table: EmbeddingTable, entry: Entry) -> CacheTable | None:
        """The memory of a table; None if it cannot be read."""
        before = self._entries.get(table.id, {})
        if before.get("file") == entry["file"] and table in self._caches:
            return self._caches[table]
        try:
            held = attach(self._path, table, entry)
        except FileNotFoundError:
            return None  # replaced since the catalog was read: the next poll attaches the new one
        except (OSError, ValueError) as error:
            log.warning("shared cache of table %s unusable: %s", table.id, error)
            return None
        held.threads = self._threads
        return held

    def _with_mapped(
        self, table: EmbeddingTable, entry: Entry, held: CacheTable
    ) -> CacheTable | LayeredTable:
        """The table's mapped file and then ``held``, if the owner reads it so."""
        mapped = entry.get("mapped")
        if mapped is None:
            self._use_counts.pop(table, None)
            return held
        if self._entries.get(table.id) == entry and table in self._tables:
            return self._tables[table]
        try:
            file, uses = attach_mapped(self._path, table, mapped)
        except FileNotFoundError:
            return held
        except (OSError, ValueError, ModelError) as error:
            log.warning(
                "mapped file of table %s unusable, so its rows are read from the node: %s",
                table.id,
                error,
            )
            return held
        self._use_counts[table] = uses
        return self._layered(file.table, held)
