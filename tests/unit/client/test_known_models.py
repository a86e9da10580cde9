"""The clients' memory of a model's metadata, when the server changes the version; closed clients."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from hps.client import AsyncClient, Client
from hps.errors import BadRequest, HpsError


class Model(GRPCInferenceServiceServicer):
    """Serves ``version`` of a model, with one dense input of ``datatype`` and the ``outputs``."""

    def __init__(self):
        self.version, self.datatype, self.outputs = "1", "FP32", ["score"]
        self.rejects = False
        self.remaining, self.calls = [], 0

    def ModelMetadata(self, request, context):
        self.remaining.append(context.time_remaining())
        answer = pb.ModelMetadataResponse(name=request.name, versions=[self.version])
        answer.inputs.add(name="dense", datatype=self.datatype, shape=[-1])
        for name in self.outputs:
            answer.outputs.add(name=name, datatype="FP32", shape=[-1])
        return answer

    def ModelInfer(self, request, context):
        self.calls += 1
        types = {tensor.name: tensor.datatype for tensor in request.inputs}
        if self.rejects or types["dense"] != self.datatype:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "inference input data-type is wrong")
        answer = pb.ModelInferResponse(model_name=request.model_name, model_version=self.version)
        for wanted in request.outputs:
            datatype = "UINT8" if wanted.name.endswith(".source") else "FP32"
            answer.outputs.add(name=wanted.name, datatype=datatype, shape=[1])
            answer.raw_output_contents.append(bytes(1 if datatype == "UINT8" else 4))
        return answer


@pytest.fixture
def model():
    made = Model()
    server = grpc.server(ThreadPoolExecutor(4))
    add_GRPCInferenceServiceServicer_to_server(made, server)
    made.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made
    server.stop(0).wait(30)


class Threads(Client):
    end = Client.close


class Asyncio:
    """`AsyncClient` on its own loop, called as `Client` is."""

    def __init__(self, url):
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(url)

    def __getattr__(self, name):
        method = getattr(self._client, name)
        return lambda *args, **more: self._loop.run_until_complete(method(*args, **more))

    def end(self):
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


@pytest.fixture(params=[Threads, Asyncio], ids=["threads", "asyncio"])
def client(request, model):
    made = request.param(model.url)
    yield made
    made.end()


def predict(client, **more):
    features, dense = {"user": [1]}, {"dense": [0.5]}
    return list(client.predict("m", features, dense, want_source=True, **more).outputs)


def test_metadata_is_requested_once(client, model):
    for _ in range(3):
        assert predict(client) == ["score"]
    assert (len(model.remaining), model.calls) == (1, 3)


def test_version_with_other_outputs_refreshes_the_metadata(client, model):
    predict(client)
    model.version, model.outputs = "2", ["score", "logit"]
    for _ in range(2):
        assert predict(client) == ["score", "logit"]
    assert (len(model.remaining), model.calls) == (2, 4)


def test_version_with_other_inputs_refreshes_the_metadata(client, model):
    predict(client)
    model.version, model.datatype = "2", "FP64"
    for _ in range(2):
        assert predict(client) == ["score"]
    assert (len(model.remaining), model.calls) == (2, 4)


def test_rejected_request_is_not_repeated_for_the_same_model(client, model):
    predict(client)
    model.rejects = True
    with pytest.raises(BadRequest, match="data-type is wrong"):
        predict(client)
    assert (len(model.remaining), model.calls) == (2, 2)


def test_metadata_request_counts_against_the_timeout(client, model):
    predict(client, timeout_s=5)
    assert 0 < model.remaining[0] < 6  # gRPC rounds up; without a time of its own it would be 30


def test_top_k_accepts_numpy_integers_only(client, model):
    assert predict(client, top_k=np.int64(3)) == ["score", "top_k_index"]
    with pytest.raises(BadRequest, match=r"top_k must be a whole number, got 2\.5"):
        predict(client, top_k=2.5)


def test_closed_client_raises_and_closes_again(client):
    assert predict(client)
    client.close()
    client.close()
    with pytest.raises(HpsError, match="was closed"):
        predict(client)


def test_channel_closed_by_another_thread_raises(model):
    with Client(model.url) as client:
        closing = threading.Thread(target=client._transport.close)
        closing.start()
        closing.join()
        with pytest.raises(HpsError, match=f"the request to {model.url} was not sent"):
            predict(client)
