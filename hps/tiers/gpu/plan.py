"""How many rows of each table the GPU cache gets, and where they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hps.cuda.layout import EvictionPolicy, GpuTableShape, plan_table_shape
from hps.errors import ConfigError
from hps.tiers.capacity import EMPTY_TABLE_ROWS
from hps.types import EmbeddingTable

_STEPS = 40  # of the bisection: a share to 12 digits


@dataclass(frozen=True, slots=True)
class GpuTableRequest:
    """What is wanted of one table that has ``table_rows`` rows: a capacity in ``rows`` or as a ``share`` of
    them, if it is to have one of its own; ``static``: all of them."""

    table_rows: int
    rows: int | None = None
    share: float | None = None
    policy: EvictionPolicy = EvictionPolicy.LRU
    static: bool = False


@dataclass(frozen=True, slots=True)
class GpuTablePlan:
    """One table's place in the cache: ``rows`` (0: none), ``host_rows`` of them in pinned host memory."""

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
    wishes: Mapping[EmbeddingTable, GpuTableRequest],
    *,
    capacity_bytes: int,
    host_bytes: int = 0,
    share: float | None = None,
) -> Plan:
    """The places of all tables, as large as the sizes allow.

    Tables with a wish of their own get just that; the others the same ``share`` of their rows: the one
    stated, else the largest with which everything fits into ``capacity_bytes`` on the device. At most
    ``host_bytes`` of the rows, the same part of each table, lie in pinned host memory. A table without rows
    counts as `EMPTY_TABLE_ROWS`. Raises ConfigError when the wishes alone exceed ``capacity_bytes``
    and no ``share`` says that this is meant.
    """
    if share is not None:
        return _plan_at(wishes, share, host_bytes)
    if _fits(plan := _plan_at(wishes, 1.0, host_bytes), capacity_bytes):
        return plan
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _fits(_plan_at(wishes, middle, host_bytes), capacity_bytes):
            low = middle
        else:
            high = middle
    plan = _plan_at(wishes, low, host_bytes)
    stated = {t: p for t, p in plan.items() if _is_stated(wishes[t])}
    if stated and not _fits(stated, capacity_bytes):
        raise ConfigError(
            f"tiers.gpu: the tables with gpu_rows, gpu_share or gpu_static take {device_bytes(stated):,} "
            f"bytes of the GPU's memory, and tiers.gpu.capacity_bytes is {capacity_bytes:,}; raise it to "
            "that, or ask for less"
        )
    return plan


def check_fits(plan: Plan, free_bytes: int, device: int) -> None:
    """Raise ConfigError, naming both sizes, unless ``plan`` fits into what is free on ``device``."""
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
    """What ``plan`` takes of a device's memory."""
    return sum(s.bytes for t, p in plan.items() if (s := p.shape(t)) is not None)


def host_bytes_of(plan: Plan) -> int:
    """What ``plan`` takes of pinned host memory, per device."""
    return sum(s.host_bytes for t, p in plan.items() if (s := p.shape(t)) is not None)


def _is_stated(wish: GpuTableRequest) -> bool:
    return wish.static or wish.rows is not None or wish.share is not None


def _fits(plan: Plan, capacity_bytes: int) -> bool:
    return device_bytes(plan) <= capacity_bytes


def _plan_at(
    wishes: Mapping[EmbeddingTable, GpuTableRequest], share: float, host_bytes: int
) -> Plan:
    rows = {table: _rows(wish, share) for table, wish in wishes.items()}
    movable = [table for table, wish in wishes.items() if not wish.static]
    total = sum(_row_bytes(movable, rows))
    part = min(1.0, host_bytes / total) if total else 0.0
    return {
        table: GpuTablePlan(
            rows[table],
            0 if wish.static else int(part * rows[table]),
            wish.policy,
            wish.static and rows[table] > 0,
        )
        for table, wish in wishes.items()
    }


def _rows(wish: GpuTableRequest, share: float) -> int:
    has = wish.table_rows
    if wish.static:
        return has
    if wish.rows is not None:
        return wish.rows
    if wish.share is not None:
        return math.ceil(wish.share * (has or EMPTY_TABLE_ROWS))
    return int(share * (has or EMPTY_TABLE_ROWS))


def _row_bytes(tables: Sequence[EmbeddingTable], rows: Mapping[EmbeddingTable, int]) -> list[int]:
    """What the rows take where they lie, aligned as the device wants them."""
    shapes = [(plan_table_shape(t, rows[t]), rows[t]) for t in tables if rows[t]]
    return [shape.stride * n for shape, n in shapes]
