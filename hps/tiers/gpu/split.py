"""GpuSplit: the caches of all devices as one tier, with each row on one of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hps.cuda.owners import MOST_OWNERS, enable_peer_access, owner_of, partition
from hps.cuda.split_fetch import OwnerRows, SplitFetch, TableShard
from hps.errors import ConfigError
from hps.tiers.base import FetchContext, Part
from hps.tiers.checks import check_keys, check_part, check_rows
from hps.tiers.gpu.replicas import GpuReplicas
from hps.tiers.ranking import HotKeys
from hps.types import EmbeddingTable, IndexArray, KeyArray, VectorArray, VersionArray


class GpuSplit(GpuReplicas):
    """One cache per device, which has the rows of its keys: a hash gives each key an owner.

    Used like `GpuReplicas`. A fetch asks the cache of one device, and the owners for what that misses; they
    write rows into that device's memory. `copy_hottest` gives the other devices copies of hot rows, which
    follow every change and are evicted like other rows. Fetches are thread-safe; the other verbs, and
    `copy_hottest`, are for the thread that writes.

    Raises GpuUnavailable if the devices have no peer access, ConfigError for more than `MOST_OWNERS`."""

    def __init__(self, caches: Sequence[Any], by_version: Collection[EmbeddingTable] = ()) -> None:
        super().__init__(caches, by_version)
        if len(caches) > MOST_OWNERS:
            raise ConfigError(
                f"a table can be split over at most {MOST_OWNERS} GPUs, not {len(caches)}"
            )
        devices = {cache.space.number for cache in caches}
        enable_peer_access(sorted(devices))
        for cache in caches:
            cache.peers = frozenset(devices - {cache.space.number})
        self._copied: set[EmbeddingTable] = set()
        self._fetches: dict[EmbeddingTable, SplitFetch] = {}

    def drop_table(self, table: EmbeddingTable) -> None:
        self._fetches.pop(table, None)
        self._copied.discard(table)
        super().drop_table(table)

    # -- reading -----------------------------------------------------------------------------------

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
        super().fetch(parts, ctx)

    def _fetch_on(self, home: int, parts: Sequence[Part], ctx: FetchContext) -> None:
        super()._fetch_on(home, parts, ctx)
        missing = [part.missing for part in parts]
        owners = [
            owner_of(part.keys[still], len(self.caches))
            for part, still in zip(parts, missing, strict=True)
        ]
        left: list[list[IndexArray]] = [
            [still[owner == home]] for still, owner in zip(missing, owners, strict=True)
        ]
        for number, cache in enumerate(self.caches):
            requests = [
                replace(part, missing=still[owner == number])
                for part, still, owner in zip(parts, missing, owners, strict=True)
            ]
            if number == home or not any(len(part.missing) for part in requests):
                continue
            stream = cache.space.take_stream()
            cache.fetch(requests, FetchContext(ctx.deadline, stream))
            stream.synchronize()  # its writes to another device's memory have arrived
            cache.space.give_back(stream)
            for pieces, part in zip(left, requests, strict=True):
                pieces.append(part.missing)
        for part, pieces in zip(parts, left, strict=True):
            part.missing = np.sort(np.concatenate(pieces))

    def fetch_rows(
        self, home: int, table: EmbeddingTable, keys: Any, out: Any, source: Any
    ) -> None:
        """Fetch ``keys`` on the device of cache ``home`` into ``out`` and ``source`` there; see
        `SplitFetch.fetch`."""
        if len(keys):
            copies = table in self._copied
            self._split_fetch(table).fetch(home, keys, out, source, copies=copies)

    def fetch_apart(self, home: int, table: EmbeddingTable, keys: Any) -> list[OwnerRows]:
        """Fetch ``keys`` on the device of cache ``home`` and leave the rows on their owners; see
        `SplitFetch.fetch_apart`."""
        return self._split_fetch(table).fetch_apart(home, keys) if len(keys) else []

    def _split_fetch(self, table: EmbeddingTable) -> SplitFetch:
        fetch = self._fetches.get(table)
        if fetch is None:
            shards = [
                TableShard(cache.space.device, cache.held(table), cache.direct)
                for cache in self.caches
            ]
            fetch = self._fetches[table] = SplitFetch(shards)
        return fetch

    # -- writing -----------------------------------------------------------------------------------

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        check_rows(table, keys, vectors, versions)
        for cache, mine in self._owned(keys):
            if not cache.sealed(table):
                stamps = versions[mine]
                scores = self._scores(table, stamps)
                cache.insert(table, keys[mine], vectors[mine], stamps, **scores)
        if table in self._copied:
            self.update(table, keys, vectors, versions)  # copies; the owners write the same again

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        """Leave tombstones at the owners, and evict copies, which would hide a later row from a search."""
        check_keys(table, keys, versions)
        self._check_not_static(table)
        for owner, mine in self._owned(keys):
            owner.delete(table, keys[mine], versions[mine])
            for cache in self.caches if table in self._copied else ():
                if cache is not owner:
                    cache.evict(table, keys[mine])

    def copy_hottest(self, table: EmbeddingTable, n: int) -> int:
        """Copy up to ``n`` of each device's hottest rows to all others; return how many rows were copied.

        They take the places of rows there that were not used for longer. Static tables get none, because
        nothing may change them: 0."""
        if any(cache.sealed(table) for cache in self.caches):
            return 0
        self._copied.add(table)
        copied = 0
        for owner, (keys, _) in zip(self.caches, self._hottest(table, n), strict=True):
            if not len(keys):
                continue
            stream = owner.space.take_stream()
            answers = owner.space.parts([(table, keys)], stream)
            owner.fetch(answers.parts, FetchContext(stream=stream))
            (versions,), (sources,) = answers.reports(stream)
            there = sources != 0
            vectors = answers.parts[0].out.get(stream=stream)[there]
            owner.space.give_back(stream)
            stamps = versions[there]
            for cache in self.caches:
                if cache is not owner:
                    cache.insert(table, keys[there], vectors, stamps, **self._scores(table, stamps))
            copied += int(there.sum())
        return copied

    def _hottest(self, table: EmbeddingTable, n: int) -> list[HotKeys]:
        """Return up to ``n`` of the hottest keys of each owner, which may also rank copies of the others'."""
        count, found = len(self.caches), []
        for number, cache in enumerate(self.caches):
            keys, scores = cache.top_k(table, n * count)
            own = np.flatnonzero(owner_of(keys, count) == number)[:n]
            found.append((keys[own], scores[own]))
        return found

    def seal(self, table: EmbeddingTable) -> int:
        """Seal a static table on all devices. Returns the number of rows that got no slot."""
        dropped: int = sum(cache.seal(table) for cache in self.caches)
        return dropped

    def expire(self, table: EmbeddingTable, oldest: int) -> int:
        """Evict the rows with versions below ``oldest`` on all devices; return their number, with copies."""
        evicted: int = sum(cache.expire(table, oldest) for cache in self.caches)
        return evicted

    # -- sizes -------------------------------------------------------------------------------------

    def capacity(self, table: EmbeddingTable) -> int:
        rows: int = sum(cache.capacity(table) for cache in self.caches)
        return rows

    def top_k(self, table: EmbeddingTable, n: int) -> HotKeys:
        """Like `CpuCache.top_k`: the hottest keys of each owner, hottest first.

        Scores of different devices are compared as they are: each has a similar share of the requests."""
        sealed = any(cache.sealed(table) for cache in self.caches)
        ranked = self._hottest(table, 0 if sealed else n)
        keys, scores = (np.concatenate(each) for each in zip(*ranked, strict=True))
        order = np.argsort(255 - scores, kind="stable")[:n]
        return keys[order], scores[order]

    def rows(self, table: EmbeddingTable) -> int:
        """Return the number of rows on all devices, copies included. Waits for the devices."""
        rows: int = sum(cache.size(table) for cache in self.caches)
        return rows

    def _owned(self, keys: KeyArray) -> list[tuple[Any, IndexArray]]:
        """Return each cache that owns some of ``keys``, and their positions."""
        divided = zip(self.caches, partition(keys, len(self.caches)), strict=True)
        return [(cache, mine) for cache, mine in divided if len(mine)]
