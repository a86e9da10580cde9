"""How much of each table the CPU cache keeps, as the settings say."""

from __future__ import annotations

from collections.abc import Mapping

from hps.config.cache_settings import Eviction
from hps.config.schema import ModelOverride, Settings, TableOverride
from hps.tiers.capacity import Rows, plan_capacity
from hps.types import EmbeddingTable


def planned_rows(settings: Settings, table_rows: Mapping[EmbeddingTable, int]) -> Rows:
    """The cache's memory shared out over tables that have so many rows; overrides by table come first."""
    chosen = settings.tiers.cpu_cache
    overrides = {table: _override(settings, table) for table in table_rows}
    return plan_capacity(
        table_rows,
        capacity_bytes=chosen.capacity_bytes,
        share=chosen.share,
        rows={t: o.cache_rows for t, o in overrides.items() if o.cache_rows is not None},
        shares={t: o.cache_share for t, o in overrides.items() if o.cache_share is not None},
    )


def eviction_of(settings: Settings, table: EmbeddingTable) -> Eviction | None:
    """Which row of ``table`` makes room, where that is said of it."""
    return _override(settings, table).cache_eviction


def _override(settings: Settings, table: EmbeddingTable) -> TableOverride:
    override = (settings.models.serve or {}).get(table.model) or ModelOverride()
    return override.tables.get(table.name) or TableOverride()
