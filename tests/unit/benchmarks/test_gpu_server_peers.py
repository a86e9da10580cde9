"""Tests of the GPU server's benchmark beside Triton: counted requests, judged values, Triton's repository."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks import gpu_server_peers
from benchmarks.common import Report
from benchmarks.gpu_server_cells import Bench, Extent, Target
from benchmarks.gpu_server_peers import (
    BENCHMARK,
    Load,
    judge,
    measure_native,
    measure_perf_analyzer,
    measure_triton,
    perf_analyzer_steps,
)
from benchmarks.gpu_server_scene import PROTOCOLS, Cores, Scene, write_anchor
from benchmarks.gpu_server_triton import Instances, write_triton

SCENE = Scene(None, "m", 1000, 32)
TARGET = Target("ours", {"rest": "127.0.0.1:1", "grpc": "127.0.0.1:2"})


@pytest.fixture
def bench():
    return Bench(Report(), Extent(0.1, (1,), (1, 8)), Cores((0,), (0,), (1,)), 1)


@pytest.mark.parametrize(
    ("counted", "uncounted"),
    [(1000, 0.0), (1008, 0.0), (992, 0.0), (500, 492 / 500), (2000, 992 / 2000)],
)
def test_requests_that_the_server_did_not_count_are_a_deviation(
    monkeypatch, bench, counted, uncounted
):
    totals = iter([70, 70 + counted])
    monkeypatch.setattr(gpu_server_peers, "answered", lambda *_: next(totals))
    found = SimpleNamespace(requests=1000, per_second=1e4, p50_ms=1.0, p99_ms=2.0, errors=0)
    monkeypatch.setattr(gpu_server_peers, "run_load", lambda *_: found)
    row, share = measure_native(bench, TARGET, SCENE, Load("rest", 1, 8))
    assert share == pytest.approx(uncounted)
    assert row["counted / reported"] == counted / 1000


def test_perf_analyzer_counts_samples_and_microseconds(monkeypatch, bench):
    report = {"Inferences/Second": 6400.0, "p50 latency": 500.0, "p99 latency": 900.0}
    monkeypatch.setattr(gpu_server_peers, "perf_analyzer", lambda *_, **__: report)
    row = measure_perf_analyzer(bench, TARGET, SCENE, Load("grpc", 64, 8), [])
    assert row == {
        "perf_analyzer /s": 100.0,
        "perf_analyzer p50 ms": 0.5,
        "perf_analyzer p99 ms": 0.9,
    }


def test_failed_perf_analyzer_is_noted(monkeypatch, bench):
    def fail(*_, **__):
        raise RuntimeError("no stable measurement")

    monkeypatch.setattr(gpu_server_peers, "perf_analyzer", fail)
    row = measure_perf_analyzer(bench, TARGET, SCENE, Load("grpc", 64, 8), [])
    assert np.isnan(list(row.values())).all()
    assert "no stable measurement" in bench.report.notes[0]


def test_samples_have_a_key_per_table_and_thirteen_numbers():
    sample, outputs = perf_analyzer_steps(10)[0]
    assert outputs == {}
    assert len(sample) == 27
    assert sample["t0"].shape == (1,)
    assert 0 <= int(sample["t0"][0]) < 10
    assert sample["dense"].shape == (13,)


def test_triton_that_does_not_start_is_noted(monkeypatch, bench):
    @contextmanager
    def fail(*_, **__):
        raise RuntimeError("failed to load all models")
        yield

    monkeypatch.setattr(gpu_server_peers, "running_triton", fail)
    measure_triton(bench, SCENE, cells(1, 1), Instances())
    assert bench.report.notes == ["Triton was not measured: failed to load all models"]
    assert bench.report.values == {}


def cells(rate, p50):
    return {
        (protocol, 64, callers): SimpleNamespace(per_second=rate * callers, p50_ms=p50)
        for protocol in PROTOCOLS
        for callers in (1, 8)
    }


def test_ours_is_divided_by_tritons():
    values = {}
    judge(values, cells(1000, 0.2), cells(100, 1.0))
    assert values == {
        f"{name}_64_{protocol}": pytest.approx(value)
        for name, value in (("rate", 10), ("p50", 0.2))
        for protocol in PROTOCOLS
    }
    assert values.keys() <= {bar.name for bar in BENCHMARK.bars}


@pytest.mark.parametrize("gpu", [False, True])
def test_repository_has_the_ensemble_and_the_network_of_this_benchmark(tmp_path, gpu):
    scene = write_anchor(tmp_path, 10)
    write_triton(scene, tmp_path / "triton", Instances(3, 5, gpu))
    text = (tmp_path / "triton/dlrm.dense/config.pbtxt").read_text()
    (group,) = text_format.Parse(text, model_config_pb2.ModelConfig()).instance_group
    assert group.kind == (group.KIND_GPU if gpu else group.KIND_CPU)
    assert group.count == 5
    assert list(group.gpus) == ([0] if gpu else [])
    assert "CUDA" in (tmp_path / "triton/dlrm.dense/1/model.py").read_text()
    assert (tmp_path / "triton/dlrm.dense/1/dense.onnx").exists()
    assert {each.name for each in (tmp_path / "triton").iterdir()} == {
        "dlrm",
        "dlrm.dense",
        "dlrm.lookup",
    }
