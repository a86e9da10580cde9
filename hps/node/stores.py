"""Stores of a node: Redis (`hps.node.shared_redis`), then RocksDB, with their guards. Either may be absent.

RocksDB's tables may be in mapped files (`hps.tiers.mapped`). It must be available when the node opens.
Redis need not be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from hps.config.schema import Settings
from hps.config.store_settings import GuardSettings, RocksDbSettings
from hps.errors import ModelError, TierError, Unavailable
from hps.models.check import check_disjoint_tables
from hps.models.loader import load_tables, open_mapped_tables, version_of_rows
from hps.models.remote import repository_of
from hps.models.tables import TableFiles
from hps.node.mapped_files import shared_folder, verify_served
from hps.node.model_opening import HandleDamage, OpenedTables, raise_damage, tables_of
from hps.node.store_damage import damage_text
from hps.node.tier_status import TierStatus
from hps.observability import metric_names as m
from hps.observability.meters import TierMeter
from hps.observability.metrics import Metrics
from hps.rows.leftovers import unserved_families
from hps.tiers.base import Tier
from hps.tiers.chain import TierChain
from hps.tiers.mapped.verified_files import VerifiedFiles
from hps.tiers.single_flight import SingleFlight
from hps.tiers.wrappers import GuardedTier, MeteredTier
from hps.types import EmbeddingTable, KeyArray, Progress
from hps.updates.cache_writer import PromotionSources
from hps.updates.followed_store import FollowedStore
from hps.updates.stream_positions import FedStore

if TYPE_CHECKING:
    from hps.node.shared_redis import SharedRedis
    from hps.tiers.mapped import MappedFileTier, MappedTier
    from hps.tiers.mapped.overlaid_table import OverlaidTable
    from hps.tiers.rocksdb import CheckpointFolder

log = logging.getLogger(__name__)


class NodeStores:
    """Stores of a node: call `open`; ``resources`` closes them.

    ``statuses`` lists them fastest first, each behind its guard."""

    def __init__(
        self,
        settings: Settings,
        opened: Sequence[OpenedTables],
        metrics: Metrics,
        resources: ExitStack,
    ) -> None:
        self._settings = settings
        self._opened = opened
        self._served = opened  # its owner keeps it up to date
        self._changing = Lock()  # one model may be removed while another is added
        self._metrics = metrics
        self._resources = resources
        self._files: dict[EmbeddingTable, TableFiles] = {
            table: model.version.tables[name]
            for model in opened
            for name, table in model.tables.items()
        }
        self._rocksdb: MappedTier | None = None
        self._mapped: MappedFileTier | None = None
        self._redis: SharedRedis | None = None
        self.followed: FollowedStore | None = None
        """The store that other processes feed, while this node reads the streams for its caches alone."""
        self.verified_files = VerifiedFiles()
        self.statuses: list[TierStatus] = []
        self.warnings: list[str] = []

    def open(
        self,
        progress: Progress,
        *,
        shared_only: bool = False,
        leave_out: HandleDamage = raise_damage,
    ) -> None:
        """Open the stores and load the models' rows.

        ``shared_only``: without the node's own RocksDB, for a process that is no node. A model for which
        ``leave_out`` does not raise is removed again. Raises ConfigError, ModelError or TierError; never
        because Redis is unavailable."""
        tiers = self._settings.tiers

        def remove(model: OpenedTables, error: ModelError) -> None:
            leave_out(model, error)
            self.remove(model)

        if tiers.rocksdb.enabled and not shared_only:
            self.statuses.append(self._open_rocksdb(tiers.rocksdb, progress, remove))
        elif tiers.redis is None:
            self.statuses.append(self._open_mapped(remove))
        if tiers.redis is not None:
            self._redis = self._open_redis()
            self._load_redis(self._opened, progress, remove)
            self.statuses.insert(0, self._redis.status)
        if self._settings.updates.kafka is not None and not self.update_targets(shared=False):
            self.followed = self._follow()

    def add(self, model: OpenedTables, progress: Progress) -> None:
        """Add another model's tables with their rows, while the stores are in use.

        Raises as `open`; rows loaded by then stay, and are not loaded again."""
        files = {table: model.version.tables[name] for name, table in model.tables.items()}
        with self._changing:
            self._files = self._files | files
            self._opened = [*self._opened, model]
        try:
            if self._rocksdb is not None:
                self._load_rocksdb(self._rocksdb, progress, model)
            if self._mapped is not None:
                open_mapped_tables(model.version, model.tables.values(), self._mapped)
            self._load_redis([model], progress, raise_damage)
        except BaseException:
            self.remove(model)
            raise

    def remove(self, model: OpenedTables) -> None:
        """Remove a model's tables, which no lookup uses, except those that other models share.

        Their rows stay."""
        with self._changing:
            tables = self.unshared_tables(model)
            self._opened = [each for each in self._opened if each is not model]
            removed = set(tables)
            self._files = {t: files for t, files in self._files.items() if t not in removed}
        if self.followed is not None:
            self.followed.free(tables)
        if self._mapped is not None:
            self._mapped.release(*tables)
        if self._rocksdb is None:
            return
        try:
            self._rocksdb.release(*tables)
        except TierError as error:
            log.warning("%s", error)

    def drop_rows(self, tables: Sequence[EmbeddingTable]) -> None:
        """Delete the rows of tables that no model has, in the node's own RocksDB.

        Other nodes may need those in Redis. Raises TierError."""
        used = {table.id for table in self.tables}
        if self.written is not None:
            self.written.drop(*(table for table in tables if table.id not in used))

    def unshared_tables(self, model: OpenedTables) -> list[EmbeddingTable]:
        """The tables of a model that no other model in the stores has."""
        others = set(tables_of(each for each in self._opened if each is not model))
        return [table for table in model.tables.values() if table not in others]

    @property
    def tables(self) -> list[EmbeddingTable]:
        """All tables that lookups may ask for: from `add` until `remove`."""
        return list(self._files)

    @property
    def checkpoints(self) -> CheckpointFolder | None:
        """Checkpoints of RocksDB; None if the settings name no folder for them."""
        folder = self._settings.tiers.rocksdb.checkpoints
        if self._rocksdb is None or folder is None:
            return None
        from hps.tiers.rocksdb import CheckpointFolder

        return CheckpointFolder(folder, self._rocksdb.path, self._rocksdb.checkpoint)

    @property
    def tiers(self) -> list[Tier]:
        """The guarded stores, fastest first."""
        return [status.tier for status in self.statuses]

    def lookup_tier(self) -> Tier:
        """The stores as one tier for lookups: in order, each with its meter, single flight per key."""
        shared = self._metrics.counter(m.LOOKUP_SHARED)
        metered: list[Tier] = [
            MeteredTier(tier, TierMeter(self._metrics, tier.info.name)) for tier in self.tiers
        ]
        if self._redis is not None:
            metered[-1] = self._redis.promoting(metered[-1])
        return SingleFlight(TierChain(metered), shared.add)

    def promote_missing(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """See `SharedRedis.promote_missing`."""
        if self._redis is not None:
            self._redis.promote_missing(table, keys)

    @property
    def written(self) -> MappedTier | None:
        """The node's own store, if this node is the one that writes it."""
        own = self._rocksdb
        return own if own is not None and own.access == "primary" else None

    def update_targets(self, *, shared: bool) -> list[FedStore]:
        """Stores that update streams are written to: the node's own, or the shared ones."""
        if shared:
            return [] if self._redis is None else [self._redis.update_target()]
        return [] if self.written is None else [self._as_store(self.written)]

    @property
    def promotion_sources(self) -> PromotionSources:
        """Stores that promotions into the caches read."""
        tiers, followed = list(self.tiers), self.followed
        own = tiers[-1] if self._rocksdb is not None or self._mapped is not None else None
        if followed is not None:
            at = tiers.index(followed.inner)
            tiers[at] = followed
            own = None if followed.info.shared else followed
        reads = self._settings.updates.kafka or self._settings.updates.directory
        return PromotionSources(tuple(tiers), own, reads is not None)

    def _follow(self) -> FollowedStore | None:
        """Return the store to follow: RocksDB where it follows a primary, else Redis."""
        if self._rocksdb is not None and self._rocksdb.access == "secondary":
            return FollowedStore(self.tiers[-1], self._as_store(self._rocksdb))
        return (
            None
            if self._redis is None
            else FollowedStore(self.tiers[0], self._redis.update_target())
        )

    def _as_store(self, rocksdb: MappedTier) -> FedStore:
        return FedStore("rocksdb", rocksdb, self._settings.tiers.rocksdb.layout == "native")

    def damage(self) -> str:
        """Known damage of the node's own store, and the remedy; empty if none."""
        return damage_text(self._rocksdb, self._mapped)

    def not_ready_reason(self) -> str:
        """`damage`, if it makes the node not ready; else empty."""
        settings = self._settings.tiers.rocksdb
        return self.damage() if settings.on_corruption == "not_ready" else ""

    def on_damage(self, changed: Callable[[], None]) -> None:
        """Call ``changed``, on any thread, when more damage is found."""
        store = self._rocksdb or self._mapped
        if store is not None:
            store.damage.changed = changed

    def is_mapped(self, table: EmbeddingTable) -> bool:
        """Return whether a table is served from a mapped file."""
        alone = self._mapped is not None
        return alone if self._rocksdb is None else self._rocksdb.is_mapped(table)

    def mapped_file(self, table: EmbeddingTable) -> OverlaidTable | None:
        """The mapped file of a table, with its delta; None for a table that is served from no file."""
        store = self._rocksdb or self._mapped
        return None if store is None else store.mapped(table)

    def direct_file(self, table: EmbeddingTable) -> OverlaidTable | None:
        """The mapped file of a table whose bits say which rows are the newest ones.

        None for other tables, and if other processes may write a store: the bits do not show that."""
        mapped = None if self._redis is not None else self.mapped_file(table)
        return mapped if mapped is not None and not mapped.asks_first else None

    def populate(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Read a mapped table's rows of ``keys (n,)`` into memory, unless the table was removed."""
        if table in self._files and (mapped := self.mapped_file(table)) is not None:
            mapped.populate(table.narrow(keys))

    @property
    def promotions_waiting(self) -> Mapping[str, int]:
        """Keys queued for a copy, by the tier that they go to."""
        return {} if self._redis is None else self._redis.promotions_waiting

    def rows(self, table: EmbeddingTable) -> int:
        """Upper bound of a table's rows: its files', or RocksDB's if streams have added more."""
        rows = self._files[table].rows
        return rows if self._rocksdb is None else max(rows, self._rocksdb.entries(table))

    def version_of_rows(self, table: EmbeddingTable) -> int | None:
        """The version of all rows of the table's files, if the stores hold exactly those; else None.

        None always if other processes may write to a store: then only the stores know the versions."""
        if self._mapped is not None:
            mapped, files = self._mapped.mapped(table), self._files[table]
            return mapped.version if mapped and mapped.rows == files.rows else None
        if self._rocksdb is None or self._redis is not None:
            return None
        return version_of_rows(self._rocksdb, table, self._files[table])

    def _open_rocksdb(
        self, chosen: RocksDbSettings, progress: Progress, leave_out: HandleDamage
    ) -> TierStatus:
        from hps.tiers.mapped import MappedTier
        from hps.tiers.rocksdb import RocksDbTuning

        store = self._rocksdb = MappedTier(
            chosen.path,
            maps=self._settings.tiers.mapped.enabled,
            shared=shared_folder(self._settings),
            layout=chosen.layout,
            access=chosen.access,
            tuning=RocksDbTuning(
                chosen.block_cache_bytes,
                chosen.block_size,
                chosen.threads,
                chosen.mmap_reads,
                chosen.min_free_bytes,
                chosen.catch_up_s,
            ),
            on_lost_writes=chosen.on_lost_writes,
        )
        # Threads: those of lookups, and two cache writers.
        guarded = self._guarded(store, chosen.guard, self._settings.tiers.lookup_threads + 2)
        store.open_tables(list(self._files))
        self._load_each(partial(self._load_rocksdb, store, progress), leave_out)
        verify_served(self._settings, store, self._served, self.verified_files, self._resources)
        if (chosen.layout, chosen.access) == ("native", "primary"):
            served = {(m.version.name, n) for m in self._opened for n in m.table_versions}
            models = self._settings.models
            repository = repository_of(models)
            with suppress(Unavailable):  # of a remote repository
                if warning := unserved_families(store.families(), served, repository):
                    self.warnings.append(warning)
        return TierStatus(
            guarded,
            store.rows,
            state=lambda: guarded.state,
            facts=lambda: {"layout": chosen.layout, **_figures(store)},
            exact=store.rows_exact,
        )

    def _open_mapped(self, leave_out: HandleDamage) -> TierStatus:
        """Serve the mapped files alone: there is no store for rows that are written later."""
        from hps.tiers.mapped import MappedFileTier

        tiers = self._settings.tiers
        store = self._mapped = MappedFileTier(shared=shared_folder(self._settings))
        self._load_each(
            lambda each: open_mapped_tables(each.version, each.tables.values(), store), leave_out
        )
        guarded = self._guarded(store, tiers.rocksdb.guard, tiers.lookup_threads + 2)
        verify_served(self._settings, store, self._served, self.verified_files, self._resources)
        return TierStatus(guarded, store.rows, state=lambda: guarded.state)

    def _load_each(self, load: Callable[[OpenedTables], None], leave_out: HandleDamage) -> None:
        for model in [*self._opened]:
            try:
                load(model)
            except ModelError as error:
                leave_out(model, error)

    def _load_rocksdb(self, store: MappedTier, progress: Progress, model: OpenedTables) -> None:
        if self._settings.tiers.rocksdb.load:
            load_tables(model.version, model.tables, store, progress)
            return
        store.open_tables(list(model.tables.values()))
        for name, table in model.tables.items():
            store.check(table)
            check_disjoint_tables(model.version.tables[name], table.key_bits)

    def _open_redis(self) -> SharedRedis:
        from hps.node.shared_redis import SharedRedis

        return SharedRedis(
            self._settings,
            self.tiers,
            lambda: self._opened,
            self._metrics,
            self._resources,
            self._guarded,
        )

    def _load_redis(
        self, models: Sequence[OpenedTables], progress: Progress, damaged: HandleDamage
    ) -> None:
        if self._redis is not None and (warning := self._redis.load(models, progress, damaged)):
            self.warnings.append(warning)

    def _guarded(self, tier: Tier, guard: GuardSettings, threads: int) -> GuardedTier:
        """Guard a tier. Only the guard closes it, never while a fetch hangs."""
        guarded = GuardedTier(
            tier,
            guard.deadline_ms / 1e3,
            guard.failures_to_open,
            guard.retry_after_s,
            threads=guard.concurrency or threads,
            on_skip=TierMeter(self._metrics, tier.info.name).passed_over,
        )
        self._resources.callback(guarded.close)
        return guarded


def _figures(store: MappedTier) -> dict[str, Any]:
    """Disk space, compactions and mapped tables; empty if the store fails."""
    try:
        return {**asdict(store.figures()), **asdict(store.mapped_figures())}
    except TierError:
        return {}
