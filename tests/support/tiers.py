"""Every tier there is, for the suites that run one body on all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hps.cuda.loader import cupy
from hps.threads import BoundedThreadPool
from hps.tiers.base import FetchContext, Part, Tier, TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.checks import check_part
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.node import AttachedProcesses, NodeConnectionPool, NodeServer, NodeTier, ServedTiers
from hps.tiers.rocksdb import Access, RocksDbTier, RocksDbTuning
from hps.tiers.single_flight import SingleFlight
from hps.tiers.wrappers import GuardedTier, MeteredTier, PromotingTier
from hps.types import EmbeddingTable, Source
from tests.support.memory_tier import MemoryTier

ROWS = 4096
"""Rows that the tables of a tier under test may hold without evictions."""

TableSet = list[EmbeddingTable]


@dataclass(frozen=True)
class TierCase:
    """A tier to be tested: how to make one and what to expect of it.

    ``versioned`` tiers keep a version per row and tombstones; the others the last write.
    """

    make: Callable[[Path, TableSet], Tier]
    sources: frozenset[Source] = frozenset({Source.MEMORY})
    dtype: Any = np.float32
    versioned: bool = True


@dataclass(frozen=True)
class TierUnderTest:
    """``tier`` and its ``tables``: three of different dims."""

    case: TierCase
    tier: Tier
    tables: TableSet


def memory(source: Source = Source.MEMORY, *, blocking: bool = False) -> MemoryTier:
    return MemoryTier(TierInfo("memory", source, blocking=blocking))


def guarded(tier: Tier) -> GuardedTier:
    return GuardedTier(tier, deadline_s=60.0, failures_to_open=1, retry_after_s=60.0)


def cpu_cache(_path: Path, tables: TableSet) -> CpuCache:
    return CpuCache(dict.fromkeys(tables, 2 * ROWS))


def chain_of_chains(path: Path, tables: TableSet) -> TierChain:
    caches = TierChain([MeteredTier(cpu_cache(path, tables), lambda *_: None)])
    stores = TierChain([guarded(memory(Source.REDIS)), memory(Source.ROCKSDB, blocking=True)])
    return TierChain([caches, TierChain([]), guarded(stores)])


def rocksdb(path: Path, tables: TableSet, layout: Any = "native") -> RocksDbTier:
    tier = RocksDbTier(path, layout=layout, tuning=RocksDbTuning(block_cache_bytes=1 << 20))
    tier.open_tables(tables)
    return tier


# Keys of the tables of a mapped tier: some of those that the tests use.
MAPPED_KEYS = np.unique([*range(-600, 600), *(1 << np.arange(0, 62, 8)), -(2**63), 2**63 - 1])


def mapped(path: Path, tables: TableSet, *, delta: bool = False, **given: Any) -> Any:
    """A tier that maps a file for each table, or a base and a delta, and has evicted all of their rows."""
    from hps.tiers.mapped import MappedTier
    from tests.support.mapped_tables import map_delta_rows, map_rows

    tier = MappedTier(path, tuning=RocksDbTuning(block_cache_bytes=1 << 20), **given)
    tier.open_tables(tables)
    for table in tables:
        rows = np.full((len(MAPPED_KEYS), table.dim), 3, table.dtype)
        map_table = map_delta_rows if delta else map_rows
        map_table(tier, table, path.with_name("files"), MAPPED_KEYS, rows, 1)
        tier.evict(table, MAPPED_KEYS)
    return tier


def mapped_in_memory(path: Path, tables: TableSet) -> TierChain:
    """A CPU cache that reads the files of a mapped tier first, above that tier."""
    store = mapped(path, tables)
    cache = CpuCache(dict.fromkeys(tables, 4096))
    for table in tables:
        cache.map_table(table, store.mapped(table))
    return TierChain([cache, store])


class BesidePrimary:
    """Writes go to a primary and fetches to a reader of the same folder: a secondary that follows it, or
    one opened anew for each fetch that sees the rows as they are then."""

    def __init__(self, primary: RocksDbTier, tables: TableSet, access: Access) -> None:
        self._primary, self._tables, self._access = primary, tables, access
        self._reader = self._open() if access == "secondary" else None
        for verb in ("insert", "update", "delete", "evict"):
            setattr(self, verb, getattr(primary, verb))

    @property
    def info(self) -> TierInfo:
        return self._primary.info

    def _open(self) -> RocksDbTier:
        primary = self._primary
        reader = type(primary)(
            primary.path,
            layout=primary.layout,
            access=self._access,
            tuning=RocksDbTuning(catch_up_s=0.0),
        )
        reader.open_tables(self._tables)
        return reader

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        reader = self._reader or self._open()
        try:
            reader.fetch(parts, ctx)
        finally:
            if reader is not self._reader:
                reader.close()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._primary.close()


def beside_primary(path: Path, tables: TableSet, access: Access, layout: Any = "native") -> Any:
    return BesidePrimary(rocksdb(path, tables, layout), tables, access)


def redis_tier(_path: Path, _tables: TableSet, **given: Any) -> Any:
    from hps.tiers.redis import RedisTier
    from tests.support.redis_servers import settings, shared_server

    return RedisTier(settings(shared_server(), **given))


def redis_cluster(_path: Path, _tables: TableSet) -> Any:
    from hps.tiers.redis import RedisTier
    from tests.support.redis_servers import shared_cluster

    return RedisTier(shared_cluster().settings())


class BesideNode:
    """Writes go to a node's store and fetches over the node's socket."""

    def __init__(self, store: Tier, tables: TableSet) -> None:
        self._store = store
        self._pool = BoundedThreadPool(4, 1024, name="lookup")
        # Pytest's folders have names too long for a socket.
        self._folder = tempfile.TemporaryDirectory(prefix="hps-")
        path = Path(self._folder.name)
        self._server = NodeServer(
            path,
            lambda: tables,
            ServedTiers(TierChain([]), store, self._pool, lambda *_: None),
            AttachedProcesses([]),
        )
        self._tier = NodeTier([NodeConnectionPool(self._server.path, tables)])
        self.info, self.fetch = self._tier.info, self._tier.fetch
        for verb in ("insert", "update", "delete", "evict"):
            setattr(self, verb, getattr(store, verb))

    def close(self) -> None:
        self._tier.close()
        self._server.close()
        self._pool.close()
        self._folder.cleanup()


class OnHost:
    """A tier on the device that answers parts on the host. The keys of every other part go up with it."""

    def __init__(self, tier: Any) -> None:
        self.tier = tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
        there = [
            Part(
                p.table,
                cupy().asarray(p.keys) if i % 2 else p.keys,
                *map(cupy().asarray, (p.out, p.versions, p.source)),
                p.missing,
            )
            for i, p in enumerate(parts)
        ]
        self.tier.fetch(there, ctx)
        for here, part in zip(parts, there, strict=True):
            here.out[:], here.versions[:] = part.out.get(), part.versions.get()
            here.source[:], here.missing = part.source.get(), part.missing


def gpu_cache(_path: Path, tables: TableSet) -> Any:
    from hps.tiers.gpu.cache import GpuCache

    return OnHost(GpuCache(dict.fromkeys(tables, 2 * ROWS)))


def gpu_chain(_path: Path, tables: TableSet) -> Any:
    from hps.tiers.gpu.cache import GpuCache
    from hps.tiers.gpu.host_bridge import HostBridge

    cache = GpuCache(dict.fromkeys(tables, 2 * ROWS))
    return OnHost(TierChain([cache, HostBridge(memory(Source.ROCKSDB))]))


def gpu_split(_path: Path, tables: TableSet) -> Any:
    """Two arrays on one device, each with the rows of its keys."""
    from hps.tiers.gpu.cache import GpuCache
    from hps.tiers.gpu.split import GpuSplit

    return GpuSplit([GpuCache(dict.fromkeys(tables, 2 * ROWS)) for _ in range(2)])


def split_twin(_path: Path, tables: TableSet) -> Any:
    """The same over twins of caches."""
    from hps.tiers.gpu.split import GpuSplit
    from tests.support import twin_device

    caches = [twin_device.Cache(0) for _ in range(2)]
    for cache in caches:
        for table in tables:
            cache.add_table(table, 2 * ROWS)
    return GpuSplit(caches)


def gpu_bridge(_path: Path, tables: TableSet) -> Any:
    from hps.tiers.gpu.host_bridge import HostBridge

    return OnHost(HostBridge(cpu_cache(_path, tables)))


def node(_path: Path, tables: TableSet) -> Any:
    return BesideNode(memory(Source.ROCKSDB, blocking=True), tables)


CPU, ROCKS = frozenset({Source.CPU}), frozenset({Source.ROCKSDB})
REDIS = frozenset({Source.REDIS})
TIERS = {
    "memory": TierCase(lambda _path, _tables: memory()),
    "chain": TierCase(lambda _path, _tables: TierChain([memory(Source.CPU), memory()]), CPU),
    "chain_of_chains": TierCase(chain_of_chains, CPU | ROCKS | {Source.REDIS}),
    "metered": TierCase(lambda _path, _tables: MeteredTier(memory(), lambda *_: None)),
    "guarded_in_place": TierCase(lambda _path, _tables: guarded(memory())),
    "guarded": TierCase(lambda _path, _tables: guarded(memory(blocking=True))),
    "single_flight": TierCase(lambda _path, _tables: SingleFlight(memory())),
    "promoting": TierCase(lambda _p, _t: PromotingTier(memory(), lambda *_: None, "redis")),
    "cpu_cache": TierCase(cpu_cache, CPU),
    "cpu_cache_float16": TierCase(cpu_cache, CPU, np.float16),
    "gpu_cache": TierCase(gpu_cache, frozenset({Source.GPU})),
    "gpu_cache_float16": TierCase(gpu_cache, frozenset({Source.GPU}), np.float16),
    "gpu_split": TierCase(gpu_split, frozenset({Source.GPU})),
    "split_twin": TierCase(split_twin, frozenset({Source.GPU})),
    "gpu_bridge": TierCase(gpu_bridge, CPU),
    "gpu_chain": TierCase(gpu_chain, frozenset({Source.GPU, Source.ROCKSDB})),
    "node": TierCase(node, ROCKS),
    "node_float16": TierCase(node, ROCKS, np.float16),
    "rocksdb": TierCase(rocksdb, ROCKS),
    "rocksdb_float16": TierCase(rocksdb, ROCKS, np.float16),
    "rocksdb_secondary": TierCase(lambda p, t: beside_primary(p, t, "secondary"), ROCKS),
    "rocksdb_read_only": TierCase(lambda p, t: beside_primary(p, t, "read_only"), ROCKS),
    "rocksdb_hps": TierCase(lambda p, t: rocksdb(p, t, "hps"), ROCKS, versioned=False),
    "mapped": TierCase(mapped, ROCKS),
    "mapped_delta": TierCase(lambda p, t: mapped(p, t, delta=True), ROCKS),
    "mapped_float16": TierCase(mapped, ROCKS, np.float16),
    "mapped_secondary": TierCase(lambda p, t: BesidePrimary(mapped(p, t), t, "secondary"), ROCKS),
    "mapped_read_only": TierCase(lambda p, t: BesidePrimary(mapped(p, t), t, "read_only"), ROCKS),
    "mapped_in_memory": TierCase(mapped_in_memory, CPU | ROCKS),
    "redis": TierCase(redis_tier, REDIS),
    "redis_float16": TierCase(redis_tier, REDIS, np.float16),
    "redis_oldest": TierCase(
        lambda p, t: redis_tier(p, t, overflow_margin=10**6, overflow_policy="oldest"), REDIS
    ),
    "redis_hps": TierCase(lambda p, t: redis_tier(p, t, layout="hps"), REDIS, versioned=False),
    "redis_cluster": TierCase(redis_cluster, REDIS),
}


def open_case(name: str, path: Path, **settings: Any) -> TierUnderTest:
    """Open a tier for three tables with ``settings`` of `EmbeddingTable.make`."""
    case = TIERS[name]
    tables = [
        EmbeddingTable.make(table, dim, dtype=case.dtype, **settings)
        for table, dim in (("items", 4), ("users", 3), ("wide", 64))
    ]
    return TierUnderTest(case, case.make(path, tables), tables)
