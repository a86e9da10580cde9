"""The smallest cache that meets a target: optimal division, limits, prices and errors."""

from dataclasses import replace

import numpy as np
import pytest

from hps.errors import BadRequest, ConfigError
from hps.tiers.capacity import slot_bytes
from hps.tools.plan.allocation import AllocationPath, cpu_cache_bytes, hit_rate, upper_hull
from hps.tools.plan.curves import CurvePoint
from hps.tools.plan.gpu import NO_GPU, GpuCachePlan, gpu_allocation, gpu_bytes
from hps.tools.plan.inputs import demands_of, loads_of
from hps.tools.plan.latency import Calibration
from hps.tools.plan.model import model_of_specs
from hps.tools.plan.planner import Goals, Planner, Prices
from hps.tools.plan.trace import TraceCollector

BATCH = 32
LATENCY = Calibration(64.0, (0.0, 1.0, 64.0), (10.0, 100.0, 1_000.0), 0.05)


def collected(model, requests=3_000):
    """Two tables: one asked with much skew, one nearly uniformly."""
    random = np.random.default_rng(2)
    numbers = np.repeat(np.arange(requests), BATCH)
    hot = np.minimum(random.zipf(1.6, len(numbers)) - 1, 9_999)
    collector = TraceCollector(model)
    collector.add(
        {"hot": (hot, numbers), "flat": (random.integers(0, 10_000, len(hot)), numbers)}, len(hot)
    )
    return collector.trace()


@pytest.fixture(scope="module")
def model():
    return model_of_specs(["hot=10000x16", "flat=10000x64"])


@pytest.fixture(scope="module")
def trace(model):
    return collected(model)


@pytest.fixture(scope="module")
def demands(model, trace):
    return demands_of(model, trace, dict.fromkeys(model.tables, "lru"))


def planner(trace, demands, **goals):
    return Planner(trace, demands, LATENCY, goals=Goals(**goals))


def test_memory_goes_to_the_rows_that_answer_most(trace, demands):
    chosen = planner(trace, demands, memory_bytes=200_000).choose()
    assert chosen.bytes <= 200_000
    assert chosen.bytes > 199_000
    splits = [
        {
            n: int(part * 200_000) // slot_bytes(demands[n].table)
            for n, part in (("hot", i), ("flat", 1 - i))
        }
        for i in np.linspace(0, 1, 101)
    ]
    best = max(hit_rate(demands, rows) for rows in splits)
    assert chosen.hit_rate > best - 0.003
    assert chosen.hit_rate > hit_rate(demands, splits[50]) + 0.003


@pytest.mark.parametrize("goals", [{"hit_rate": 0.7}, {"p99_ms": 0.6}, {"p50_ms": 0.4}])
def test_chosen_cache_meets_the_target_and_is_small(trace, demands, goals):
    plans = planner(trace, demands, **goals)
    chosen = plans.choose()
    assert plans.unmet(chosen) == []
    path = AllocationPath(demands)
    smaller = [i for i in range(len(path)) if path.bytes[i] < 0.9 * chosen.bytes]
    assert plans.unmet(plans.predict(path[smaller[-1]])) != []


def test_target_out_of_reach_is_an_error_with_the_best(trace, demands):
    with pytest.raises(
        ConfigError, match=r"within 100,000 bytes meets.*hit rate 0\.9, reached 0\.\d"
    ):
        planner(trace, demands, hit_rate=0.9, memory_bytes=100_000).choose()
    with pytest.raises(ConfigError, match=r"p99 of 0\.001 ms, reached"):
        planner(trace, demands, p99_ms=0.001).choose()
    with pytest.raises(ConfigError, match="--p99-ms needs latencies"):
        Planner(trace, demands, None, goals=Goals(p99_ms=1))


def test_all_rows_fit_a_large_memory(trace, demands):
    chosen = planner(trace, demands, memory_bytes=1 << 40).choose()
    assert chosen.rows == {"hot": 10_000, "flat": 10_000}
    assert chosen.hit_rate == pytest.approx(1)
    more = planner(trace, demands).predict({"hot": 99_999, "flat": 10_000})
    assert more == chosen


def test_without_a_target_most_hits_are_planned(trace, demands):
    chosen = planner(trace, demands).choose()
    reached = sum(d.share * d.curve.reached for d in demands.values())
    assert chosen.hit_rate == pytest.approx(0.95 * reached, abs=0.01)


def test_cores_and_cost_follow_from_the_rate(trace, demands):
    prices = Prices(gib=1_000.0, core=0.01)
    plans = Planner(
        trace, demands, LATENCY, goals=Goals(hit_rate=0.5, requests_per_s=9_000), prices=prices
    )
    chosen = plans.choose()
    needed = 9_000 / (0.7 * chosen.core_requests_per_s)
    assert chosen.cores == int(np.ceil(needed))
    assert chosen.cost == pytest.approx(1_000 * chosen.bytes / 2**30 + 0.01 * chosen.cores)
    costly_cores = replace(prices, core=100.0)
    more = Planner(trace, demands, LATENCY, goals=plans.goals, prices=costly_cores).choose()
    assert more.bytes > chosen.bytes
    assert more.cores < chosen.cores


def test_latency_follows_the_misses_of_each_request(trace, demands):
    plans = planner(trace, demands)
    all_rows = plans.predict({"hot": 10_000, "flat": 10_000})
    none = plans.predict({})
    assert all_rows.p50_us < 100 < none.p50_us <= none.p99_us <= 1_100


def test_gpu_cache_fits_its_memory(demands):
    rows = gpu_allocation(demands, 600_000)
    assert 400_000 < gpu_bytes(demands, rows) <= 600_000
    assert hit_rate(demands, rows) > 0.5


def test_smallest_gpu_cache_answers_the_share_of_the_keys(demands):
    rows = gpu_allocation(demands, None, 0.5)
    assert 0.5 <= hit_rate(demands, rows) < 0.55
    assert gpu_allocation(demands, 1 << 30, 0.5) == rows
    assert gpu_allocation(demands, None, 0.0) == {"hot": 0, "flat": 0}
    with pytest.raises(ConfigError, match=r"no GPU cache within 100,000 bytes .* reached 0\.\d"):
        gpu_allocation(demands, 100_000, 0.9)


def on_gpu(trace, demands, rows, calibration, **more):
    gpu = GpuCachePlan(rows, gpu_bytes(demands, rows))
    return Planner(trace, demands, calibration, gpu=gpu, **more)


def test_lookups_on_a_gpu_are_predicted_from_its_misses(trace, demands):
    gpu = Calibration(64.0, (0.0, 64.0), (5.0, 69.0))
    every, none = {"hot": 10_000, "flat": 10_000}, {"hot": 0, "flat": 0}
    measured = replace(LATENCY, gpu=gpu)
    found = on_gpu(trace, demands, every, measured).predict(none)
    assert (found.p50_us, found.gpu_hit_rate) == pytest.approx((5, 1), abs=0.01)
    assert found.on_gpu
    assert found.gpu_bytes > 10_000 * 320
    # Rows that only the CPU cache has.
    half = on_gpu(trace, demands, {"hot": 10_000, "flat": 0}, measured)
    from_cpu = half.predict(every)
    assert from_cpu.p50_us == pytest.approx(5 + 32, abs=1)
    # Rows that only the store has take what they add on the host.
    from_store = half.predict(none)
    assert from_store.p50_us == pytest.approx(37 + 100 + 900 * 31 / 63 - 10, abs=5)
    # Another GPU cache than the planned one.
    assert half.predict(every, gpu=NO_GPU) == planner(trace, demands).predict(every)


def test_gpu_without_a_calibration_is_predicted_by_hit_rate(trace, demands):
    found = on_gpu(trace, demands, {"hot": 10_000, "flat": 0}, LATENCY).predict({})
    assert (found.p50_us, found.on_gpu) == (planner(trace, demands).predict({}).p50_us, False)
    assert found.gpu_hit_rate == pytest.approx(0.5, abs=0.01)


def test_gpu_lowers_the_latency_that_is_planned_for(trace, demands):
    measured = replace(LATENCY, gpu=Calibration(64.0, (0.0, 64.0), (5.0, 69.0)))
    goals = Goals(p50_ms=0.02)
    with pytest.raises(ConfigError, match=r"p50 of 0\.02 ms, reached"):
        on_gpu(trace, demands, {"hot": 5, "flat": 0}, measured, goals=goals).choose()
    rows = {"hot": 10_000, "flat": 8_000}
    chosen = on_gpu(trace, demands, rows, measured, goals=goals).choose()
    assert chosen.p50_us <= 20


def test_memory_of_gpus_costs(trace, demands):
    rows = {"hot": 1_000, "flat": 0}
    prices = Prices(gpu=2.0, gpu_gib=1_000.0)
    found = on_gpu(trace, demands, rows, LATENCY, prices=prices, gpus=3).predict({})
    assert found.cost == pytest.approx(3 * (2 + 1_000 * found.gpu_bytes / 2**30))
    assert Planner(trace, demands, LATENCY, prices=prices).predict({}).cost == 0


def test_typical_request_is_that_of_the_trace(model, trace):
    loads = {load.name: load for load in loads_of(model, trace)}
    assert (loads["hot"].keys, loads["hot"].hotness, loads["flat"].dim) == (BATCH, 1, 64)


def test_more_keys_than_rows_are_rejected():
    model = model_of_specs(["hot=10000x16", "flat=2000x64"])
    with pytest.raises(BadRequest, match="different keys of table flat, which has 2,000 rows"):
        demands_of(model, collected(model, 500), dict.fromkeys(model.tables, "lru"))


def test_upper_hull_skips_points_below_it():
    points = [CurvePoint(0, 0), CurvePoint(1, 0.1), CurvePoint(2, 0.8), CurvePoint(4, 1.0)]
    assert upper_hull(points) == [points[0], points[2], points[3]]


def test_bytes_are_those_of_the_node(demands):
    path = AllocationPath(demands)
    sizes = [cpu_cache_bytes(demands, path[i]) for i in range(len(path))]
    assert path.bytes.tolist() == sizes


@pytest.mark.parametrize(
    ("spec", "reason"),
    [("user", "expected NAME="), ("user=0x4", "needs rows"), ("u/x=1x4", "expected NAME=")],
)
def test_wrong_table_is_rejected(spec, reason):
    with pytest.raises(ConfigError, match=reason):
        model_of_specs([spec])
    with pytest.raises(ConfigError, match="is there twice"):
        model_of_specs(["a=1x4", "a=1x4"])
