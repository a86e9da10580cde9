"""Cost and hit rate on two traces of the GPU cache's eviction policies."""

from __future__ import annotations

import lzma
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Report
from benchmarks.gpu import CALL, NOW, FilledTable, device_part
from benchmarks.measure import zipf_keys
from hps.cuda.layout import EvictionPolicy
from hps.tiers.base import FetchContext
from hps.tiers.gpu.cache import GpuCache
from hps.types import EmbeddingTable

BATCH = 1024


def measure_policies(report: Report, capacity: int) -> None:
    """Rate of each policy's fetch, with and without a new clock or epoch before every call, and of its update
    and its insert into a full table."""
    rows = []
    for policy, advance in (
        (EvictionPolicy.LRU, "ticks"),
        (EvictionPolicy.EPOCH_LRU, "epoch"),
        (EvictionPolicy.LFU, "epoch"),
        (EvictionPolicy.SCORE, ""),
    ):
        filled = FilledTable.make(32, capacity, policy=policy)
        filled.settle()
        row: dict[str, Any] = {
            "policy": policy.name,
            "fetch B/s": CALL / filled.fetch_time(CALL) / 1e9,
        }
        row["before each"] = advance or "nothing"
        row["then fetch B/s"] = CALL / filled.fetch_time(CALL, advance=advance) / 1e9
        row["update B/s"] = filled.write_rate("update", 20)
        filled.overfill(capacity)
        row["insert, full B/s"] = filled.write_rate("insert", 20, new=True)
        filled.close()
        rows.append(row)
    report.tables[f"policies, dim 32, {capacity >> 20} M rows"] = rows


def measure_hit_rates(report: Report, seed: int) -> None:
    """Hit rates at 1, 5 and 20 % of the distinct keys, in batches of 1,024 accesses whose misses are
    inserted. An epoch is ten times as many accesses as there are rows in the cache."""
    rng = np.random.default_rng(seed)
    traces = {"Zipf 0.85": zipf_keys(rng, 300_000, (1_000_000,))}
    recorded = scarab()
    if recorded is None:
        report.notes.append("The Scarab trace was not found.")
    else:
        traces["Scarab"] = recorded
    rows, worst = [], 0.0
    for name, trace in traces.items():
        distinct = len(np.unique(trace))
        for share in (0.01, 0.05, 0.2):
            capacity = int(distinct * share) // 8 * 8
            exact, ours = exact_lru(trace, capacity), hit_rate(trace, capacity)
            worst = max(worst, (exact - ours) * 100)
            row = {"trace": name, "rows": capacity, "exact LRU": exact, "LRU": ours}
            row["epoch LRU"] = hit_rate(trace, capacity, EvictionPolicy.EPOCH_LRU, epochs=True)
            row["LFU"] = hit_rate(trace, capacity, EvictionPolicy.LFU)
            row["epoch LFU"] = hit_rate(trace, capacity, EvictionPolicy.LFU, epochs=True)
            rows.append(row)
    report.tables["hit rates"] = rows
    if len(traces) == 2:
        report.values["hit_rate"] = worst


def scarab() -> NDArray[np.int64] | None:
    """The keys of the Scarab trace, in time order, from ``HPS_SHARED_DATA`` or ``../shared/data``."""
    shared = os.environ.get("HPS_SHARED_DATA")
    folder = Path(shared) if shared else Path(__file__).parents[2] / "shared" / "data"
    file = folder / "scarab" / "scarab-recs.trace.xz"
    if not file.is_file():
        return None
    return np.frombuffer(lzma.decompress(file.read_bytes()), ">i8").astype(np.int64)


def batches_of(trace: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The distinct keys of each ``BATCH`` accesses."""
    return [np.unique(trace[start : start + BATCH]) for start in range(0, len(trace), BATCH)]


def exact_lru(trace: NDArray[np.int64], capacity: int) -> float:
    """Hit rate of exact LRU over the accesses, batch by batch."""
    held: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for batch in batches_of(trace):
        keys = batch.tolist()
        for key in keys:
            missed += key not in held
        for key in keys:
            held[key] = None
            held.move_to_end(key)
        while len(held) > capacity:
            held.popitem(last=False)
    return 1 - missed / len(trace)


def hit_rate(
    trace: NDArray[np.int64],
    capacity: int,
    policy: EvictionPolicy = EvictionPolicy.LRU,
    *,
    epochs: bool = False,
) -> float:
    """Hit rate of the GPU cache, likewise; with epochs of ten times as many accesses as it has rows."""
    table, cache = EmbeddingTable.make("trace", 4), GpuCache({})
    cache.add_table(table, capacity, policy=policy)
    held, epoch_batches = cache.held(table), max(1, 10 * capacity // BATCH)
    vectors, stamps = np.zeros((BATCH, 4), np.float32), np.full(BATCH, NOW, np.uint64)
    missed = 0
    for turn, keys in enumerate(batches_of(trace)):
        held.clock.epoch = turn // epoch_batches if epochs else 0
        part = device_part(table, keys)
        cache.fetch([part], FetchContext())
        left = keys[part.missing]
        missed += len(left)
        if len(left):
            cache.insert(table, left, vectors[: len(left)], stamps[: len(left)], unique=True)
    cache.close()
    return 1 - missed / len(trace)
