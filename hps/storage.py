"""The stores of a node: Redis before RocksDB, either may be absent; who guards them, how lookups ask them,
and how rows get from the one into the other.

RocksDB must be there when the node opens. Redis need not: it is another machine, and the node starts
without it, says so, and uses it as soon as it answers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from hps import metric_names as m
from hps.config.schema import Settings
from hps.config.store_settings import GuardSettings, RedisSettings, RocksDbSettings
from hps.errors import ConfigError, TierError, TierMisfit
from hps.meters import TierMeter
from hps.metrics import Metrics
from hps.models.loader import load_tables, version_of_rows
from hps.models.preload import preload_tables
from hps.models.repository import Repository
from hps.models.tables import TableFiles
from hps.opening import OpenedTables
from hps.rows.leftovers import left_over
from hps.tier_status import TierStatus
from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.chain import TierChain
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.promoting import Promoting
from hps.tiers.remembered import Remembered
from hps.tiers.single_flight import SingleFlight
from hps.tiers.wrappers import Guarded, Metered, Wrapper
from hps.types import EmbeddingTable, KeyArray, NoProgress, Progress, VectorArray, VersionArray
from hps.updates.stream_places import Store
from hps.updates.writer import CacheWriter
from hps.workers import Again

if TYPE_CHECKING:
    from hps.tiers.redis import RedisTier
    from hps.tiers.redis.tables import Usage
    from hps.tiers.rocksdb import Checkpoints, RocksDbTier

log = logging.getLogger(__name__)
# How old what is reported of Redis may be.
_LOOK_AGAIN_S = 10.0
_NO_CLUSTER = "cluster support disabled"


class Stores:
    """Opened and loaded by `open`; ``resources`` closes them. ``statuses`` lists them fastest first, each
    behind its guard."""

    def __init__(
        self,
        settings: Settings,
        opened: Sequence[OpenedTables],
        metrics: Metrics,
        resources: ExitStack,
    ) -> None:
        self._settings = settings
        self._opened = opened
        self._changing = Lock()  # a model may leave while another comes
        self._metrics = metrics
        self._resources = resources
        self._loads = ExitStack()  # what still is to be loaded, now or for models that come later
        self._files: dict[EmbeddingTable, TableFiles] = {
            table: model.version.tables[name]
            for model in opened
            for name, table in model.tables.items()
        }
        self._rocksdb: RocksDbTier | None = None
        self._redis: RedisTier | None = None
        self._into_redis: CacheWriter | None = None
        self.statuses: list[TierStatus] = []
        self.warnings: list[str] = []

    def open(self, progress: Progress, *, shared_only: bool = False) -> None:
        """``shared_only``: leave the node's own RocksDB alone, for a process that is no node. Raises
        ConfigError, ModelError or TierError; never because Redis is not there."""
        tiers = self._settings.tiers
        if tiers.rocksdb.enabled and not shared_only:
            self.statuses.append(self._open_rocksdb(tiers.rocksdb, progress))
        if tiers.redis is not None:
            self.statuses.insert(0, self._open_redis(tiers.redis, progress))

    def add(self, model: OpenedTables, progress: Progress) -> None:
        """Hold another model's tables too, with their rows, while those there are asked. Raises as `open`;
        what was loaded by then stays, and is not loaded again."""
        files = {table: model.version.tables[name] for name, table in model.tables.items()}
        with self._changing:
            self._files = self._files | files
            self._opened = [*self._opened, model]
        try:
            if self._rocksdb is not None:
                self._load_rocksdb(self._rocksdb, [model], progress)
            if self._redis is not None:
                self._load_redis(self._redis, self._redis_share, progress, [model])
        except BaseException:
            self.leave(model)
            raise

    def leave(self, model: OpenedTables, *, drop: bool = False) -> None:
        """Have nothing more to do with a model's tables, which nobody asks for. Their rows stay where they
        are; ``drop``: but in the node's own RocksDB. Other nodes may need those in Redis. Raises TierError
        when they cannot be dropped."""
        tables = list(model.tables.values())
        with self._changing:
            self._opened = [each for each in self._opened if each is not model]
            self._files = {t: files for t, files in self._files.items() if t not in tables}
        rocksdb = self._rocksdb
        if rocksdb is None:
            return
        if drop and rocksdb.access == "primary":
            rocksdb.drop(*tables)
            return
        try:
            rocksdb.forget(*tables)
        except TierError as error:
            log.warning("%s", error)

    @property
    def tables(self) -> list[EmbeddingTable]:
        """All that may be asked for: from `add` on, until they `leave`."""
        return list(self._files)

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Of RocksDB, where the settings name a folder for them."""
        folder = self._settings.tiers.rocksdb.checkpoints
        if self._rocksdb is None or folder is None:
            return None
        from hps.tiers.rocksdb import Checkpoints

        return Checkpoints(folder, self._rocksdb.path, self._rocksdb.checkpoint)

    @property
    def tiers(self) -> list[Tier]:
        """The guarded stores, fastest first."""
        return [status.tier for status in self.statuses]

    def asked(self) -> Tier:
        """The stores as lookups ask them: one after the other, each with its own figures, the same row
        once."""
        shared = self._metrics.counter(m.LOOKUP_SHARED)
        asked: list[Tier] = [
            Metered(tier, TierMeter(self._metrics, tier.info.name)) for tier in self.tiers
        ]
        if self._redis is not None and self._into_redis is not None:
            asked[-1] = Promoting(asked[-1], self._into_redis.promote, self._redis.info.name)
        return SingleFlight(TierChain(asked), shared.add)

    def lacked(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Told by the cache writer of rows that RocksDB held and Redis did not. Lookups that wait for
        their rows have told so already."""
        if self._into_redis is not None and table.miss.kind == "default_then_promote":
            self._into_redis.promote(table, keys)

    def fed(self, *, shared: bool) -> list[Store]:
        """Those that update streams are written to: the node's own, or the shared ones."""
        if shared:
            redis = self._redis
            if redis is None:
                return []
            return [Store("redis", _Fed(redis, self._streamed_share), redis.layout == "native")]
        rocksdb = self._rocksdb
        if rocksdb is None or self._settings.tiers.rocksdb.access != "primary":
            return []
        return [Store("rocksdb", rocksdb, self._settings.tiers.rocksdb.layout == "native")]

    @property
    def promotions_waiting(self) -> Mapping[str, int]:
        """Keys whose row is still to be copied, by the tier it goes to."""
        writer, redis = self._into_redis, self._redis
        return {redis.info.name: writer.waiting_keys} if writer and redis else {}

    def rows(self, table: EmbeddingTable) -> int:
        """Rows of a table: its files', or RocksDB's estimate when more were streamed in since."""
        rows = self._files[table].rows
        return rows if self._rocksdb is None else max(rows, self._rocksdb.rows(table))

    def version_of_rows(self, table: EmbeddingTable) -> int | None:
        """The version all rows of the table's files have, when the stores hold exactly those; None when
        only the stores know, as always when others may write to one of them."""
        if self._rocksdb is None or self._redis is not None:
            return None
        return version_of_rows(self._rocksdb, table, self._files[table])

    @property
    def _redis_share(self) -> float:
        """The share of a table's rows that Redis is given from the start: all, where no node has another
        store. Told by the settings, which are the same in a process without the nodes' RocksDB."""
        tiers = self._settings.tiers
        assert tiers.redis is not None
        return tiers.redis.initial_cache_rate if tiers.rocksdb.enabled else 1.0

    @property
    def _streamed_share(self) -> float:
        """The share of streamed rows that Redis is given. Where nodes put rows into it that only RocksDB
        held, all: one that is passed over could be put there by a node that does not have it yet, as
        it was before, and stay."""
        redis = self._settings.tiers.redis
        assert redis is not None
        return 1.0 if redis.cache_missed_embeddings else self._redis_share

    # -- RocksDB -----------------------------------------------------------------------------------

    def _open_rocksdb(self, chosen: RocksDbSettings, progress: Progress) -> TierStatus:
        from hps.tiers.rocksdb import RocksDbTier, Tuning

        store = self._rocksdb = RocksDbTier(
            chosen.path,
            layout=chosen.layout,
            access=chosen.access,
            tuning=Tuning(
                chosen.block_cache_bytes,
                chosen.block_size,
                chosen.threads,
                chosen.mmap_reads,
                chosen.min_free_bytes,
                chosen.catch_up_s,
            ),
        )
        # The lookups and two cache writers.
        guarded = self._guarded(store, chosen.guard, self._settings.tiers.lookup_threads + 2)
        store.open_tables(list(self._files))
        self._load_rocksdb(store, self._opened, progress)
        if (chosen.layout, chosen.access) == ("native", "primary"):
            served = {(each.version.name, each.version.version) for each in self._opened}
            repository = Repository(self._settings.models.repository)
            if warning := left_over(store.families(), served, repository):
                self.warnings.append(warning)
        return TierStatus(
            guarded,
            store.rows,
            state=lambda: guarded.state,
            facts=lambda: {"layout": chosen.layout, **_figures(store)},
        )

    def _load_rocksdb(
        self, store: RocksDbTier, models: Sequence[OpenedTables], progress: Progress
    ) -> None:
        for model in models:
            if self._settings.tiers.rocksdb.load:
                load_tables(model.version, model.tables, store, progress)
            else:
                store.open_tables(list(model.tables.values()))
                for table in model.tables.values():
                    store.check(table)

    # -- Redis -------------------------------------------------------------------------------------

    def _open_redis(self, chosen: RedisSettings, progress: Progress) -> TierStatus:
        from hps.tiers.redis import RedisTier

        redis = self._redis = RedisTier(chosen)
        guarded = self._guarded(redis, chosen.guard, self._redis_threads(chosen))
        self._resources.push(self._loads)
        self._load_redis(redis, self._redis_share, progress, self._opened)
        if self._rocksdb is not None and chosen.cache_missed_embeddings:
            self._into_redis = CacheWriter(
                _Promoted(redis),
                self.tiers,
                self._settings.updates.promote_queue_keys,
                partial(count_promotion, self._metrics, redis.info.name),
            )
            self._resources.callback(self._into_redis.close)
        usage = Remembered(lambda: _usage(redis, list(self._files)), _LOOK_AGAIN_S, "redis-usage")
        self._resources.callback(usage.close)
        return TierStatus(
            guarded,
            redis.rows,
            state=lambda: guarded.state,
            size=lambda table: used.bytes if (used := (usage.value or {}).get(table)) else None,
            facts=lambda: {
                "layout": chosen.layout,
                "addresses": chosen.addresses,
                "reachable": usage.error is None,
                "problem": usage.error,
            },
        )

    def _redis_threads(self, chosen: RedisSettings) -> int:
        """Calls at a time. Beside RocksDB fewer than threads that ask, so that one is always left for rows
        that are on this machine, and one connection for writes."""
        threads = self._settings.tiers.lookup_threads
        if self._rocksdb is None:
            return min(threads + 1, chosen.connections)
        return max(1, min(threads - 1, chosen.connections - 1))

    def _load_redis(
        self, redis: RedisTier, share: float, progress: Progress, models: Sequence[OpenedTables]
    ) -> None:
        """Look at the tables and put a share of their rows there; later, if Redis is not there now."""

        def load(progress: Progress) -> None:
            for model in models:
                if not any(each is model for each in self._opened):
                    continue  # it has left
                if share > 0:
                    preload_tables(model.version, model.tables, redis, share, progress)
                for table in model.tables.values():
                    redis.check(table)

        try:
            load(progress)
        except TierError as error:
            if _NO_CLUSTER in str(error):
                raise ConfigError(
                    f"tiers.redis.mode is cluster, but that is a single server ({error}); set "
                    "tiers.redis.mode to single, in a ps.json by an override"
                ) from None
            if isinstance(error, TierMisfit) and self._rocksdb is None:
                raise  # nobody else has the rows
            message = f"{error}; served without it until it answers"
            log.warning("%s", message)
            self.warnings.append(message)
            again = Again(partial(load, NoProgress()), "hps-redis-load")
            self._loads.callback(again.close)

    # -- both --------------------------------------------------------------------------------------

    def _guarded(self, tier: Tier, guard: GuardSettings, threads: int) -> Guarded:
        """The guard around a tier, which alone closes it: never under a fetch that hangs."""
        guarded = Guarded(
            tier,
            guard.deadline_ms / 1e3,
            guard.failures_to_open,
            guard.retry_after_s,
            threads=guard.concurrency or threads,
            skipped=TierMeter(self._metrics, tier.info.name).passed_over,
        )
        self._resources.callback(guarded.close)
        return guarded


class _Promoted(Wrapper):
    """Redis as promotions write to it."""

    def __init__(self, redis: RedisTier) -> None:
        super().__init__(redis)
        self._redis = redis

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        self.inner.fetch(parts, ctx)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self._redis.promote(table, keys, vectors, versions)


class _Fed:
    """Redis as update streams write to it: a `PositionedStore` that is given a ``share`` of the rows."""

    def __init__(self, redis: RedisTier, share: float) -> None:
        self._redis = redis
        self._share = share
        self.applied = redis.applied

    def apply(
        self, table: EmbeddingTable, changes: TableChanges, positions: Sequence[StreamPosition]
    ) -> None:
        self._redis.apply(table, changes, positions, share=self._share)


def count_promotion(metrics: Metrics, tier: str, result: str, keys: int) -> None:
    """A promotion into ``tier`` had this ``result``; see `hps.updates.writer.Count`."""
    metrics.counter(m.PROMOTIONS, tier, result).add(keys)


def _usage(redis: RedisTier, tables: Sequence[EmbeddingTable]) -> dict[EmbeddingTable, Usage]:
    return {table: redis.usage(table) for table in tables}


def _figures(store: RocksDbTier) -> dict[str, Any]:
    """Space and compactions; empty when a broken tier cannot say."""
    try:
        return asdict(store.figures())
    except TierError:
        return {}
