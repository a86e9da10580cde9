"""Fill a GPU cache of a given size with the rows that answer the most accesses."""

from __future__ import annotations

from collections.abc import Mapping

from hps.tiers.gpu.plan import GpuTablePlan, GpuTableRequest, device_bytes, plan_gpu
from hps.tools.plan.allocation import Allocation, AllocationPath, TableDemand
from hps.types import EmbeddingTable


def gpu_allocation(demands: Mapping[str, TableDemand], capacity_bytes: int) -> Allocation:
    """Return the rows of each table for the best GPU cache of at most ``capacity_bytes``.

    An LRU cache on a GPU has at most half a point fewer hits than the curve of an exact one
    (`benchmarks/gpu_policies.py`)."""
    path = AllocationPath(demands)
    low, high = 0, len(path) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if gpu_bytes(demands, path[middle]) <= capacity_bytes:
            low = middle
        else:
            high = middle - 1
    found: Allocation = path[low]
    return found


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
