"""Fill a cache before the node is ready, from the start of a table's files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np

from hps.tiers.base import FetchContext, Part, Tier
from hps.types import EmbeddingTable, KeyArray, Progress, VectorArray
from hps.updates.cache_writer import CacheWriter

log = logging.getLogger(__name__)

ReadVectors = Callable[[int, int], VectorArray]
"""``vectors(start, stop)`` reads the vectors (stop - start, dim) float32 of the keys at these positions."""
_CHUNK_ROWS = 16_384
# A store reads 50,000 rows/s and more; after this long, lookups warm the rest.
WARM_SECONDS = 20.0


class CacheWarmup:
    """Fills the caches of ``writer`` table by table and reports ``progress``."""

    def __init__(self, writer: CacheWriter, progress: Progress) -> None:
        self._writer = writer
        self._progress = progress
        self._until = time.monotonic() + WARM_SECONDS

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
                insert_rows(self._writer, table, keys, vectors, version, step)
            else:
                promote_keys(self._writer, table, keys, step, self._until)

    def hottest(self, table: EmbeddingTable, keys: KeyArray, cache: Tier) -> None:
        """Put ``keys (n,)``, the hottest first, into ``cache`` with the stores' rows."""
        with self._progress.task(f"warming {table.name}, hottest keys", len(keys)) as step:
            promote_keys(self._writer, table, keys, step, self._until)
        # The keys inserted first now have the lowest scores; a lookup of them raises these.
        half = keys[: len(keys) // 2]
        for start in range(0, len(half), _CHUNK_ROWS):
            cache.fetch([Part.make(table, half[start : start + _CHUNK_ROWS])], FetchContext())


def insert_rows(
    writer: CacheWriter,
    table: EmbeddingTable,
    keys: KeyArray,
    vectors: ReadVectors,
    version: int,
    step: Callable[[int], None],
) -> None:
    """Insert ``keys (n,)`` with their ``vectors``, all of ``version``.

    Only for files whose rows the stores still hold unchanged, with no key twice. The first rows are
    inserted last, so that a full cache keeps those."""
    for part in _backwards(len(keys)):
        rows = np.ascontiguousarray(vectors(part.start, part.stop)[::-1], table.dtype)
        versions = np.full(len(rows), version, np.uint64)
        writer.insert(table, np.array(keys[part][::-1], np.int64), rows, versions).result()
        step(len(rows))


def promote_keys(
    writer: CacheWriter,
    table: EmbeddingTable,
    keys: KeyArray,
    step: Callable[[int], None],
    until: float,
) -> None:
    """Promote ``keys (n,)``, the first ones first, until the instant ``until`` (``time.monotonic()``).

    Slower than ``insert_rows``, but correct whatever was written meanwhile."""
    chunk = min(_CHUNK_ROWS, writer.queue_keys)
    for start in range(0, len(keys), chunk):
        if time.monotonic() > until:
            log.info(
                "table %s: warm-up stopped at its time limit, after %d of %d rows",
                table.id,
                start,
                len(keys),
            )
            return
        part = np.array(keys[start : start + chunk], np.int64)
        writer.promote(table, part)
        writer.flush()
        step(len(part))


def _backwards(n: int) -> Iterator[slice]:
    for start in reversed(range(0, n, _CHUNK_ROWS)):
        yield slice(start, min(start + _CHUNK_ROWS, n))
