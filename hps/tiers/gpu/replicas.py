"""GpuReplicas: the caches on devices as tiers and threads on the host see them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

import numpy as np

from hps.errors import BadRequest
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.ranking import HotKeys
from hps.types import EmbeddingTable, KeyArray, Source, SourceArray, VectorArray, VersionArray

_INFO = TierInfo("gpu", Source.GPU, cache=True)


class GpuReplicas:
    """One cache on each device, all with the same rows. Takes host parts and host arrays.

    A fetch asks one cache, another one each time; a write goes to all of them, so that none is behind
    when it returns. A static table takes no promotion (it holds what it will ever hold) and refuses
    updates and deletions with BadRequest. The rows of the tables ``by_version`` are worth their version.
    Threads: as `GpuCache`.
    """

    def __init__(self, caches: Sequence[Any], by_version: Collection[EmbeddingTable] = ()) -> None:
        self.caches = tuple(caches)
        self._by_version = frozenset(by_version)
        self._turn = count()

    @property
    def info(self) -> TierInfo:
        return _INFO

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        cache = self.caches[next(self._turn) % len(self.caches)]
        parts = [part for part in parts if len(part.missing) and cache.capacity(part.table)]
        if not parts:
            return
        space = cache.space
        stream = space.take_stream()
        there = space.parts([(part.table, part.keys[part.missing]) for part in parts], stream)
        cache.fetch(there.parts, FetchContext(ctx.deadline, stream))
        reports = there.reports(stream)
        for part, above, versions, sources in zip(parts, there.parts, *reports, strict=True):
            _bring(part, above, versions, sources, stream)
        space.give_back(stream)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        for cache in self.caches:
            if not cache.sealed(table):
                cache.insert(table, keys, vectors, versions, **self._worth(table, versions))

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self._refuse_static(table)
        for cache in self.caches:
            cache.update(table, keys, vectors, versions, **self._worth(table, versions))

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        self._refuse_static(table)
        for cache in self.caches:
            cache.delete(table, keys, versions)

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        for cache in self.caches:
            if not cache.sealed(table):
                cache.evict(table, keys)

    def seal(self, table: EmbeddingTable) -> int:
        """End the filling of a static table everywhere; the most rows that found no slot on a device."""
        dropped: int = max(cache.seal(table) for cache in self.caches)
        return dropped

    def capacity(self, table: EmbeddingTable) -> int:
        rows: int = self.caches[0].capacity(table)
        return rows

    def top_k(self, table: EmbeddingTable, n: int) -> HotKeys:
        """As `CpuCache.top_k`, of the first device: each sees a like share of the requests. Nothing of a
        static table, of which every key is there whatever was asked for."""
        sealed = self.caches[0].sealed(table)
        found: HotKeys = self.caches[0].top_k(table, 0 if sealed else n)
        return found

    def rows(self, table: EmbeddingTable) -> int:
        """Rows held, on the first device. Waits for it."""
        rows: int = self.caches[0].size(table)
        return rows

    def close(self) -> None:
        for cache in self.caches:
            cache.close()

    def _worth(self, table: EmbeddingTable, versions: VersionArray) -> dict[str, VersionArray]:
        return {"scores": versions} if table in self._by_version else {}

    def _refuse_static(self, table: EmbeddingTable) -> None:
        if any(cache.sealed(table) for cache in self.caches):
            raise BadRequest(
                f"table {table.id} is static in the GPU cache, which can't follow an update; serve it with "
                "gpu_static: false (tiers.gpu.static)"
            )


def _bring(
    part: Part, above: Part, versions: VersionArray, sources: SourceArray, stream: Any
) -> None:
    """What ``above`` found on the device of the keys that ``part`` misses."""
    answered = np.ones(len(above.keys), bool)
    answered[above.missing] = False
    positions = part.missing[answered]
    if len(positions):
        out: Any = above.out
        part.versions[positions] = versions[answered]
        part.source[positions] = sources[answered]
        rows = sources != 0
        part.out[part.missing[rows]] = out.get(stream=stream)[rows]
        part.missing = part.missing[~answered]
