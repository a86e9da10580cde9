"""Direct writes: rows from a call instead of a stream, into every store, then the caches.

A call returns when all of them have the rows. Rows get the current time as version, and later calls a
higher one, whatever the clock does; so a direct write replaces rows that the stream sent before. Where
a store has a version ahead of this machine's clock, the row gets a version above that: else it would be
ignored."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence

import numpy as np

from hps.errors import BadRequest, Unavailable, Unsupported
from hps.observability.meters import UpdateMeter
from hps.tiers.positions import TableChanges
from hps.tiers.stored_rows import to_finite_rows, to_rows
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray, version_unix_ms
from hps.updates.cache_refresh import refresh
from hps.updates.cache_writer import CacheWriter
from hps.updates.stream_positions import FedStore
from hps.updates.version_clock import VersionClock

log = logging.getLogger(__name__)

DIRECT_TIMEOUT_S = 10.0


class DirectWriter:
    """Writes to ``stores`` and refreshes ``caches``. Any thread may call it; calls run one at a time.

    ``fixed``: static tables, which some cache keeps as they were when it was filled."""

    def __init__(
        self,
        stores: Sequence[FedStore],
        caches: CacheWriter,
        observe: UpdateMeter,
        fixed: Collection[EmbeddingTable] = (),
    ) -> None:
        self._stores = tuple(stores)
        self._caches = caches
        self._observe = observe
        self._fixed = fixed
        self._clock = VersionClock()
        self._turn = threading.Lock()

    def write(
        self,
        tables: Sequence[EmbeddingTable],
        keys: KeyArray,
        vectors: VectorArray,
        deleted: KeyArray,
        timeout_s: float = DIRECT_TIMEOUT_S,
    ) -> int:
        """Upsert ``vectors (n, dim)`` for ``keys (n,)``, delete ``deleted (m,)``; return their version.

        ``tables``: one of each version; those of another shape than the first, which decides whether the rows
        are valid, are left out and counted. The highest version if they differ. Raises BadRequest for
        arrays of wrong shapes, values that are not finite, a key in both ``keys`` and ``deleted``, and a
        key stored with the highest possible version. Raises TierError or Unavailable when a store failed:
        some stores may have the rows then, and a second call is harmless."""
        self._check(tables[0], keys, vectors, deleted)
        if not self._stores:
            raise Unsupported(
                "this node writes no store: its database is read only, or tiers.rocksdb.enabled is false"
            )
        if any(table in self._fixed for table in tables):
            raise Unsupported(
                f"table '{tables[0].name}' is static in the GPU cache, which takes no updates; serve it with "
                "gpu_static: false to have its rows change"
            )
        shape = tables[0].dim, tables[0].key_bits
        fitting = [table for table in tables if (table.dim, table.key_bits) == shape]
        if not self._turn.acquire(timeout=timeout_s):
            raise Unavailable(f"other writes took longer than {timeout_s:g} s; try again")
        try:
            made_s = time.time()
            version = max(self._apply(table, keys, vectors, deleted) for table in fitting)
        finally:
            self._turn.release()
        for table in tables:
            if table not in fitting:
                self._observe.applied(table, "other_shape", len(keys) + len(deleted))
                continue
            self._observe.visible(table, "direct", np.array([made_s]))
            self._observe.applied(table, "upserted", len(keys))
            self._observe.applied(table, "deleted", len(deleted))
        return version

    def _apply(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, deleted: KeyArray
    ) -> int:
        """Write to the stores, then the caches; returns the highest version."""
        new, gone = table.narrow(keys), table.narrow(deleted)
        version = self._clock.now()
        versions = self._versions(table, np.concatenate([new, gone]), version)
        rows = to_rows(table, vectors)
        n = len(new)
        changes = TableChanges(new, rows, versions[:n], gone, versions[n:])
        for each in self._stores:
            each.store.apply(table, changes, [])
        refresh(self._caches, table, changes, versioned=all(s.versioned for s in self._stores))
        return int(versions.max()) if len(versions) else version

    def _versions(self, table: EmbeddingTable, keys: KeyArray, version: int) -> VersionArray:
        """Versions (n,) for ``keys (n,)``: ``version``, or one above the stored version."""
        stored = np.zeros(len(keys), np.uint64)
        for each in self._stores:
            if each.versioned:
                np.maximum(stored, each.store.versions(table, keys, version), out=stored)
        if not stored.any():
            return np.full(len(keys), version, np.uint64)
        versions = self._clock.above(version, stored)
        if not versions.all():
            wrong = int(np.flatnonzero(versions == 0)[0])
            raise BadRequest(
                f"key {keys[wrong]} of table '{table.name}' is stored with version {stored[wrong]}, and no "
                "version above it fits 64 bits; erase the table (`hps store erase`) and load it again"
            )
        if ahead := int(np.count_nonzero(versions != version)):
            log.warning(
                "table %s: %d rows are stored with versions up to %.3f s ahead of this machine's clock; "
                "written with versions above them: check the clocks of producers and nodes",
                table.id, ahead, version_unix_ms(int(stored.max())) / 1e3 - time.time(),
            )  # fmt: skip
        return versions

    def _check(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, deleted: KeyArray
    ) -> None:
        wanted = (len(keys), table.dim)
        if vectors.shape != wanted:
            raise BadRequest(
                f"table '{table.name}' has dim {table.dim}: {len(keys)} keys need vectors of shape "
                f"{list(wanted)}, not {list(vectors.shape)}"
            )
        finite = to_finite_rows(table, vectors)[1]
        if not finite.all():
            key = int(keys[np.flatnonzero(~finite)[0]])
            raise BadRequest(f"the vector of key {key} is not finite in {table.row_format.name}")
        if not len(keys) or not len(deleted):
            return
        both = np.intersect1d(table.narrow(keys), table.narrow(deleted))
        if len(both):
            raise BadRequest(f"key {int(both[0])} is in both keys and deleted")
