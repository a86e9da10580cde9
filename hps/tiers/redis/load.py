"""Load a share of a table's rows into Redis, and continue a killed load.

The progress is stored in each partition, in the hash of stream positions, after its rows were
acknowledged. All Redis keys of a partition are on one server, whose replicas get writes in order. So
wherever the progress exists, the rows exist; and a server that lost the rows, by a restart or a
failover, lost the progress too."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hps.errors import HpsError, Unavailable
from hps.native import dedup
from hps.threads import BoundedThreadPool
from hps.tiers.redis.client import RedisClient
from hps.tiers.redis.tables import RedisTable
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

log = logging.getLogger(__name__)

_CHUNK = 32_768
_PARALLEL = 2
_FIELD = "loaded"

_InsertFunction = Callable[[EmbeddingTable, KeyArray, VectorArray, VersionArray], None]

LoadProgress = NDArray[np.int64]
"""(partitions,) per partition: it has its share of this many first rows of the source."""


@dataclass(frozen=True, slots=True)
class RedisLoadSource:
    """A ``share`` of the rows in ``chunks`` of keys (n,) and vectors (n, dim), all of one ``version``.

    Rows are chosen by their keys' hash: every node chooses the same ones each time. If a key is repeated,
    its last row is kept. ``mark`` names the source (its digest); without one no progress is stored.
    ``before`` is called once, before the first row is written."""

    chunks: Iterable[tuple[KeyArray, VectorArray]]
    version: int
    share: float = 1.0
    mark: str = ""
    before: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return self.mark and f"{self.mark}/{self.version}/{self.share:g}"

    @property
    def repeatable(self) -> bool:
        return bool(self.mark) and iter(self.chunks) is not self.chunks


class _PendingInserts:
    """The inserts in flight of one load, oldest first. Not thread-safe.

    ``store`` saves the progress of each partition; ``initial`` is the progress at the start."""

    def __init__(self, store: Callable[[LoadProgress], None] | None, initial: LoadProgress) -> None:
        self.inserted = 0
        self._store = store
        self._initial = initial
        self._waiting: deque[tuple[Future[int], int, KeyArray]] = deque()

    def add(self, future: Future[int], total: int, keys: KeyArray) -> None:
        """Add an insert. ``total``: rows of the source up to the end of this insert."""
        self._waiting.append((future, total, keys))

    def keys(self) -> list[KeyArray]:
        return [keys for _, _, keys in self._waiting]

    def settle(self, most: int) -> None:
        """Wait until at most ``most`` are in flight."""
        while len(self._waiting) > most:
            future, total, _ = self._waiting.popleft()
            self.inserted += future.result()
            if self._store is not None:
                self._store(np.maximum(self._initial, total))


class RedisLoads:
    """Loads tables, and reloads rows that Redis lost. Thread-safe."""

    def __init__(self, insert: _InsertFunction, client: RedisClient) -> None:
        self._insert = insert
        self._client = client
        self._done: dict[RedisTable, tuple[RedisLoadSource, int]] = {}
        self._reloads = BoundedThreadPool(1, 1, name="redis-load-again")

    def load(
        self,
        opened: RedisTable,
        source: RedisLoadSource,
        progress: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Insert missing rows; newer rows in Redis stay. ``progress`` receives rows processed.

        With a mark, partitions skip the rows that an earlier load of the same source wrote. Returns the
        number of rows inserted. Raises TierError; the next call continues from the stored progress."""
        table, client = opened.layout.table, self._client
        initial = _read_progress(client, opened, source.name)
        # While the server processes one chunk, the next one is packed. The queue has room for twice as
        # many, because a new thread may not have taken its job yet.
        workers = BoundedThreadPool(_PARALLEL, 2 * _PARALLEL, name="redis-load")
        store = partial(_store_progress, client, opened, source.name) if source.name else None
        pending = _PendingInserts(store, initial)
        total, checked = 0, False

        try:
            for total, keys, vectors in _pieces(source.chunks):
                behind = np.flatnonzero(initial < total)
                if len(behind):
                    if not checked:
                        source.before()
                        checked = True
                    if _has_duplicates(keys, pending.keys()):
                        pending.settle(0)  # an earlier row of a key must not overwrite a later one
                    at = _chosen(opened, keys, source.share, behind)
                    rows = np.ascontiguousarray(vectors[at], table.row_dtype)
                    work = partial(self._insert_rows, table, keys[at], rows, source.version)
                    pending.add(workers.submit(work), total, keys)
                    pending.settle(_PARALLEL)
                progress(len(keys))
            pending.settle(0)
        finally:
            workers.close()
        if source.name and source.share >= 1:
            self._done[opened] = source, total
        return pending.inserted

    def check_losses(self) -> None:
        """Check whether tables that were loaded completely have lost rows.

        A table with losses is marked `lost` until its rows are loaded again; that starts here, in the
        background, if the source can be read again."""
        for opened, (source, total) in list(self._done.items()):
            was, opened.lost = opened.lost, self._lost(opened, source, total)
            if not opened.lost:
                continue
            if not was:
                log.error("table %s: Redis lost loaded rows", opened.layout.table.id)
            if source.repeatable:
                with suppress(Unavailable):  # a reload is already in flight
                    self._reloads.submit(partial(self._repair, opened, source))

    def may_have_lost(self, opened: RedisTable, *, sure: bool) -> bool:
        """Return whether a row missing from Redis may have been loaded and then lost.

        ``sure``: nothing was lost since the last `check_losses`."""
        return opened.lost or (not sure and opened in self._done)

    def close(self) -> None:
        """Stop; a load in flight fails. Idempotent."""
        self._reloads.close(1.0)

    def _insert_rows(
        self, table: EmbeddingTable, keys: KeyArray, rows: VectorArray, version: int
    ) -> int:
        self._insert(table, keys, rows, np.full(len(keys), version, np.uint64))
        return len(keys)

    def _lost(self, opened: RedisTable, source: RedisLoadSource, total: int) -> bool:
        return bool((_read_progress(self._client, opened, source.name) < total).any())

    def _repair(self, opened: RedisTable, source: RedisLoadSource) -> None:
        table = opened.layout.table
        try:
            if self._lost(opened, source, self._done[opened][1]):
                rows = self.load(opened, source)
                log.warning("table %s: reloaded %d rows into Redis", table.id, rows)
            opened.lost = False
        except (HpsError, OSError) as error:
            log.warning("table %s: reload into Redis failed, retrying: %s", table.id, error)


def _read_progress(client: RedisClient, opened: RedisTable, name: str) -> LoadProgress:
    """Return the stored progress of each partition; 0 if it is another source's, or rows are missing."""
    layout = opened.layout
    if not name:
        return np.zeros(layout.partitions, np.int64)
    notes = client.call_all((key, ("HGET", key, _FIELD)) for key in layout.positions_keys)
    sizes = client.call_all((key, ("HLEN", key)) for key in layout.rows_keys)
    seen = np.zeros(layout.partitions, np.int64)
    for i, (note, entries) in enumerate(zip(notes, sizes, strict=True)):
        source, _, number = (note or b"").decode("utf-8", "replace").rpartition(":")
        if source == name and number.isdigit() and (entries or not int(number)):
            seen[i] = int(number)
    return seen


def _store_progress(client: RedisClient, opened: RedisTable, name: str, seen: LoadProgress) -> None:
    client.call_all(
        (key, ("HSET", key, _FIELD, f"{name}:{number}"))
        for key, number in zip(opened.layout.positions_keys, seen.tolist(), strict=True)
    )


def _chosen(
    opened: RedisTable, keys: KeyArray, share: float, partitions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the positions of the keys that belong to the share and to one of the partitions."""
    chosen = opened.layout.in_share(keys, share)
    if len(partitions) < opened.layout.partitions:
        chosen &= np.isin(opened.layout.partition_of(keys), partitions)
    return np.flatnonzero(chosen)


def _pieces(
    chunks: Iterable[tuple[KeyArray, VectorArray]],
) -> Iterator[tuple[int, KeyArray, VectorArray]]:
    """Yield chunks of bounded size, each with the number of rows up to its end."""
    seen = 0
    for keys, vectors in chunks:
        for start in range(0, len(keys), _CHUNK):
            some = keys[start : start + _CHUNK]
            seen += len(some)
            yield seen, some, vectors[start : start + _CHUNK]


def _has_duplicates(keys: KeyArray, sent: Sequence[KeyArray]) -> bool:
    """Return whether any key occurs twice in ``keys`` and ``sent`` together."""
    both = np.concatenate([keys, *sent])
    return len(dedup(both)[0]) < len(both)
