"""Fill caches before the node is ready, from a table's files or from the stores."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from hps.native import dedup
from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.stored_rows import to_rows
from hps.types import EmbeddingTable, KeyArray, Progress, VectorArray, VersionArray
from hps.updates.cache_writer import CacheWriter

log = logging.getLogger(__name__)

ReadVectors = Callable[[int, int], VectorArray]
"""``vectors(start, stop)`` reads the vectors (stop - start, dim) float32 of the keys at these positions."""
_CHUNK_ROWS = 16_384
_LARGE_CHUNK_BYTES = 1 << 25
"""Bytes of rows per insert into a GPU cache: each insert is copied and waited for, which takes a while."""
_SERVED_CHUNK_BYTES, _SERVED_CHUNK_ROWS = 1 << 23, 1 << 16
"""The same while requests are served, whose copies to the device wait for those of the rows."""
# A store reads 50,000 rows/s and more; after this long, lookups warm the rest.
WARM_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of a table's files: ``keys (n,)``, narrowed; their ``vectors``, and one ``version``."""

    table: EmbeddingTable
    keys: KeyArray
    vectors: ReadVectors
    version: int


class CacheWarmup:
    """Fills the caches of ``writer`` table by table, for ``limit_s`` where limited; reports ``progress``."""

    def __init__(
        self, writer: CacheWriter, progress: Progress, *, limit_s: float = WARM_SECONDS
    ) -> None:
        self._writer = writer
        self._progress = progress
        self._until = time.monotonic() + limit_s

    def fill(
        self, table: EmbeddingTable, keys: KeyArray, vectors: ReadVectors, version: int | None
    ) -> None:
        """Put ``keys (n,)`` into the caches, the first ones first.

        ``version``: that of all rows, if the stores still hold the files' ``vectors`` unchanged; None
        if unknown: the rows are then read from the stores."""
        if not len(keys):
            return
        keys = table.narrow(keys)
        with self._progress.task(f"warming {table.name}", len(keys)) as step:
            if version is not None:
                rows = FileRows(table, keys, vectors, version)
                insert_rows(partial(self._writer.insert, table), rows, step)
            else:
                promote_keys(self._writer, table, keys, step, self._until)

    def fill_static(self, rows: FileRows, cache: Tier) -> None:
        """Put all of ``rows`` into ``cache``, in which the table is static; other caches get none."""
        table = rows.table

        def insert(keys: KeyArray, vectors: VectorArray, versions: VersionArray) -> Future[None]:
            return self._writer.run(partial(cache.insert, table, keys, vectors, versions))

        chunk = max(_CHUNK_ROWS, _LARGE_CHUNK_BYTES // table.row_bytes)
        with self._progress.task(f"filling {table.name}", len(rows.keys)) as step:
            insert_rows(insert, rows, step, chunk)

    def promote_all(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Put the stores' rows of ``keys (n,)`` into the caches, however long it takes.

        In the order of the keys, in which RocksDB reads them ten times as fast as at random."""
        keys = np.sort(dedup(keys)[0])
        self.promote_into(table, [keys], len(keys))

    def promote_into(
        self,
        table: EmbeddingTable,
        blocks: Iterable[KeyArray],
        total: int,
        cache: Tier | None = None,
        *,
        limited: bool = False,
    ) -> None:
        """Put the stores' rows of ``blocks`` of keys, ``total`` in all, each once, into the caches.

        ``cache``: only into this one, on GPUs. ``limited``: not later than ``limit_s`` after the begin."""
        done, chunk = 0, _CHUNK_ROWS
        if cache is not None:
            chunk = max(chunk, min(_SERVED_CHUNK_ROWS, _SERVED_CHUNK_BYTES // table.row_bytes))
        with self._progress.task(f"filling {table.name}", total) as step:
            for keys in blocks:
                for start in range(0, len(keys), chunk):
                    if limited and _is_late(self._until, table, done, total):
                        return
                    some = keys[start : start + chunk]
                    self._writer.promote_at_once(table, some, cache).result()
                    done += len(some)
                    step(len(some))

    def hottest(
        self, table: EmbeddingTable, keys: KeyArray, cache: Tier, *, mapped: bool = False
    ) -> None:
        """Put ``keys (n,)``, the hottest first, into ``cache`` with the stores' rows.

        ``mapped``: the stores read them from a mapped file, so that large pieces keep no request waiting."""
        with self._progress.task(f"warming {table.name}, hottest keys", len(keys)) as step:
            promote_keys(self._writer, table, keys, step, self._until, at_once=mapped)
        # The keys inserted first now have the lowest scores; a lookup of them raises these.
        half = keys[: len(keys) // 2]
        for start in range(0, len(half), _CHUNK_ROWS):
            cache.fetch([Part.make(table, half[start : start + _CHUNK_ROWS])], FetchContext())


def insert_rows(
    insert: Callable[[KeyArray, VectorArray, VersionArray], Future[None]],
    rows: FileRows,
    step: Callable[[int], None],
    chunk: int = 0,
) -> None:
    """Insert ``rows``, at most ``chunk`` at a time, and read the next ones meanwhile.

    Only for files whose rows the stores still hold unchanged, with no key twice. The first rows are
    inserted last, so that a full cache keeps those."""
    table, keys = rows.table, rows.keys
    running: deque[tuple[Future[None], int]] = deque()

    def finish() -> None:
        done, n = running.popleft()
        done.result()
        step(n)

    for part in _backwards(len(keys), chunk or _CHUNK_ROWS):
        vectors = to_rows(table, rows.vectors(part.start, part.stop)[::-1])
        versions = np.full(len(vectors), rows.version, np.uint64)
        running.append(
            (insert(np.array(keys[part][::-1], np.int64), vectors, versions), len(vectors))
        )
        if len(running) > 1:
            finish()
    while running:
        finish()


def promote_keys(
    writer: CacheWriter,
    table: EmbeddingTable,
    keys: KeyArray,
    step: Callable[[int], None],
    until: float,
    *,
    at_once: bool = False,
) -> None:
    """Promote ``keys (n,)``, the first ones first, until the instant ``until`` (``time.monotonic()``).

    ``at_once``: in larger pieces, see `CacheWriter.promote_at_once`. Slower than ``insert_rows``, but correct
    whatever was written meanwhile."""
    chunk = min(_CHUNK_ROWS, writer.queue_keys)
    for start in range(0, len(keys), chunk):
        if _is_late(until, table, start, len(keys)):
            return
        part = np.array(keys[start : start + chunk], np.int64)
        if at_once:
            writer.promote_at_once(table, dedup(table.narrow(part))[0]).result()
        else:
            writer.promote(table, part)
            writer.flush()
        step(len(part))


def _is_late(until: float, table: EmbeddingTable, done: int, rows: int) -> bool:
    late = time.monotonic() > until
    if late:
        log.info(
            "table %s: warm-up stopped at its time limit, after %d of %d rows", table.id, done, rows
        )
    return late


def _backwards(n: int, chunk: int) -> Iterator[slice]:
    for start in reversed(range(0, n, chunk)):
        yield slice(start, min(start + chunk, n))
