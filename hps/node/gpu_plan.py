"""Plan of the GPU caches from a node's settings, checked against the memory of GPUs and host."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from hps.config.schema import ModelOverride, Settings, TableOverride
from hps.cuda.layout import EvictionPolicy
from hps.errors import ConfigError, GpuUnavailable
from hps.tiers.gpu.plan import (
    LEFT_FREE,
    GpuTableRequest,
    Plan,
    check_fits,
    check_pinned,
    device_bytes,
    host_bytes_of,
    plan_gpu,
)
from hps.types import EmbeddingTable

_LEAST = 0.5
"""A version that is loaded later uses the GPUs if it gets this share of what a start would give it."""
TableRows = Mapping[EmbeddingTable, int]
"""The number of rows in the files of each table."""
_POLICIES = {"lru": EvictionPolicy.LRU, "lfu": EvictionPolicy.LFU, "version": EvictionPolicy.SCORE}


def plan_of_settings(
    settings: Settings, table_rows: Mapping[EmbeddingTable, int], free_bytes: int | None = None
) -> Plan:
    """Plan the caches of tables with ``table_rows`` rows; ``free_bytes`` as in `plan_gpu`.

    Raises ConfigError for settings that contradict each other."""
    chosen = settings.tiers.gpu
    plan = plan_gpu(
        {table: _table_request(settings, table, rows) for table, rows in table_rows.items()},
        capacity_bytes=chosen.capacity_bytes,
        host_bytes=chosen.host_bytes,
        share=chosen.share,
        free_bytes=free_bytes,
    )
    _check_static_tables(settings, plan)
    return plan


def plan_added_tables(
    settings: Settings, rows: tuple[TableRows, TableRows], plans: tuple[Plan, Plan], free_bytes: int
) -> tuple[Plan, str]:
    """Plan tables beside held ones. ``rows``: those of the new tables, and of held ones that stay; ``plans``:
    of the held ones, and of those that stay.

    They get what a start would give them beside those that stay, at most the memory that is left. Also
    returns a warning if that is less, else "". Raises GpuUnavailable if it is less than half."""
    chosen, (new, kept), (held, stay) = settings.tiers.gpu, rows, plans
    try:
        whole = plan_of_settings(settings, {**kept, **new}, free_bytes)
    except ConfigError as error:
        raise GpuUnavailable(
            f"the version's tables do not fit beside the others: {error}"
        ) from error
    wanted = {table: whole[table] for table in new}
    left, within = int((1 - LEFT_FREE) * free_bytes), -1
    if chosen.share is None:
        within = max(0, chosen.capacity_bytes - device_bytes(stay))
        left = min(left, within)
    if device_bytes(wanted) <= left:
        return wanted, ""
    requests = {table: _table_request(settings, table, n) for table, n in new.items()}
    host_bytes = max(0, chosen.host_bytes - host_bytes_of(held))
    plan: Plan = {}
    with suppress(ConfigError):  # tables with sizes of their own do not fit
        plan = plan_gpu(requests, capacity_bytes=left, host_bytes=host_bytes, free_bytes=free_bytes)
    share = device_bytes(plan) / device_bytes(wanted)
    if share >= _LEAST:
        return plan, (
            f"the GPU caches have memory for {100 * share:.0f} % of what a start would give the version: "
            "others hold the rest; the next start divides it again"
        )
    remedy = (
        "raise tiers.gpu.capacity_bytes, or start the node again, which divides it among all versions"
        if left == within
        else "lower tiers.gpu.capacity_bytes so that two versions fit the GPU, and models.rollback_s to free "
        "the former one sooner"
    )
    raise GpuUnavailable(
        f"the GPU caches have {left:,} bytes left for this version, and a start would give it "
        f"{device_bytes(wanted):,}: other versions hold {device_bytes(held):,}. Unload one of them, or "
        + remedy
    )


def check_memory(plan: Plan, free_bytes: Mapping[int, int], free_host_bytes: int) -> None:
    """Raise ConfigError unless ``plan`` fits on each GPU, and its pinned rows of all GPUs on the host.

    ``free_bytes``: by the number of the GPU. Raises GpuUnavailable if a GPU has too little."""
    for device, free in free_bytes.items():
        check_fits(plan, free, device)
    check_pinned(plan, len(free_bytes), free_host_bytes)


def is_kept_out(settings: Settings, table: EmbeddingTable) -> bool:
    """True if the settings keep ``table`` out of the GPU caches."""
    return _override(settings, table).gpu_rows == 0


def _override(settings: Settings, table: EmbeddingTable) -> TableOverride:
    override = (settings.models.serve or {}).get(table.model) or ModelOverride()
    return override.tables.get(table.name) or TableOverride()


def _table_request(settings: Settings, table: EmbeddingTable, rows: int) -> GpuTableRequest:
    chosen, own = settings.tiers.gpu, _override(settings, table)
    static = chosen.static if own.gpu_static is None else own.gpu_static
    policy = _POLICIES[own.gpu_eviction or chosen.eviction]
    return GpuTableRequest(rows, own.gpu_rows, own.gpu_share, policy, static)


def _check_static_tables(settings: Settings, plan: Plan) -> None:
    updates = settings.updates
    static = [table for table, planned in plan.items() if planned.static]
    for table in static:
        if table.ttl_s is not None:
            raise ConfigError(
                f"table {table.id} is static in the GPU cache (gpu_static, tiers.gpu.static), which keeps "
                f"its rows, but has ttl_s: {table.ttl_s:g}; serve it with gpu_static: false, or remove ttl_s"
            )
    if static and (updates.kafka or updates.directory):
        source = "updates.kafka" if updates.kafka else "updates.directory"
        raise ConfigError(
            f"table {static[0].id} is static in the GPU cache (gpu_static, tiers.gpu.static), which "
            f"takes no updates from {source}; serve it with gpu_static: false"
        )
