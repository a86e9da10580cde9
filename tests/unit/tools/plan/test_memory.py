"""Mapped files in memory: the sets that a budget chooses, expected sizes, cost and latency."""

import numpy as np
import pytest

from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.models.mapped_file import MAPPED_FILE
from hps.models.version_writer import write_version
from hps.tools.plan.inputs import demands_of
from hps.tools.plan.latency import Calibration
from hps.tools.plan.memory import memory_choices
from hps.tools.plan.model import mapped_file_bytes, model_of_specs
from hps.tools.plan.planner import Goals, Planner, Prices
from hps.tools.plan.trace import TraceCollector
from hps.types import EmbeddingTable


def test_choices_are_those_of_a_growing_budget():
    assert memory_choices({}) == [()]
    assert memory_choices({"a": 6, "b": 10}) == [(), ("a",), ("a", "b")]
    assert memory_choices({"a": 10, "b": 6}) == [(), ("b",), ("a",), ("a", "b")]
    many = memory_choices({str(i): 1 + i % 7 for i in range(100)})
    assert len(many) <= 18
    assert len(many[-1]) == 100


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_expected_size_is_that_of_a_file(tmp_path, dtype):
    rows, dim = 30_000, 10
    spec = ModelSpec(
        name="m",
        tables=[TableSpec(name="t", dim=dim, dtype=dtype)],
        features=[FeatureSpec(name="t", table="t", pooling="none")],
    )
    write_version(tmp_path, spec, 1, {"t": (np.arange(rows), np.ones((rows, dim), np.float32))})
    size = (tmp_path / "m/1/tables/t" / MAPPED_FILE).stat().st_size
    table = EmbeddingTable.make("t", dim, dtype=dtype)
    assert mapped_file_bytes(table, rows) == pytest.approx(size, rel=0.005)


@pytest.fixture(scope="module")
def demands_and_trace():
    model = model_of_specs(["t=10000x32"])
    collector = TraceCollector(model)
    keys = np.random.default_rng(1).integers(0, 10_000, 64_000)
    collector.add({"t": (keys, np.arange(len(keys)) // 64)}, len(keys))
    trace = collector.trace()
    return trace, demands_of(model, trace, {"t": "lru"}), model.direct_files()


def planner(demands_and_trace, **more):
    trace, demands, files = demands_and_trace
    calibration = Calibration(64.0, (0.0, 64.0), (50.0, 800.0), mapped_us=30.0)
    return Planner(trace, demands, calibration, files=files, **more)


def test_latency_target_may_need_mapped_files(demands_and_trace):
    chosen = planner(demands_and_trace, goals=Goals(p50_ms=0.04)).choose()
    assert (chosen.in_memory, chosen.p50_us) == (("t",), pytest.approx(30))
    chosen = planner(demands_and_trace, goals=Goals(p50_ms=0.5)).choose()
    assert chosen.in_memory == ()


def test_mapped_files_count_in_memory_and_cost(demands_and_trace):
    goals, prices = Goals(p50_ms=0.04, requests_per_s=10), Prices(gib=1.0)
    chosen = planner(demands_and_trace, goals=goals, prices=prices).choose()
    size = sum(demands_and_trace[2].values())
    assert chosen.mapped_bytes == size
    assert chosen.cost == pytest.approx((chosen.bytes + size) / 2**30)
    assert planner(demands_and_trace, goals=Goals(memory_bytes=size)).unmet(chosen) != []
