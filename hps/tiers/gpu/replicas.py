"""GpuReplicas: the caches of all devices as one tier for host arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

import numpy as np

from hps.errors import BadRequest
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.ranking import HotKeys
from hps.types import EmbeddingTable, KeyArray, Source, SourceArray, VectorArray, VersionArray


class GpuReplicas:
    """One cache per device, all with the same rows; takes host parts and host arrays.

    Fetches alternate between the caches. A write goes to all of them before it returns. A static table
    holds all of its rows already: it ignores promotions and rejects updates and deletions with BadRequest.
    Rows of the tables ``by_version`` are scored by their version. Thread-safe like `GpuCache`."""

    info = TierInfo("gpu", Source.GPU, cache=True)

    def __init__(self, caches: Sequence[Any], by_version: Collection[EmbeddingTable] = ()) -> None:
        self.caches = tuple(caches)
        self._by_version = frozenset(by_version)
        self._turn = count()

    def add_by_version(self, tables: Collection[EmbeddingTable]) -> None:
        """Score the rows of these tables by their versions, too."""
        self._by_version |= frozenset(tables)

    def drop_table(self, table: EmbeddingTable) -> None:
        """Remove a table from all caches. For the thread that writes them."""
        self._by_version -= {table}
        for cache in self.caches:
            cache.drop_table(table)

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        home = next(self._turn) % len(self.caches)
        cache = self.caches[home]
        parts = [part for part in parts if len(part.missing) and cache.capacity(part.table)]
        if not parts:
            return
        space = cache.space
        stream = space.take_stream()
        device = space.parts([(part.table, part.keys[part.missing]) for part in parts], stream)
        self._fetch_on(home, device.parts, FetchContext(ctx.deadline, stream))
        reports = device.reports(stream)
        for part, device_part, versions, sources in zip(parts, device.parts, *reports, strict=True):
            _copy_answer(part, device_part, versions, sources, stream)
        space.give_back(stream)

    def _fetch_on(self, home: int, parts: Sequence[Part], ctx: FetchContext) -> None:
        """Fetch ``parts`` with keys on the host and answers on the device of cache ``home``."""
        self.caches[home].fetch(parts, ctx)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        for cache in self.caches:
            if not cache.sealed(table):
                cache.insert(table, keys, vectors, versions, **self._scores(table, versions))

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self._check_not_static(table)
        for cache in self.caches:
            cache.update(table, keys, vectors, versions, **self._scores(table, versions))

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        self._check_not_static(table)
        for cache in self.caches:
            cache.delete(table, keys, versions)

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        for cache in self.caches:
            if not cache.sealed(table):
                cache.evict(table, keys)

    def expire(self, table: EmbeddingTable, oldest: int) -> int:
        """Evict the rows with versions below ``oldest`` from all caches, for the thread that writes them.

        Returns their number on the device with the most of them."""
        evicted: int = max(cache.expire(table, oldest) for cache in self.caches)
        return evicted

    def seal(self, table: EmbeddingTable) -> int:
        """Seal a static table on all devices.

        Returns the number of rows that got no slot, on the device with the most of them."""
        dropped: int = max(cache.seal(table) for cache in self.caches)
        return dropped

    def capacity(self, table: EmbeddingTable) -> int:
        rows: int = self.caches[0].capacity(table)
        return rows

    def top_k(self, table: EmbeddingTable, n: int) -> HotKeys:
        """Like `CpuCache.top_k`, on the first device only: every device gets a similar share of requests.

        Empty for a static table, which holds every key regardless of use."""
        sealed = self.caches[0].sealed(table)
        ranked: HotKeys = self.caches[0].top_k(table, 0 if sealed else n)
        return ranked

    def rows(self, table: EmbeddingTable) -> int:
        """Return the number of rows on the first device. Waits for the device."""
        rows: int = self.caches[0].size(table)
        return rows

    def close(self) -> None:
        for cache in self.caches:
            cache.close()

    def _scores(self, table: EmbeddingTable, versions: VersionArray) -> dict[str, VersionArray]:
        return {"scores": versions} if table in self._by_version else {}

    def _check_not_static(self, table: EmbeddingTable) -> None:
        if any(cache.sealed(table) for cache in self.caches):
            raise BadRequest(
                f"table {table.id} is static in the GPU cache, which can't follow an update; serve it with "
                "gpu_static: false (tiers.gpu.static)"
            )


def _copy_answer(
    part: Part, device_part: Part, versions: VersionArray, sources: SourceArray, stream: Any
) -> None:
    """Copy the answers in ``device_part``, made of the misses of ``part``, into ``part`` on the host."""
    answered = np.ones(len(device_part.keys), bool)
    answered[device_part.missing] = False
    positions = part.missing[answered]
    if len(positions):
        out: Any = device_part.out
        part.versions[positions] = versions[answered]
        part.source[positions] = sources[answered]
        rows = sources != 0
        part.out[part.missing[rows]] = out.get(stream=stream)[rows]
        part.missing = part.missing[~answered]
