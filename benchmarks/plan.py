"""Predictions of hps plan against measurements, on the second half of a recommender's real trace.

The Scarab trace: 1.2 million keys of 258,368 rows, here of dim 32, in requests of 1,024. The plan sees the
first half. Then each cache answers the whole trace, and its second half is counted: by `CpuCache` at 1, 10
and 20 % of the rows, lru and lfu. Latency: a cache for a hit rate of 60 % is planned, and a node with the
printed configuration answers the second half in rounds, with a calibration before each; the median of the
rounds' ratios. The same over a Redis on this machine, if it is installed. Beside them: samples of 8,192 keys
instead of all, and the estimate that needs no trace, the share of the rows that is cached, as if all rows
were equally hot. Also the GPU memory that the plan says for caches of the same rows, against the buffers of
FBGEMM's (`fbgemm_bytes`); nothing is allocated, and no bar holds.

Bars: 2 points of hit rate at each capacity, 25 % of the median latency.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.gpu_policies import scarab
from benchmarks.measure import Spread
from benchmarks.peers.redis_server import missing_requirement, redis_server
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.config.yaml_text import parse_yaml
from hps.lookup.key_sampling import MAX_KEYS
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.tiers.cpu.cache import Eviction
from hps.tools.plan.calibration import calibrate, calibrate_redis
from hps.tools.plan.curves import TableCurve, simulate
from hps.tools.plan.gpu import gpu_bytes
from hps.tools.plan.inputs import demands_of, loads_of
from hps.tools.plan.model import PlannedModel, model_of_repository, with_redis
from hps.tools.plan.node_latency import redis_share_of
from hps.tools.plan.planner import Goals, Planner
from hps.tools.plan.report import PlanReport
from hps.tools.plan.trace import Trace, TraceCollector
from hps.types import KeyArray

BATCH, DIM, TABLE = 1024, 32, "items"
SHARES = (0.01, 0.1, 0.2)
EVICTIONS: tuple[Eviction, ...] = ("lru", "lfu")
GOAL = 0.6
SPEC = ModelSpec(
    name="scarab",
    tables=[TableSpec(name=TABLE, dim=DIM)],
    features=[FeatureSpec(name=TABLE, table=TABLE, pooling="none")],
)
BARS = (
    *(
        Bar(f"hit_rate_{s:g}", f"hit rate at {100 * s:g} %: points off", at_most=2.0)
        for s in SHARES
    ),
    Bar("p50", "p50 of the chosen configuration: measured / predicted", at_most=1.25),
    Bar("p50_off", "the same", at_least=0.75),
)


def run(options: Options) -> Report:
    report = Report()
    keys = scarab()
    if keys is None:
        report.notes.append("The Scarab trace was not found.")
        return report
    half = len(keys) // 2 // BATCH * BATCH
    with tempfile.TemporaryDirectory() as folder:
        rows = np.unique(keys)
        vectors = np.random.default_rng(options.seed).random((len(rows), DIM), np.float32)
        write_version(Path(folder) / "models", SPEC, 1, {TABLE: (rows, vectors)}, mapped=False)
        model = model_of_repository(Repository(Path(folder) / "models"), None)
        hit_rates(report, model, keys, half)
        gpu_memory(report, model, keys[:half])
        rounds = 2 if options.quick else 7
        latency(report, model, keys, half, folder, rounds)
        if reason := missing_requirement():
            report.notes.append(f"Not measured over Redis: {reason}.")
            return report
        with redis_server(Path(folder) / "redis") as server:
            latency(report, with_redis(model, server.address), keys, half, folder, rounds)
    return report


def trace_of(model: PlannedModel, keys: KeyArray, max_keys: int = MAX_KEYS) -> Trace:
    collector = TraceCollector(model, max_keys)
    collector.add({TABLE: (keys, np.arange(len(keys)) // BATCH)}, len(keys))
    return collector.trace()


def hit_rates(report: Report, model: PlannedModel, keys: KeyArray, half: int) -> None:
    """Predict by the first half, measure the second one."""
    total, table = model.tables[TABLE].rows, []
    for eviction in EVICTIONS:
        start = time.perf_counter()
        curve = TableCurve(trace_of(model, keys[:half]).samples[TABLE], total, eviction)
        took = time.perf_counter() - start
        fewer = TableCurve(trace_of(model, keys[:half], 8192).samples[TABLE], total, eviction)
        for share in SHARES:
            capacity = int(share * total)
            measured = 1 - float(simulate(keys, capacity, eviction)[half:].mean())
            predicted = curve.at(capacity)
            off = 100 * abs(measured - predicted)
            table.append(
                {
                    "policy": eviction,
                    "rows": f"{100 * share:g} %",
                    "measured": measured,
                    "predicted": predicted,
                    "points off": off,
                    "from 8,192 keys": fewer.at(capacity),
                    "without a trace": share,
                    "curve, s": took,
                }
            )
            name = f"hit_rate_{share:g}"
            report.values[name] = max(off, report.values.get(name, 0.0))
    report.tables["hit rate of the second half, predicted from the first"] = table


def gpu_memory(report: Report, model: PlannedModel, keys: KeyArray) -> None:
    """Compare the bytes of GPU caches, as planned, with those of FBGEMM for the same rows."""
    demands, total = (
        demands_of(model, trace_of(model, keys), {TABLE: "lru"}),
        model.tables[TABLE].rows,
    )
    table = []
    for share in (*SHARES, 1.0):
        planned = gpu_bytes(demands, {TABLE: int(share * total)})
        fbgemm = fbgemm_bytes(total, DIM, share)
        table.append(
            {
                "rows": f"{100 * share:g} %",
                "planned bytes": planned,
                "FBGEMM bytes": fbgemm,
                "planned / FBGEMM": planned / fbgemm,
            }
        )
    report.tables[f"GPU memory of {total:,} rows of dim {DIM}, by formula"] = table


def fbgemm_bytes(rows: int, dim: int, load_factor: float, element_bytes: int = 4) -> int:
    """Device bytes of FBGEMM's cache of a table in managed memory (``MANAGED_CACHING``, LRU).

    As `SplitTableBatchedEmbeddingBagsCodegen._apply_cache_state` allocates them (fbgemm_gpu): sets of 32
    slots for a share ``load_factor`` of the rows (``cache_sets``), each slot with its row
    (``lxu_cache_weights``), key (``lxu_cache_state``) and time (``lxu_state``), both int64; and an int32
    for each row of the whole table (``cache_index_table_map``)."""
    slots = -(-int(rows * load_factor) // 32) * 32
    return slots * (dim * element_bytes + 8 + 8) + rows * 4


def latency(
    report: Report, model: PlannedModel, keys: KeyArray, half: int, folder: str, rounds: int
) -> None:
    """Alternate calibrations and measurements; each round takes another part of the second half."""
    trace = trace_of(model, keys[:half])
    demands = demands_of(model, trace, {TABLE: "lru"})
    chosen = Planner(trace, demands, goals=Goals(hit_rate=GOAL)).choose()
    fragment = parse_yaml(
        PlanReport(model, trace, demands, chosen, {}).configuration(), "plan"
    ).data
    fragment["models"]["repository"] = f"{folder}/models"
    fragment["tiers"] |= {
        "rocksdb": {"path": f"{folder}/rocksdb"},
        "mapped": {"memory_bytes": 0},  # the caches are measured
        "gpu": {"use": "off"},
    }
    redis = model.settings.tiers.redis
    if redis is not None:
        guard = {"deadline_ms": 20_000}
        fragment["tiers"]["redis"] = {"addresses": redis.addresses, "guard": guard}
        fragment["tiers"]["rocksdb"] = {"enabled": False}
    ratios, p99s, table = [], [], []
    with hps.open(fragment) as node:
        answer(node, keys[:half])
        for part in np.array_split(keys[half:].reshape(-1, BATCH), rounds):
            measure = answer(node, part.reshape(-1))
            mapped = model.tables[TABLE].mapped_bytes is not None
            calibration = calibrate(loads_of(model, trace), mapped=mapped)
            if redis is not None:
                over_redis = calibrate_redis(loads_of(model, trace), redis)
                calibration = replace(calibration, redis=over_redis)
            planner = Planner(
                trace, demands, calibration, redis_share=redis_share_of(model.settings)
            )
            predicted = planner.predict(chosen.rows)
            p50, p99 = np.quantile(measure, [0.5, 0.99])
            assert predicted.p50_us is not None
            assert predicted.p99_us is not None
            ratios.append(float(p50 / predicted.p50_us))
            p99s.append(float(p99 / predicted.p99_us))
            table.append(
                {"p50, µs": float(p50), "predicted": predicted.p50_us, "p99, µs": float(p99)}
                | {"predicted p99": predicted.p99_us}
            )
    over = "" if redis is None else ", over Redis"
    report.tables[f"lookups of {BATCH:,} keys, planned for a hit rate of {GOAL:g}{over}"] = table
    report.figures[f"p99 measured / predicted{over}"] = f"{Spread.of(p99s)}"
    if redis is not None:
        report.figures[f"p50 measured / predicted{over}"] = f"{Spread.of(ratios)}"
        return
    report.values["p50"] = report.values["p50_off"] = Spread.of(ratios).median
    report.figures["cache rows"] = dict(chosen.rows)


def answer(node: Any, keys: KeyArray) -> list[float]:
    """Look up ``keys``, a batch at a time; returns the latencies in microseconds."""
    times = []
    for start in range(0, len(keys), BATCH):
        batch = keys[start : start + BATCH]
        begun = time.perf_counter()
        node.lookup("scarab", {TABLE: batch})
        times.append(1e6 * (time.perf_counter() - begun))
    return times


BENCHMARK = Benchmark(
    name="plan",
    title=__doc__.splitlines()[0],
    run=run,
    bars=BARS,
    measured=(
        *("hps/tools/plan", "hps/lookup/key_sampling.py", "hps/tiers/cpu", "hps/tiers/capacity.py"),
        *("hps/native/src/cache_table.cpp", "hps/native/src/cache_scores.cpp"),
        *("hps/tiers/gpu/plan.py", "hps/cuda/layout.py"),
    ),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
