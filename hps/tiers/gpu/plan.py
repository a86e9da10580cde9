"""Capacity planning of the GPU cache: rows per table, on the device or in host memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hps.cuda.layout import (
    MOST_ROOMY_LOAD,
    ROOMY_LOAD,
    EvictionPolicy,
    GpuTableShape,
    plan_table_shape,
)
from hps.cuda.memory import suggested_bytes
from hps.errors import ConfigError, GpuUnavailable
from hps.tiers.capacity import EMPTY_TABLE_ROWS
from hps.types import EmbeddingTable

_STEPS = 40  # bisection steps: find a share to 12 digits
_PACKED = 1.0
LEFT_FREE = 0.1
"""The share of the free memory that slots beyond those of packed tables must leave to others."""


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
    """One table's capacity: ``rows`` (0: none), ``host_rows`` of them in pinned host memory.

    ``load``: rows per slot, see `plan_table_shape`. ``shared_with``: the table whose arrays this one uses."""

    rows: int
    host_rows: int
    policy: EvictionPolicy
    static: bool
    load: float
    shared_with: EmbeddingTable | None = None

    def shape(self, table: EmbeddingTable) -> GpuTableShape | None:
        """Return the sizes of the table's own arrays; None if it has none."""
        if not self.rows or self.shared_with is not None:
            return None
        scored = self.policy is EvictionPolicy.SCORE and not self.static
        return plan_table_shape(table, self.rows, self.host_rows, scored=scored, load=self.load)


Plan = dict[EmbeddingTable, GpuTablePlan]


def plan_gpu(
    requests: Mapping[EmbeddingTable, GpuTableRequest],
    *,
    capacity_bytes: int,
    host_bytes: int = 0,
    share: float | None = None,
    free_bytes: int | None = None,
) -> Plan:
    """Plan the capacities of all tables, as large as the sizes allow.

    A table with a capacity of its own gets exactly that. All others get the same share of their rows:
    ``share``, else the largest share for which everything fits into ``capacity_bytes`` on the device. Up to
    ``host_bytes`` of the rows, the same fraction of each table, are placed in pinned host memory; those of
    static tables only if bytes are left over by the others. An empty table counts as `EMPTY_TABLE_ROWS`.

    A table with capacity for all of its rows gets so many slots that each row finds one, or as many as fit
    into ``capacity_bytes`` and ``free_bytes``, those that are free on the device (None: unknown).

    Raises ConfigError if ``share`` is not set and the tables with their own capacities alone exceed
    ``capacity_bytes``."""
    limit = math.inf if share is not None else capacity_bytes
    free = math.inf if free_bytes is None else (1 - LEFT_FREE) * free_bytes

    def planned(part: float, load: float) -> Plan:
        return _plan_at(requests, part, host_bytes, load)

    whole = 1.0 if share is None else share
    if _fits(planned(whole, _PACKED), limit):
        return planned(whole, _least_load(lambda load: planned(whole, load), min(limit, free)))
    load = ROOMY_LOAD if _fits(planned(0.0, ROOMY_LOAD), limit) else _PACKED
    plan = planned(_largest_share(lambda part: planned(part, load), limit), load)
    own_size = {t: p for t, p in plan.items() if _has_own_size(requests[t])}
    if own_size and not _fits(own_size, limit):
        raise ConfigError(
            f"tiers.gpu: the tables with gpu_rows, gpu_share or gpu_static take {device_bytes(own_size):,} "
            f"bytes of the GPU's memory, and tiers.gpu.capacity_bytes is {capacity_bytes:,}; raise it to "
            "that, put rows into pinned host memory (tiers.gpu.host_bytes), or ask for less"
        )
    return plan


def _largest_share(planned: Callable[[float], Plan], limit: float) -> float:
    """Return the largest share of the rows for which the plan fits ``limit``; 0 if none does."""
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _fits(planned(middle), limit):
            low = middle
        else:
            high = middle
    return low


def _least_load(planned: Callable[[float], Plan], limit: float) -> float:
    """Return the fewest rows per slot, of those that avoid evictions, for which the plan fits ``limit``."""
    if _fits(planned(ROOMY_LOAD), limit):
        return ROOMY_LOAD
    low, high = ROOMY_LOAD, MOST_ROOMY_LOAD
    if not _fits(planned(high), limit):
        return _PACKED
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _fits(planned(middle), limit):
            high = middle
        else:
            low = middle
    return high


def check_fits(plan: Plan, free_bytes: int, device: int) -> None:
    """Raise GpuUnavailable, with both sizes, unless ``plan`` fits into the free memory of ``device``."""
    needed = device_bytes(plan)
    if needed <= free_bytes:
        return
    largest = max(plan, key=lambda t: device_bytes({t: plan[t]}))
    size = device_bytes({largest: plan[largest]})
    raise GpuUnavailable(
        f"the GPU cache needs {needed:,} bytes on GPU {device}, and {free_bytes:,} are free there; the "
        f"largest table is {largest.id} with {plan[largest].rows:,} rows in {size:,} bytes. Lower "
        f"tiers.gpu.capacity_bytes to at most {free_bytes:,}"
        + (
            ", put its rows into pinned memory (tiers.gpu.host_bytes), or serve it without gpu_static"
            if plan[largest].static
            else ", or tiers.gpu.share"
        )
    )


def check_pinned(plan: Plan, devices: int, free_bytes: int) -> None:
    """Raise ConfigError unless the pinned rows of ``plan``, once for each device, fit into the free memory
    of the host."""
    each = host_bytes_of(plan)
    needed, fitting = devices * each, suggested_bytes(free_bytes, free_bytes)
    if needed <= fitting:
        return
    parts = f" ({each:,} for each of {devices} GPUs)" if devices > 1 else ""
    raise ConfigError(
        f"the GPU cache needs {needed:,} bytes of pinned host memory{parts}, and {free_bytes:,} are "
        f"available on the host. Lower tiers.gpu.host_bytes to at most {fitting // devices:,}"
    )


def device_bytes(plan: Plan) -> int:
    """Return the bytes of device memory that ``plan`` needs."""
    return sum(s.bytes for t, p in plan.items() if (s := p.shape(t)) is not None)


def host_bytes_of(plan: Plan) -> int:
    """Return the bytes of pinned host memory that ``plan`` needs per device."""
    return sum(s.host_bytes for t, p in plan.items() if (s := p.shape(t)) is not None)


def _has_own_size(request: GpuTableRequest) -> bool:
    return request.static or request.rows is not None or request.share is not None


def _fits(plan: Plan, limit: float) -> bool:
    return device_bytes(plan) <= limit


def _plan_at(
    requests: Mapping[EmbeddingTable, GpuTableRequest], share: float, host_bytes: int, load: float
) -> Plan:
    """Plan for a ``share`` of the rows; ``load``: rows per slot of tables with capacity for all of theirs."""
    rows = {table: _rows(request, share) for table, request in requests.items()}
    host_rows = _host_rows(requests, rows, host_bytes)
    plan = {}
    for table, request in requests.items():
        n, static = rows[table], request.static and rows[table] > 0
        table_load = ROOMY_LOAD if static else load if n >= request.table_rows else _PACKED
        plan[table] = GpuTablePlan(n, host_rows[table], request.policy, static, table_load)
    return plan


def _host_rows(
    requests: Mapping[EmbeddingTable, GpuTableRequest],
    rows: Mapping[EmbeddingTable, int],
    host_bytes: int,
) -> dict[EmbeddingTable, int]:
    """Return how many of each table's ``rows`` are in pinned host memory: static ones after all others."""
    found: dict[EmbeddingTable, int] = {}
    for static in (False, True):
        group = [table for table, request in requests.items() if request.static is static]
        total = sum(_row_bytes(group, rows))
        part = min(1.0, host_bytes / total) if total else 0.0
        host_bytes -= int(part * total)
        found |= {table: int(part * rows[table]) for table in group}
    return found


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
