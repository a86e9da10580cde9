"""Statistics of batched requests over gRPC."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from hps.config import Settings
from hps.config.admission_settings import AdmissionSettings, BatchingSettings
from hps.config.server_settings import ServerSettings
from hps.errors import Unavailable
from services.frontend.state import FrontendState
from tests.support.waiting import until
from tests.unit.services.frontend.grpc.test_lookup import Client, keys, question


@pytest.fixture
def batches(small, serve):
    """A client of a server that runs one batch at a time; ``lookup`` is the method of `hps.v1`."""
    settings = ServerSettings(
        batching=BatchingSettings(at_once=1), admission=AdmissionSettings(running=64)
    )
    small.state = FrontendState(settings=Settings(server=settings))
    small.state.serve(small.node)
    with grpc.insecure_channel(serve().server.url) as channel:
        stub = GRPCInferenceServiceStub(channel)
        stub.lookup = Client(channel).lookup
        yield stub
        small.store.gate.set()


def request(model, **inputs):
    request = pb.ModelInferRequest(model_name=model)
    for name, values in inputs.items():
        values = np.array(values, np.float32 if name == "dense" else np.int64)
        datatype = "FP32" if name == "dense" else "INT64"
        request.inputs.add(name=name, datatype=datatype, shape=values.shape)
        request.raw_input_contents.append(values.tobytes())
    return request


def prediction(n):
    keys = [[15]] * n
    dense = [[1, 2, 3]] * n
    return request("ctr", user=keys, item=keys, history=keys, dense=dense)


def lookup(n):
    return request("words.lookup", left=[[15]] * n)


def by_table(n):
    return request("words.lookup", KEYS=[[15] * n], NUMKEYS=[[n, 0]])


def ask(small, ask_for, *requests, model=None):
    """Send requests; the first runs alone, the others form the next batch. Return their calls."""
    small.store.gate.clear()
    line = small.state.entries[model or requests[0].model_name].endpoint
    calls = []
    for each in requests:
        calls.append(ask_for.future(each, timeout=60))
        until(lambda: line.running == len(calls))
    return calls


def reported(stub, model):
    """Samples, executions, requests, and the number of executions by batch size."""
    request = pb.ModelStatisticsRequest(name=model)
    (found,) = stub.ModelStatistics(request, timeout=60).model_stats
    sizes = {each.batch_size: each.compute_infer.count for each in found.batch_stats}
    requests = found.inference_stats.success.count
    return found.inference_count, found.execution_count, requests, sizes


@pytest.mark.parametrize("make", [prediction, lookup])
def test_batch_counts_as_one_execution(small, batches, make):
    calls = ask(small, batches.ModelInfer, make(3), make(1), make(2), make(4))
    small.store.gate.set()
    for call in calls:
        call.result(60)
    model = make(1).model_name
    assert reported(batches, model) == (10, 2, 4, {3: 1, 7: 1})
    batches.ModelInfer(make(3), timeout=60)
    assert reported(batches, model) == (13, 3, 5, {3: 2, 7: 1})


def test_keys_by_table_count_as_one_sample(small, batches):
    batches.ModelInfer(by_table(0), timeout=60)  # answered immediately
    calls = ask(small, batches.ModelInfer, by_table(5), by_table(2), by_table(3))
    small.store.gate.set()
    for call in calls:
        call.result(60)
    assert reported(batches, "words.lookup") == (4, 3, 4, {1: 2, 2: 1})


@pytest.mark.parametrize("report", [False, True])
def test_lookups_of_other_nodes_are_batched(small, batches, report):
    requests = [
        question("words", keys("left", *mine, batch=2), version=1, report=report)
        for mine in ((15, 16), (16, 17), (18, 15))
    ]
    calls = ask(small, batches.lookup, *requests, model="words.lookup")
    small.store.gate.set()
    answers = [call.result(60) for call in calls]
    assert reported(batches, "words.lookup") == (6, 2, 3, {2: 1, 4: 1})
    for answer, each in zip(answers, requests, strict=True):
        alone = batches.lookup(each, timeout=60)
        assert (answer.vectors, answer.versions) == (alone.vectors, alone.versions)
        assert len(answer.sources) == 2 * report
        assert not answer.defaulted


def test_keys_by_table_of_other_nodes_count_as_one_sample(small, batches):
    requests = [
        question("words", keys("left", *range(15, 15 + n)), by_table=True, version=1)
        for n in (5, 2, 3)
    ]
    calls = ask(small, batches.lookup, *requests, model="words.lookup")
    small.store.gate.set()
    answers = [call.result(60) for call in calls]
    assert reported(batches, "words.lookup") == (3, 2, 3, {1: 1, 2: 1})
    for answer, each in zip(answers, requests, strict=True):
        assert answer.vectors == batches.lookup(each, timeout=60).vectors


@pytest.mark.parametrize("wrong", [1, 2])
def test_batch_is_counted_although_one_of_its_requests_fails_later(
    small, batches, wrong, monkeypatch
):
    line = small.state.entries["ctr"].endpoint
    outputs = line.outputs

    def picky(call, result):
        if call.id == "wrong":
            raise Unavailable("too late")
        return outputs(call, result)

    monkeypatch.setattr(line, "outputs", picky)
    requests = [prediction(n) for n in (5, 1, 2)]
    requests[wrong].id = "wrong"
    calls = ask(small, batches.ModelInfer, *requests)
    small.store.gate.set()
    assert calls.pop(wrong).code() is grpc.StatusCode.UNAVAILABLE
    for call in calls:
        call.result(60)
    assert reported(batches, "ctr") == (8 - wrong, 2, 2, {5: 1, 3: 1})
