"""Open the stores of a configuration alone: no caches, no network, no server.

Reading works while another process owns RocksDB; writing needs exclusive access."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from hps.cli.command_options import argument, option
from hps.cli.options import ReportOptions, SetOption, load_with_warnings
from hps.errors import ConfigError, HpsError, NotFound, TierError

if TYPE_CHECKING:
    from hps.config import Configuration
    from hps.models.repository import ModelVersion
    from hps.rows.files import FileRows
    from hps.rows.tiers import RedisRows, RocksDbRows
    from hps.types import EmbeddingTable


class TierName(StrEnum):
    redis = "redis"
    rocksdb = "rocksdb"


@dataclass(slots=True)
class ConfiguredModels:
    """The configured models' tables."""

    versions: dict[str, ModelVersion] = field(default_factory=dict)
    tables: dict[str, dict[str, EmbeddingTable]] = field(default_factory=dict)

    def all(self) -> list[EmbeddingTable]:
        return [table for tables in self.tables.values() for table in tables.values()]

    def chosen(self, model: str | None, table: str | None) -> list[EmbeddingTable]:
        """Tables of one model or all, of one name or all. Raises NotFound."""
        if model is None:
            return self.all()
        if model not in self.tables:
            there = ", ".join(self.tables) or "none"
            raise NotFound(f"no model {model!r} is configured; there is {there}")
        tables = self.tables[model]
        if table is None:
            return list(tables.values())
        if table not in tables:
            raise NotFound(f"model {model!r} has no table {table!r}; it has {', '.join(tables)}")
        return [tables[table]]

    def one(self, model: str, table: str) -> EmbeddingTable:
        (found,) = self.chosen(model, table)
        return found

    def files(self, table: EmbeddingTable) -> FileRows:
        from hps.rows.files import FileRows

        return FileRows(self.versions[table.model])


def read_config(config: Path, overrides: list[str] | None) -> Configuration:
    # The command reports a store's errors itself.
    logging.getLogger("hps").addHandler(logging.NullHandler())
    return load_with_warnings(config, overrides)


def open_models(configuration: Configuration) -> ConfiguredModels:
    """Open the versions that a start makes current: those chosen at run time, else those of the settings."""
    from hps.node.version_choice import ChoiceFile
    from hps.node.version_start import versions_at_start

    models = ConfiguredModels()
    start = versions_at_start(configuration, ChoiceFile(configuration.settings))
    for version in start.versions:
        if version.version == start.choices[version.name].current:
            models.versions[version.name] = version
            models.tables[version.name] = version.embedding_tables()
    return models


def chosen_tiers(configuration: Configuration, tier: TierName | None) -> list[TierName]:
    """Tiers to open, fastest first: ``tier``, or all that are configured.

    Raises ConfigError if ``tier`` is not configured, or no store is."""
    tiers = configuration.settings.tiers
    there = {TierName.redis: tiers.redis is not None, TierName.rocksdb: tiers.rocksdb.enabled}
    chosen = [name for name, enabled in there.items() if enabled and tier in (None, name)]
    if not chosen:
        raise ConfigError(_missing_tier(tier))
    return chosen


@contextmanager
def open_stores(
    configuration: Configuration,
    tier: TierName | None,
    *,
    writing: bool = False,
    repair: bool = False,
) -> Iterator[list[RedisRows | RocksDbRows]]:
    """Open ``tier``, or all configured stores, fastest first.

    ``repair``: open RocksDB although it is damaged. Raises ConfigError for a store that is not
    configured, TierError for a database that cannot be opened."""
    chosen = chosen_tiers(configuration, tier)
    with ExitStack() as resources:
        yield [
            _open_redis(configuration, resources)
            if name is TierName.redis
            else _open_rocksdb(configuration, resources, writing=writing, repair=repair)
            for name in chosen
        ]


@contextmanager
def open_store(
    configuration: Configuration,
    tier: TierName | None,
    *,
    writing: bool = False,
    repair: bool = False,
) -> Iterator[RedisRows | RocksDbRows]:
    """Open ``tier``, or by default the store that holds every row."""
    if tier is None and configuration.settings.tiers.rocksdb.enabled:
        tier = TierName.rocksdb
    with open_stores(configuration, tier, writing=writing, repair=repair) as stores:
        yield stores[-1]


def _missing_tier(tier: TierName | None) -> str:
    if tier is TierName.redis:
        return "tiers.redis is not configured: give its addresses, or another --tier"
    if tier is TierName.rocksdb:
        return "tiers.rocksdb.enabled is false: switch it on, or give another --tier"
    return "no store is configured: set tiers.redis or tiers.rocksdb"


def _open_redis(configuration: Configuration, resources: ExitStack) -> RedisRows:
    from hps.rows.tiers import RedisRows
    from hps.tiers.redis import RedisTier

    chosen = configuration.settings.tiers.redis
    assert chosen is not None
    tier = RedisTier(chosen)
    resources.callback(tier.close)
    return RedisRows(tier, chosen)


def _open_rocksdb(
    configuration: Configuration, resources: ExitStack, *, writing: bool, repair: bool
) -> RocksDbRows:
    from hps.rows.tiers import RocksDbRows
    from hps.tiers.mapped import MappedTier
    from hps.tiers.rocksdb import RocksDbTuning
    from hps.tiers.rocksdb.database_options import existing_families

    chosen = configuration.settings.tiers.rocksdb
    if not writing and not existing_families(chosen.path):
        raise NotFound(
            f"there is no database in {chosen.path} (tiers.rocksdb.path); `hps store load` makes it"
        )
    tier = MappedTier(
        chosen.path,
        maps=configuration.settings.tiers.mapped.enabled,
        layout=chosen.layout,
        access=chosen.access if writing else "read_only",
        tuning=RocksDbTuning(
            block_cache_bytes=chosen.block_cache_bytes,
            block_size=chosen.block_size,
            threads=chosen.threads,
            min_free_bytes=chosen.min_free_bytes,
        ),
        on_lost_writes="repair" if repair else chosen.on_lost_writes,
    )
    resources.callback(tier.close)
    return RocksDbRows(tier)


@dataclass(frozen=True, kw_only=True)
class StoreOptions(ReportOptions):
    """The configuration whose stores a command opens, and which of them."""

    tier: TierName | None = option(None, "--tier", "-t")
    """Only this store; default: all that are configured."""
    config: Path = option(MISSING, "--config", "-c", metavar="FILE")
    """The node's configuration."""
    overrides: SetOption = None

    def read(self) -> Configuration:
        return read_config(self.config, self.overrides)


@dataclass(frozen=True, kw_only=True)
class TableOptions(StoreOptions):
    """One table in the stores."""

    model: str = argument()
    """The model."""
    table: str = argument()
    """One of its tables; hps store ls lists them."""

    def find(self) -> tuple[Configuration, EmbeddingTable]:
        """Read the configuration, and find the table in its models."""
        configuration = self.read()
        return configuration, open_models(configuration).one(self.model, self.table)


@dataclass(frozen=True, kw_only=True)
class StoredTableOptions(TableOptions):
    """One table in one store."""

    tier: TierName | None = option(None, "--tier", "-t")
    """The store; default: rocksdb if it is enabled, else redis."""

    @contextmanager
    def open(
        self, *, writing: bool = False
    ) -> Iterator[tuple[RedisRows | RocksDbRows, EmbeddingTable]]:
        configuration, table = self.find()
        with open_store(configuration, self.tier, writing=writing) as store:
            yield store, table


@dataclass(frozen=True, kw_only=True)
class StoredTablesOptions(StoreOptions):
    """Some tables, or all, in one store."""

    model: str | None = argument(None)
    """Only this model's tables."""
    table: str | None = argument(None)
    """Only this table."""
    tier: TierName | None = option(None, "--tier", "-t")
    """The store; default: rocksdb if it is enabled, else redis."""


@contextmanager
def work() -> Iterator[None]:
    """Make errors in the block exit with code 1 instead of 2: the work has begun."""
    try:
        yield
    except TierError as error:
        raise HpsError(str(error)) from error
