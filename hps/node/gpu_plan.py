"""Plan of the GPU caches from a node's settings, checked against the memory of GPUs and host."""

from __future__ import annotations

from collections.abc import Mapping

from hps.config.schema import ModelOverride, Settings, TableOverride
from hps.cuda.layout import EvictionPolicy
from hps.errors import ConfigError
from hps.tiers.gpu.plan import GpuTableRequest, Plan, check_fits, check_pinned, plan_gpu
from hps.types import EmbeddingTable

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


def check_memory(plan: Plan, free_bytes: Mapping[int, int], free_host_bytes: int) -> None:
    """Raise ConfigError unless ``plan`` fits on each GPU, and its pinned rows of all GPUs on the host.

    ``free_bytes``: by the number of the GPU. Raises GpuUnavailable if a GPU has too little."""
    for device, free in free_bytes.items():
        check_fits(plan, free, device)
    check_pinned(plan, len(free_bytes), free_host_bytes)


def _table_request(settings: Settings, table: EmbeddingTable, rows: int) -> GpuTableRequest:
    chosen, models = settings.tiers.gpu, settings.models.serve or {}
    override = models.get(table.model) or ModelOverride()
    own = override.tables.get(table.name) or TableOverride()
    static = chosen.static if own.gpu_static is None else own.gpu_static
    policy = _POLICIES[own.gpu_eviction or chosen.eviction]
    return GpuTableRequest(rows, own.gpu_rows, own.gpu_share, policy, static)


def _check_static_tables(settings: Settings, plan: Plan) -> None:
    updates = settings.updates
    static = [table for table, planned in plan.items() if planned.static]
    if static and (updates.kafka or updates.directory):
        source = "updates.kafka" if updates.kafka else "updates.directory"
        raise ConfigError(
            f"table {static[0].id} is static in the GPU cache (gpu_static, tiers.gpu.static), which "
            f"takes no updates from {source}; serve it with gpu_static: false"
        )
