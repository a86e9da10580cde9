"""The result of a plan: for programs, and as a fragment of the configuration."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hps.config.yaml_text import dump_yaml
from hps.tiers.capacity import slot_bytes
from hps.tools.plan.allocation import Allocation, TableDemand, hit_rate
from hps.tools.plan.gpu import gpu_bytes
from hps.tools.plan.latency import Calibration
from hps.tools.plan.model import PlannedModel
from hps.tools.plan.node_latency import redis_share_of
from hps.tools.plan.planner import Prediction
from hps.tools.plan.trace import Trace
from hps.types import EmbeddingTable

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Capacities of the curves in a report, as shares of a table's rows."""
# Bytes of a row in RocksDB beyond its vector: key, version, index, filter (measured: dim 32).
_STORE_EXTRA_BYTES = 35


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A chosen cache with what it was chosen from. ``current``: the cache of the settings, for comparison."""

    model: PlannedModel
    trace: Trace
    demands: Mapping[str, TableDemand]
    chosen: Prediction
    gpu: Allocation
    current: Prediction | None = None
    calibration: Calibration | None = None
    samples: int = 1
    files: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the mapped files that a node may read from memory, by table."""
    unknown_latency: Mapping[str, str] = field(default_factory=dict)
    """Tiers that the predicted latencies leave out, and why."""

    def table_hit_rate(self, name: str) -> float:
        """The share of a table's keys that the chosen cache or its mapped file in memory answers."""
        curve = self.demands[name].curve
        is_mapped = name in self.chosen.in_memory
        return curve.at(curve.table_rows if is_mapped else self.chosen.rows.get(name, 0))

    def as_json(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        return {
            "model": self.model.name,
            "trace": {"requests": self.trace.requests, "keys": self.trace.accesses},
            "tables": [self._table(name) for name in self.demands],
            "tiers": self.tiers(),
            "plan": _prediction(self.chosen),
            "current": None if self.current is None else _prediction(self.current),
            "unknown_latency": dict(self.unknown_latency),
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "configuration": self.configuration(),
        }

    def _table(self, name: str) -> dict[str, Any]:
        demand, sample = self.demands[name], self.trace.samples[name]
        curve, table = demand.curve, demand.table
        is_mapped = name in self.chosen.in_memory
        return {
            "name": name,
            "rows": curve.table_rows,
            "row_bytes": table.row_bytes,
            "keys": sample.accesses,
            "share": demand.share,
            "touched_rows": curve.touched_rows,
            "unknown_share": curve.unknown_share,
            "sampling_rate": sample.rate,
            "eviction": curve.eviction,
            "cache_rows": None if is_mapped else self.chosen.rows.get(name, 0),
            "mapped_bytes": self.files[name] if is_mapped else 0,
            "hit_rate": self.table_hit_rate(name),
            "curve": [
                {"rows": p.rows, "bytes": p.rows * slot_bytes(table), "hit_rate": p.hit_rate}
                for p in curve.points
            ],
        }

    def tiers(self) -> list[dict[str, Any]]:
        """Each tier with its rows, bytes and the share of the keys that it answers."""
        on_gpu = hit_rate(self.demands, self.gpu) if self.gpu else 0.0
        in_memory = max(on_gpu, self.chosen.hit_rate)
        found = []
        if self.gpu:
            size = gpu_bytes(self.demands, self.gpu)
            found.append(_tier("GPU cache", sum(self.gpu.values()), size, on_gpu))
        by_files = min(self._answered_by_files(), in_memory - on_gpu)
        rows = sum(self.chosen.rows.values())
        found.append(_tier("CPU cache", rows, self.chosen.bytes, in_memory - on_gpu - by_files))
        if names := self.chosen.in_memory:
            rows = sum(self.demands[name].curve.table_rows for name in names)
            found.append(_tier("mapped, in memory", rows, self.chosen.mapped_bytes, by_files))
        return found + self._stores(1.0 - in_memory)

    def _answered_by_files(self) -> float:
        """The share of the keys that mapped files in memory answer, without those that a GPU answers."""
        demands = [(name, self.demands[name]) for name in self.chosen.in_memory]
        on_gpu = [d.curve.at(self.gpu[name]) if self.gpu else 0.0 for name, d in demands]
        return sum(
            d.share * max(0.0, self.table_hit_rate(name) - gpu)
            for (name, d), gpu in zip(demands, on_gpu, strict=True)
        )

    def _stores(self, answers: float) -> list[dict[str, Any]]:
        """Redis, RocksDB and the mapped files: together they answer the share ``answers``."""
        found, redis = [], redis_share_of(self.model.settings)
        if redis is not None:
            every = [self.model.tables[name] for name in self.demands]
            size = sum(each.rows * redis_row_bytes(each.table) for each in every)
            rows = sum(each.rows for each in every)
            found.append(_tier("Redis", int(redis * rows), int(redis * size), redis * answers))
            answers *= 1 - redis
            if not self.model.settings.tiers.rocksdb.enabled:
                return found
        return found + self._local_stores(answers)

    def _local_stores(self, answers: float) -> list[dict[str, Any]]:
        rows, sizes = Counter[str](), Counter[str]()
        misses: dict[str, float] = defaultdict(float)
        for name, demand in self.demands.items():
            planned = self.model.tables[name]
            mapped = planned.mapped_bytes
            kind = "RocksDB" if mapped is None else "mapped files"
            rows[kind] += planned.rows
            sizes[kind] += mapped or planned.rows * store_row_bytes(planned.table)
            misses[kind] += demand.share * (1.0 - self.table_hit_rate(name))
        total = sum(misses.values()) or 1.0
        return [_tier(k, rows[k], sizes[k], answers * misses[k] / total) for k in sorted(rows)]

    def configuration(self) -> str:
        """The chosen caches as a fragment of the configuration, in YAML."""
        chosen = self.chosen
        tables: dict[str, dict[str, int]] = {
            name: {"cache_rows": rows}
            for name, rows in chosen.rows.items()
            if name not in chosen.in_memory
        }
        if chosen.in_memory:  # else they would take memory of the tables that are planned
            absent = [name for name in self.model.tables if name not in self.demands]
            tables |= {name: {"cache_rows": 0} for name in absent}
        for name, rows in self.gpu.items():
            tables.setdefault(name, {})["gpu_rows"] = rows
        evictions = {d.curve.eviction for d in self.demands.values()}
        cpu: dict[str, Any] = {"capacity_bytes": chosen.bytes}
        if len(evictions) == 1:
            cpu["eviction"] = evictions.pop()
        tiers: dict[str, Any] = {"cpu_cache": cpu}
        if self.files:
            tiers["mapped"] = {"memory_bytes": chosen.mapped_bytes}
        if self.gpu:
            tiers["gpu"] = {"capacity_bytes": gpu_bytes(self.demands, self.gpu)}
        fragment = {"models": {"serve": {self.model.name: {"tables": tables}}}, "tiers": tiers}
        return dump_yaml(fragment)


def _prediction(found: Prediction) -> dict[str, Any]:
    return {**asdict(found), "memory_bytes": found.memory_bytes}


def _tier(name: str, rows: int, size: int, answers: float) -> dict[str, Any]:
    return {"tier": name, "rows": rows, "bytes": size, "answers": answers}


def redis_row_bytes(table: EmbeddingTable) -> float:
    """Return the approximate bytes of a row in Redis, with a version (measured: dims 4 to 128)."""
    return 64 + 1.2 * table.row_bytes


def store_row_bytes(table: EmbeddingTable) -> int:
    """Return the approximate bytes of a row in RocksDB."""
    return table.row_bytes + _STORE_EXTRA_BYTES
