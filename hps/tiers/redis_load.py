"""Putting a share of a table's rows into Redis, and going on where a killed load stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from hps.native import partition_hash
from hps.tiers.redis_client import RedisClient
from hps.tiers.redis_tables import OpenTable
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

_CHUNK = 65_536
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
    progress: Callable[[int], None],
) -> int:
    """Insert a ``share`` of the rows in ``chunks`` of keys (n,) and vectors (n, dim) with one ``version``;
    rows that are newer in Redis stay. Which rows these are is told by their keys' hash: the same ones
    every time and on every node. ``progress`` gets rows looked at.

    ``mark`` names the source (its digest): how far a load has come is noted beside the rows, so the next
    one of the same mark, version and share skips what was acknowledged; one that was complete is not
    repeated. Without a mark everything is inserted. Returns the rows inserted.
    """
    layout = opened.layout
    table, key = layout.table, layout.facts_key
    mark = mark and f"{mark}/{version}/{share:g}"
    skip = _done(client, key, mark)
    limit = np.uint64(min(1.0, share) * 2**32)
    seen = inserted = 0
    for keys, vectors in chunks:
        for start in range(0, len(keys), _CHUNK):
            some, rows = keys[start : start + _CHUNK], vectors[start : start + _CHUNK]
            seen += len(some)
            if seen > skip:
                high = partition_hash(table.narrow(np.ascontiguousarray(some))) >> np.uint64(32)
                at = np.flatnonzero(high < limit)
                versions = np.full(len(at), version, np.uint64)
                chosen = np.ascontiguousarray(rows[at], table.dtype)
                tier.insert(table, np.ascontiguousarray(some[at]), chosen, versions)
                inserted += len(at)
                if mark:
                    client.call(key, "HSET", key, _FIELD, f"{mark}:{seen}")
            progress(len(some))
    return inserted


def _done(client: RedisClient, key: bytes, mark: str) -> int:
    """How many rows of this source were looked at already."""
    if not mark:
        return 0
    noted = (client.call(key, "HGET", key, _FIELD) or b"").decode("utf-8", "replace")
    source, _, seen = noted.rpartition(":")
    return int(seen) if source == mark and seen.isdigit() else 0
