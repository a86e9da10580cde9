"""Fill a GPU cache of a given size with the rows that answer the most accesses."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from hps.errors import ConfigError
from hps.node.gpu_caches import is_gpu_expected
from hps.node.gpu_plan import plan_of_settings
from hps.tiers.gpu.plan import GpuTablePlan, GpuTableRequest, device_bytes, plan_gpu
from hps.tools.plan.allocation import Allocation, AllocationPath, TableDemand, hit_rate
from hps.tools.plan.model import PlannedModel
from hps.types import EmbeddingTable


@dataclass(frozen=True, slots=True)
class GpuCachePlan:
    """A GPU cache with ``rows`` of each table in ``bytes`` of each GPU's memory; no rows: none."""

    rows: Allocation
    bytes: int


NO_GPU = GpuCachePlan({}, 0)


def gpu_allocation(
    demands: Mapping[str, TableDemand], capacity_bytes: int | None, least_hits: float | None = None
) -> Allocation:
    """Return the rows of each table for the best GPU cache of at most ``capacity_bytes``.

    ``least_hits``: for the smallest one that answers this share of the keys. An LRU cache on a GPU has at
    most half a point fewer hits than the curve of an exact one (`benchmarks/gpu_policies.py`). Raises
    ConfigError if none answers as much."""
    path = AllocationPath(demands)
    found: Allocation = path[-1]
    if capacity_bytes is not None:
        fitting = bisect_right(path, capacity_bytes, key=lambda rows: gpu_bytes(demands, rows))
        found = path[max(0, fitting - 1)]
    if least_hits is None:
        return found
    if (most := hit_rate(demands, found)) < least_hits:
        within = "" if capacity_bytes is None else f" within {capacity_bytes:,} bytes"
        raise ConfigError(
            f"no GPU cache{within} meets the target of hit rate {least_hits:.4g}, reached {most:.4f}"
        )
    at = bisect_left(path, least_hits, key=lambda rows: hit_rate(demands, rows))
    smallest: Allocation = path[min(at, len(path) - 1)]
    return smallest


def configured_gpu(model: PlannedModel) -> GpuCachePlan:
    """Return the GPU cache of the settings, if they describe one or this machine has a GPU.

    By the rules of a start, for a GPU with enough free memory. Raises ConfigError."""
    if not is_gpu_expected(model.settings.tiers.gpu):
        return NO_GPU
    plan = plan_of_settings(model.settings, {t.table: t.rows for t in model.tables.values()})
    return GpuCachePlan({table.name: each.rows for table, each in plan.items()}, device_bytes(plan))


def gpu_bytes(demands: Mapping[str, TableDemand], rows: Allocation) -> int:
    """Return the device memory of a GPU cache with ``rows`` of each table, as the node plans it."""
    return device_bytes(_plan(demands, rows))


def _plan(
    demands: Mapping[str, TableDemand], rows: Allocation
) -> dict[EmbeddingTable, GpuTablePlan]:
    requests = {
        d.table: GpuTableRequest(d.curve.table_rows, rows=rows.get(name, 0))
        for name, d in demands.items()
    }
    return plan_gpu(requests, capacity_bytes=1 << 62)
