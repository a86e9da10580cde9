"""Putting a share of a table's rows into Redis, and going on where a killed load stopped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import numpy as np

from hps.native import dedup, partition_hash
from hps.tiers.redis_client import RedisClient
from hps.tiers.redis_tables import OpenTable
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray
from hps.workers import Workers

_CHUNK = 32_768
_AT_ONCE = 2
_FIELD = "loaded"


class _Insert(Protocol):
    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None: ...


def preload(
    tier: _Insert,
    client: RedisClient,
    opened: OpenTable,
    chunks: Iterable[tuple[KeyArray, VectorArray]],
    version: int,
    share: float,
    mark: str,
    before: Callable[[], None],
    progress: Callable[[int], None],
) -> int:
    """Insert a ``share`` of the rows in ``chunks`` of keys (n,) and vectors (n, dim) with one ``version``;
    rows that are newer in Redis stay. Which rows these are is told by their keys' hash: the same ones
    every time and on every node. Of a key that stands twice the last row stays. ``before`` is called before
    the first row is written, if any is. ``progress`` gets rows looked at.

    ``mark`` names the source (its digest): how far a load has come is noted beside the rows, so the next
    one of the same mark, version and share skips what was acknowledged; one that was complete is not
    repeated. Without a mark everything is inserted. Returns the rows inserted.
    """
    table, key = opened.layout.table, opened.layout.facts_key
    mark = mark and f"{mark}/{version}/{share:g}"
    skip = _done(client, key, mark)
    # The next chunk is packed while the server takes in the last one.
    workers = Workers(_AT_ONCE, _AT_ONCE, name="redis-load")
    waiting: deque[tuple[Future[int], int, KeyArray]] = deque()
    inserted = 0
    checked = False

    def settle(most: int) -> None:
        nonlocal inserted
        while len(waiting) > most:
            future, seen, _ = waiting.popleft()
            inserted += future.result()
            if mark:
                client.call(key, "HSET", key, _FIELD, f"{mark}:{seen}")

    try:
        for seen, keys, vectors in _pieces(chunks):
            if seen > skip:
                if not checked:
                    before()
                    checked = True
                if _repeat(keys, [sent for _, _, sent in waiting]):
                    settle(0)  # or an earlier row of a key could overwrite a later one
                work = partial(_insert_share, tier, table, keys, vectors, version, share)
                waiting.append((workers.submit(work), seen, keys))
                settle(_AT_ONCE)
            progress(len(keys))
        settle(0)
    finally:
        workers.close()
    return inserted


def _pieces(
    chunks: Iterable[tuple[KeyArray, VectorArray]],
) -> Iterator[tuple[int, KeyArray, VectorArray]]:
    """Keys and vectors in pieces of bounded size, and how many rows these are with all before."""
    seen = 0
    for keys, vectors in chunks:
        for start in range(0, len(keys), _CHUNK):
            some = keys[start : start + _CHUNK]
            seen += len(some)
            yield seen, some, vectors[start : start + _CHUNK]


def _repeat(keys: KeyArray, sent: Sequence[KeyArray]) -> bool:
    """Whether a key may stand among ``sent`` as well; also true when one stands twice in ``keys``."""
    both = np.concatenate([keys, *sent])
    return len(dedup(both)[0]) < len(both)


def _insert_share(
    tier: _Insert,
    table: EmbeddingTable,
    keys: KeyArray,
    vectors: VectorArray,
    version: int,
    share: float,
) -> int:
    keys = np.ascontiguousarray(keys)
    high = partition_hash(table.narrow(keys)) >> np.uint64(32)
    at = np.flatnonzero(high < np.uint64(min(1.0, share) * 2**32))
    rows = np.ascontiguousarray(vectors[at], table.dtype)
    tier.insert(table, keys[at], rows, np.full(len(at), version, np.uint64))
    return len(at)


def _done(client: RedisClient, key: bytes, mark: str) -> int:
    """How many rows of this source were looked at already."""
    if not mark:
        return 0
    noted = (client.call(key, "HGET", key, _FIELD) or b"").decode("utf-8", "replace")
    source, _, seen = noted.rpartition(":")
    return int(seen) if source == mark and seen.isdigit() else 0
