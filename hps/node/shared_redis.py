"""The Redis that nodes share: what is loaded into it, when, and how lookups and streams use it.

It is on another machine, so a node starts without it, reports that, and uses it as soon as it responds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from hps.backoff import Backoff
from hps.config.schema import Settings
from hps.config.store_settings import GuardSettings
from hps.errors import ConfigError, ModelError, TierError, TierMisfit
from hps.models.preload import preload_tables
from hps.node.model_opening import HandleDamage, OpenedTables, raise_damage
from hps.node.tier_status import TierStatus
from hps.observability.meters import count_expired, count_promotion
from hps.observability.metrics import Metrics
from hps.periodic import PeriodicThread
from hps.tiers.background_refresh import BackgroundValue
from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.redis import RedisTier
from hps.tiers.wrappers import GuardedTier, PromotingTier, TierWrapper
from hps.types import EmbeddingTable, KeyArray, NoProgress, Progress, VectorArray, VersionArray
from hps.updates.cache_writer import CacheWriter, PromotionSources
from hps.updates.stream_positions import FedStore

if TYPE_CHECKING:
    from hps.tiers.redis.tables import RedisTableUsage

log = logging.getLogger(__name__)
# Largest age of what is reported of Redis.
_USAGE_MAX_AGE_S = 10.0
_LOAD_BACKOFF = Backoff(1.0, 30.0)
_NO_CLUSTER = "cluster support disabled"

Guard = Callable[[Tier, GuardSettings, int], GuardedTier]
"""``guard(tier, settings, threads)``: the guard around a tier, which closes it."""


class SharedRedis:
    """Redis as ``tier``, without its guard; ``status`` has the guarded one. ``resources`` closes it."""

    def __init__(
        self,
        settings: Settings,
        below: Sequence[Tier],
        models: Callable[[], Sequence[OpenedTables]],
        metrics: Metrics,
        resources: ExitStack,
        guard: Guard,
    ) -> None:
        """``below``: the node's own store, if any. ``models``: the models that are loaded now."""
        chosen = settings.tiers.redis
        assert chosen is not None
        self._chosen, self._settings, self._models = chosen, settings, models
        self._alone = not below
        self._loads = ExitStack()  # pending loads, also for models that are added later
        self._writer: CacheWriter | None = None
        self.tier = redis = RedisTier(chosen, partial(count_expired, metrics, "redis"))
        threads = calls_at_a_time(settings.tiers.lookup_threads, chosen.connections, self._alone)
        guarded = guard(redis, chosen.guard, threads)
        resources.push(self._loads)
        if below and chosen.cache_missed_embeddings:
            self._writer = CacheWriter(
                _PromotionTarget(redis),
                PromotionSources(below),
                settings.updates.promote_queue_keys,
                partial(count_promotion, metrics, redis.info.name),
            )
            resources.callback(self._writer.close)
        usage = BackgroundValue(self._usage, _USAGE_MAX_AGE_S, "redis-usage")
        resources.callback(usage.close)
        self.status = self._status(guarded, usage)

    def _status(
        self, guarded: GuardedTier, usage: BackgroundValue[dict[EmbeddingTable, RedisTableUsage]]
    ) -> TierStatus:
        chosen = self._chosen
        return TierStatus(
            guarded,
            self.tier.rows,
            state=lambda: guarded.state,
            exact=lambda _table: chosen.layout == "hps",  # in that layout, deletions leave no entry
            size=lambda table: used.bytes if (used := (usage.value or {}).get(table)) else None,
            facts=lambda: {
                "layout": chosen.layout,
                "addresses": chosen.addresses,
                "reachable": usage.error is None,
                "problem": usage.error,
            },
        )

    def load(
        self,
        models: Sequence[OpenedTables],
        progress: Progress,
        damaged: HandleDamage,
    ) -> str | None:
        """Check the tables and load a share of their rows.

        If Redis is unavailable now, a thread does it later, and the warning about it is returned.
        ``damaged`` is called for a model with damaged files, and may raise the error. Raises ConfigError,
        and TierError if no other store has the rows."""

        def load(progress: Progress, damaged: HandleDamage) -> None:
            for model in [*models]:
                if not any(each is model for each in self._models()):
                    continue  # it was removed
                try:
                    self._load(model, progress)
                except ModelError as error:
                    damaged(model, error)

        try:
            load(progress, damaged)
        except TierError as error:
            if _NO_CLUSTER in str(error):
                raise ConfigError(
                    f"tiers.redis.mode is cluster, but that is a single server ({error}); set "
                    "tiers.redis.mode to single, in a ps.json by an override"
                ) from None
            if isinstance(error, TierMisfit) and self._alone:
                raise  # no other store has the rows
            message = f"{error}; serving without it until it responds"
            log.warning("%s", message)
            self._load_later(partial(load, NoProgress(), raise_damage))
            return message
        return None

    def _load(self, model: OpenedTables, progress: Progress) -> None:
        if self._share > 0:
            preload_tables(model.version, model.tables, self.tier, self._share, progress)
        for table in model.tables.values():
            self.tier.check(table)

    def _load_later(self, load: Callable[[], None]) -> None:
        """Retry ``load`` on a thread until it does not raise TierError."""
        pauses_s = map(_LOAD_BACKOFF.pause_s, count(1))

        def retry() -> bool:
            try:
                load()
            except TierError as error:
                log.warning("%s; retrying", error)
                return True
            return False

        thread = PeriodicThread(retry, partial(next, pauses_s), "hps-redis-load", idle_rounds=1)
        self._loads.callback(thread.close)
        thread.start()

    def promoting(self, below: Tier) -> Tier:
        """Wrap ``below`` for lookups: rows that it has and Redis misses are copied into Redis."""
        if self._writer is None:
            return below
        return PromotingTier(below, self._writer.promote, self.tier.info.name)

    def promote_missing(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Promote rows that RocksDB held and Redis missed. The cache writer calls it.

        Only for tables whose lookups do not wait for rows: those that wait have promoted theirs already."""
        if self._writer is not None and table.miss.kind == "default_then_promote":
            self._writer.promote(table, keys)

    def update_target(self) -> FedStore:
        """Redis as a store that update streams are written to."""
        target = _StreamTarget(self.tier, self._streamed_share)
        return FedStore("redis", target, self.tier.layout == "native")

    @property
    def promotions_waiting(self) -> Mapping[str, int]:
        """Keys queued for a copy, by the tier that they go to."""
        return {self.tier.info.name: self._writer.waiting_keys} if self._writer else {}

    @property
    def _share(self) -> float:
        """Share of a table's rows that is loaded into Redis; all, if nodes have no other store.

        It follows from the settings, which are the same in a process without the nodes' RocksDB."""
        return self._chosen.initial_cache_rate if self._settings.tiers.rocksdb.enabled else 1.0

    @property
    def _streamed_share(self) -> float:
        """Share of streamed rows that Redis gets.

        All, where nodes copy rows from RocksDB into it: a node that does not have a skipped row yet
        could otherwise put its older row there, which would stay. All, too, where nodes only read their
        RocksDB: no other store gets the rows."""
        alone = self._settings.tiers.rocksdb.access != "primary"
        return 1.0 if alone or self._chosen.cache_missed_embeddings else self._share

    def _usage(self) -> dict[EmbeddingTable, RedisTableUsage]:
        tables = [table for model in self._models() for table in model.tables.values()]
        return {table: self.tier.usage(table) for table in tables}


def calls_at_a_time(threads: int, connections: int, alone: bool) -> int:
    """Number of ``threads`` that may call Redis at a time.

    With RocksDB fewer, so that one thread is always left for rows on this machine, and one connection
    for writes."""
    if alone:
        return min(threads + 1, connections)
    return max(1, min(threads - 1, connections - 1))


class _PromotionTarget(TierWrapper):
    """Redis as the target of promotions."""

    def __init__(self, redis: RedisTier) -> None:
        super().__init__(redis)
        self._redis = redis

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        self.inner.fetch(parts, ctx)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self._redis.promote(table, keys, vectors, versions)


class _StreamTarget:
    """Redis as the target of update streams: a `PositionedStore` that gets a ``share`` of the rows."""

    def __init__(self, redis: RedisTier, share: float) -> None:
        self._redis = redis
        self._share = share
        self.applied, self.identify, self.restart = redis.applied, redis.identify, redis.restart
        self.positions, self.versions = redis.positions, redis.versions

    def apply(
        self, table: EmbeddingTable, changes: TableChanges, positions: Sequence[StreamPosition]
    ) -> None:
        self._redis.apply(table, changes, positions, share=self._share)
