"""Capacity planning of the GPU cache: rows per table, on the device or in host memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hps.cuda.layout import EvictionPolicy, GpuTableShape, plan_table_shape
from hps.errors import ConfigError
from hps.tiers.capacity import EMPTY_TABLE_ROWS
from hps.types import EmbeddingTable

_STEPS = 40  # bisection steps: find a share to 12 digits


@dataclass(frozen=True, slots=True)
class GpuTableRequest:
    """The settings of one table, which has ``table_rows`` rows.

    ``rows`` or ``share``: a capacity of its own, if set. ``static``: the capacity is all rows."""

    table_rows: int
    rows: int | None = None
    share: float | None = None
    policy: EvictionPolicy = EvictionPolicy.LRU
    static: bool = False


@dataclass(frozen=True, slots=True)
class GpuTablePlan:
    """One table's capacity: ``rows`` (0: none), ``host_rows`` of them in pinned host memory."""

    rows: int
    host_rows: int
    policy: EvictionPolicy
    static: bool

    def shape(self, table: EmbeddingTable) -> GpuTableShape | None:
        if not self.rows:
            return None
        scored = self.policy is EvictionPolicy.SCORE
        return plan_table_shape(table, self.rows, self.host_rows, static=self.static, scored=scored)


Plan = dict[EmbeddingTable, GpuTablePlan]


def plan_gpu(
    requests: Mapping[EmbeddingTable, GpuTableRequest],
    *,
    capacity_bytes: int,
    host_bytes: int = 0,
    share: float | None = None,
) -> Plan:
    """Plan the capacities of all tables, as large as the sizes allow.

    A table with a capacity of its own gets exactly that. All others get the same share of their rows:
    ``share``, else the largest share for which everything fits into ``capacity_bytes`` on the device. Up to
    ``host_bytes`` of the rows, the same fraction of each table, are placed in pinned host memory. An empty
    table counts as `EMPTY_TABLE_ROWS`. Raises ConfigError if ``share`` is not set and the tables with their
    own capacities alone exceed ``capacity_bytes``."""
    if share is not None:
        return _plan_at(requests, share, host_bytes)
    if _fits(plan := _plan_at(requests, 1.0, host_bytes), capacity_bytes):
        return plan
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _fits(_plan_at(requests, middle, host_bytes), capacity_bytes):
            low = middle
        else:
            high = middle
    plan = _plan_at(requests, low, host_bytes)
    own_size = {t: p for t, p in plan.items() if _has_own_size(requests[t])}
    if own_size and not _fits(own_size, capacity_bytes):
        raise ConfigError(
            f"tiers.gpu: the tables with gpu_rows, gpu_share or gpu_static take {device_bytes(own_size):,} "
            f"bytes of the GPU's memory, and tiers.gpu.capacity_bytes is {capacity_bytes:,}; raise it to "
            "that, or ask for less"
        )
    return plan


def check_fits(plan: Plan, free_bytes: int, device: int) -> None:
    """Raise ConfigError, with both sizes, unless ``plan`` fits into the free memory of ``device``."""
    needed = device_bytes(plan)
    if needed <= free_bytes:
        return
    largest = max(plan, key=lambda t: device_bytes({t: plan[t]}))
    size = device_bytes({largest: plan[largest]})
    raise ConfigError(
        f"the GPU cache needs {needed:,} bytes on GPU {device}, and {free_bytes:,} are free there; the "
        f"largest table is {largest.id} with {plan[largest].rows:,} rows in {size:,} bytes. Lower "
        f"tiers.gpu.capacity_bytes to at most {free_bytes:,}"
        + (", or serve it without gpu_static" if plan[largest].static else ", or tiers.gpu.share")
    )


def device_bytes(plan: Plan) -> int:
    """Return the bytes of device memory that ``plan`` needs."""
    return sum(s.bytes for t, p in plan.items() if (s := p.shape(t)) is not None)


def host_bytes_of(plan: Plan) -> int:
    """Return the bytes of pinned host memory that ``plan`` needs per device."""
    return sum(s.host_bytes for t, p in plan.items() if (s := p.shape(t)) is not None)


def _has_own_size(request: GpuTableRequest) -> bool:
    return request.static or request.rows is not None or request.share is not None


def _fits(plan: Plan, capacity_bytes: int) -> bool:
    return device_bytes(plan) <= capacity_bytes


def _plan_at(
    requests: Mapping[EmbeddingTable, GpuTableRequest], share: float, host_bytes: int
) -> Plan:
    rows = {table: _rows(request, share) for table, request in requests.items()}
    movable = [table for table, request in requests.items() if not request.static]
    total = sum(_row_bytes(movable, rows))
    part = min(1.0, host_bytes / total) if total else 0.0
    return {
        table: GpuTablePlan(
            rows[table],
            0 if request.static else int(part * rows[table]),
            request.policy,
            request.static and rows[table] > 0,
        )
        for table, request in requests.items()
    }


def _rows(request: GpuTableRequest, share: float) -> int:
    table_rows = request.table_rows
    if request.static:
        return table_rows
    if request.rows is not None:
        return request.rows
    if request.share is not None:
        return math.ceil(request.share * (table_rows or EMPTY_TABLE_ROWS))
    return int(share * (table_rows or EMPTY_TABLE_ROWS))


def _row_bytes(tables: Sequence[EmbeddingTable], rows: Mapping[EmbeddingTable, int]) -> list[int]:
    """Return the bytes of each table's rows, with the device's alignment; without tables of 0 rows."""
    shapes = [(plan_table_shape(t, rows[t]), rows[t]) for t in tables if rows[t]]
    return [shape.stride * n for shape, n in shapes]
