"""Tests of the GPU server's benchmark: cores, requests, judged values."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from benchmarks.gpu_server import BATCHES, BENCHMARK, judge, measure_one_caller
from benchmarks.gpu_server_cells import Bench, Extent, Target
from benchmarks.gpu_server_misses import missed_and_samples
from benchmarks.gpu_server_scene import (
    PROTOCOLS,
    Cores,
    Reference,
    Scene,
    write_anchor,
)
from benchmarks.request_templates import answered_tensors, sent_tensors

SCENE = Scene(None, "m", 1000, 32)


def test_cores_of_a_large_machine_are_divided():
    cores = Cores.of(range(16))
    assert cores == Cores((0, 1), tuple(range(2, 10)), tuple(range(10, 16)))
    assert cores.server == tuple(range(10))
    assert cores.spin


def test_node_may_have_more_cores():
    cores = Cores.of(range(16), 4)
    assert cores == Cores((0, 1, 2, 3), (4, 5, 6, 7, 8, 9), tuple(range(10, 16)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 64])
def test_load_generator_has_cores_apart(count):
    cores = Cores.of(range(count))
    assert cores.node
    assert cores.workers
    assert cores.load
    assert count == 1 or not {*cores.load} & {*cores.server}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("batch", [1, 64])
def test_patches_cover_every_tensor(protocol, batch):
    template = SCENE.template(protocol, batch)
    sent = sent_tensors(template, template.message)
    assert [len(each) for each in sent] == [batch] * 26 + [13 * batch]
    if protocol == "grpc":
        request = pb.ModelInferRequest.FromString(template.message[5:])
        for each, raw in zip(sent, request.raw_input_contents, strict=True):
            assert each.tobytes() == raw
    else:
        assert all(not each.any() for each in sent)  # zeros: nothing but the tensors
        assert template.message.endswith(bytes(batch * (26 * 8 + 13 * 4)))


def test_grpc_answers_are_decoded():
    answer = pb.ModelInferResponse(model_name="m")
    answer.outputs.add(name="score", datatype="FP32", shape=[2, 1])
    answer.raw_output_contents.append(np.array([1, 2], np.float32).tobytes())
    template = SCENE.template("grpc", 1)
    outputs = answered_tensors(template, bytes(5) + answer.SerializeToString())
    assert outputs["score"].tolist() == [1, 2]


def cell(rate, p50, p99=None, errors=0):
    return SimpleNamespace(per_second=rate, p50_ms=p50, p99_ms=p99 or p50, errors=errors)


def test_rates_count_only_within_the_latency():
    gpu = {(p, 64, n): cell(n * 1000, n, p99=2 * n) for p in PROTOCOLS for n in (1, 2, 8)}
    cpu = {key: cell(500, 1) for key in gpu}
    values = {}
    judge(values, gpu, cpu)
    assert values["predict_64_rest"] == 2000
    assert values["machine_64"] == 16
    assert values["cells"] == 2


def test_protocols_are_compared_in_turn(monkeypatch):
    """A machine that becomes slower and slower, with a pause; gRPC takes a quarter longer."""
    asked = []

    def load(address, template, callers):
        asked.append((address, callers.count))
        p50 = 1.1 ** (len(asked) // 2) * (1.25 if address == "grpc-address" else 1.0)
        return cell(1, p50, p99=(9 if len(asked) == 5 else 1.5) * p50)

    monkeypatch.setattr("benchmarks.gpu_server_cells.run_load", load)
    bench = Bench(None, Extent(2.0, (1, 64), (1, 8)), Cores.of(range(16)), 8)
    target = Target("GPU", {p: f"{p}-address" for p in PROTOCOLS})
    values = measure_one_caller(bench, target, SCENE)
    for batch in (1, 64):
        assert values[f"grpc_{batch}"] == pytest.approx(1.25, rel=0.11)
        assert values[f"tail_{batch}_rest"] == values[f"tail_{batch}_grpc"] == pytest.approx(1.5)
    assert {*values} < {bar.name for bar in BENCHMARK.bars}
    assert asked[:4] == [("rest-address", 1), ("grpc-address", 1)] * 2


def test_every_value_has_a_bar():
    gpu = {(p, b, n): cell(1, 1) for p in PROTOCOLS for b in BATCHES for n in (1, 64)}
    values = {}
    judge(values, gpu, gpu)
    assert {*values} <= {bar.name for bar in BENCHMARK.bars}


@pytest.fixture(scope="module")
def anchor(tmp_path_factory):
    return write_anchor(tmp_path_factory.mktemp("anchor"), 50)


def test_reference_finds_wrong_scores(anchor):
    reference = Reference(anchor)
    template = anchor.template("grpc", 32)
    message = bytearray(template.message)
    for each in template.patches:
        width = 8 if each.limit else 4
        message[each.offset : each.offset + width * each.count] = bytes(width * each.count)
    rows = {f"t{i}": anchor.table(f"t{i}")[:1].repeat(32, 0) for i in range(26)}
    feed = rows | {"dense": np.zeros((32, 13), np.float32)}
    score = reference._network.run(["score"], feed)[0]
    assert 0 < score[0, 0] < 1
    for shift, wrong in ((0, 0), (0.01, 1)):
        answer = pb.ModelInferResponse(model_name="dlrm")
        answer.outputs.add(name="score", datatype="FP32", shape=[32, 1])
        answer.raw_output_contents.append((score + np.float32(shift)).tobytes())
        framed = bytes(5) + answer.SerializeToString()
        assert reference.wrong(template, bytes(message), framed) == wrong


def test_missed_keys_and_samples_are_read_from_metrics():
    text = """# TYPE hps_tier_keys_total counter
hps_tier_keys_total{tier="gpu",model="m",version="1",table="a",result="found"} 90
hps_tier_keys_total{tier="gpu",model="m",version="1",table="a",result="missed"} 3
hps_tier_keys_total{result="missed",tier="gpu",model="m",version="1",table="b"} 5
hps_tier_keys_total{tier="cpu",model="m",version="1",table="b",result="missed"} 7
hps_scheduler_samples_total{model="m",version="1"} 12
"""
    assert missed_and_samples(text) == (8, 12)
