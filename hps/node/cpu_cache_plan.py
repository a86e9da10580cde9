"""Plan of the CPU cache from a node's settings: memory, and capacity and eviction policy per table."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hps.config import Settings
from hps.config.cache_settings import CpuCacheSettings, Eviction
from hps.config.schema import ModelOverride, TableOverride
from hps.errors import ConfigError
from hps.native import cache_bytes
from hps.tiers.capacity import TABLE_BYTES, Rows, plan_capacity, slot_bytes
from hps.tiers.cpu.cache_memory import CacheMemory
from hps.tiers.cpu.segments import Segments
from hps.types import EmbeddingTable

_LEAST_SHARE, _LEAST_ROWS = 1 / 8, 1024
"""Of a table whose file is in memory, the cache has room for this share and number of rows at least."""
_BYTES_SHARE = 1 / 2
"""Share of the cache's bytes for all such tables; the other half is for another version of theirs."""


def cache_memory(chosen: CpuCacheSettings) -> CacheMemory:
    """Memory of the CPU cache."""
    segments, shared = None, chosen.shared
    if shared.name is not None:
        segments = Segments(shared.name, shared.folder, take_over=shared.take_over)
    return CacheMemory(segments, chosen.huge_pages, chosen.numa_node)


def plan_rows(
    settings: Settings,
    table_rows: Mapping[EmbeddingTable, int],
    in_memory: Collection[EmbeddingTable] = (),
) -> Rows:
    """Share the cache's memory out over tables of ``table_rows`` rows; overrides come first.

    Tables whose files are ``in_memory`` count with all rows if half of the bytes is enough for these, else
    with a part: the cache has only rows that updates have changed, in memory that grows with them."""
    chosen = settings.tiers.cpu_cache
    overrides = {table: _override(settings, table) for table in table_rows}
    if chosen.share is None:
        counted = {
            table: rows
            for table, rows in table_rows.items()
            if table in in_memory and overrides[table].cache_share is None
        }
        whole = sum(slot_bytes(table) * rows for table, rows in counted.items())
        share = _BYTES_SHARE * chosen.capacity_bytes / max(1, whole)
        table_rows = {
            table: changed_rows(rows, share) if table in counted else rows
            for table, rows in table_rows.items()
        }
    return plan_capacity(
        table_rows,
        capacity_bytes=chosen.capacity_bytes,
        share=chosen.share,
        rows={t: o.cache_rows for t, o in overrides.items() if o.cache_rows is not None},
        shares={t: o.cache_share for t, o in overrides.items() if o.cache_share is not None},
    )


def changed_rows(rows: int, share: float = _LEAST_SHARE) -> int:
    """Capacity for changed rows of a table of ``rows`` rows whose mapped file lookups read directly.

    ``share``: of the rows, if there is room for more than an eighth."""
    return min(rows, max(_LEAST_ROWS, int(max(_LEAST_SHARE, share) * rows)))


def plan_rows_for_new_model(
    settings: Settings,
    table_rows: Mapping[EmbeddingTable, int],
    new: Collection[EmbeddingTable],
    held: Mapping[EmbeddingTable, int],
    in_memory: Collection[EmbeddingTable] = (),
) -> tuple[Rows, str]:
    """Plan rows for the ``new`` tables, next to others with a capacity of ``held`` rows; see `plan_rows`.

    The new tables get at most the memory that the others leave. Also returns a warning if that is less
    than a start would give, else "". A configured share of a table's rows is granted whatever it costs."""
    whole = plan_rows(settings, table_rows, in_memory)
    plan = {table: whole[table] for table in new}
    chosen = settings.tiers.cpu_cache
    if chosen.share is not None:
        return plan, ""
    taken = sum(slot_bytes(table) * rows + TABLE_BYTES for table, rows in held.items() if rows)
    left = max(0, chosen.capacity_bytes - taken - TABLE_BYTES * len(plan))
    wanted = sum(slot_bytes(table) * rows for table, rows in plan.items())
    if wanted <= left:
        return plan, ""
    fraction = left / wanted
    warning = (
        f"the model gets {int(100 * fraction)} % of the CPU cache capacity that a start would give it: "
        "other models and versions hold the rest of tiers.cpu_cache.capacity_bytes; the next start "
        "divides it again"
    )
    return {table: int(fraction * rows) for table, rows in plan.items()}, warning


def check_host_memory(plan: Rows, free_bytes: int) -> None:
    """Raise ConfigError unless tables of ``plan`` fit into ``free_bytes`` of memory.

    Their pages are taken as rows arrive: later the system would end a process, which may be this one."""
    needed = sum(cache_bytes(rows, table.row_bytes) for table, rows in plan.items() if rows)
    if needed > free_bytes:
        raise ConfigError(
            f"the version needs {needed:,} bytes for its part of the CPU cache, beside the versions that are "
            f"served, and {free_bytes:,} bytes of memory are left. Unload a version or a model, lower "
            "models.rollback_s, so that former versions are freed sooner, or lower tiers.cpu_cache "
            "(capacity_bytes or share)"
        )


def is_cached(settings: Settings, table: EmbeddingTable) -> bool:
    """False if the settings keep ``table`` out of the cache."""
    return _override(settings, table).cache_rows != 0


def eviction_of(settings: Settings, table: EmbeddingTable) -> Eviction | None:
    """The eviction policy set for ``table``; None for the default."""
    return _override(settings, table).cache_eviction


def admit_after(settings: Settings, table: EmbeddingTable) -> int:
    """The misses after which a row of ``table`` enters the caches."""
    return _override(settings, table).cache_admit_after


def _override(settings: Settings, table: EmbeddingTable) -> TableOverride:
    override = (settings.models.serve or {}).get(table.model) or ModelOverride()
    return override.tables.get(table.name) or TableOverride()
