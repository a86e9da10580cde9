"""Repeated predictions, whose bytes are sent to the GPU's scheduler as they are, without making arrays."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2 as pb

from hps.errors import Unavailable
from hps.native import COMPILED
from services.frontend.grpc.request import GrpcRequestParser, address
from services.frontend.http.request import HttpRequestParser
from services.frontend.inference_request import InferenceRequest
from services.frontend.ranking_endpoint import RankingEndpoint
from tests.unit.node.test_gpu_caches import (  # noqa: F401 # fixtures
    HELD,
    open_node,
    pair,
    request_of,
)
from tests.unit.node.test_gpu_scheduler import repository  # noqa: F401 # fixture

pytestmark = pytest.mark.skipif(not COMPILED, reason="the scheduler is part of the compiled core")
PROTOCOLS = ["rest", "grpc"]


@pytest.fixture
def scheduled(pair):  # noqa: F811
    """An endpoint with a GPU's twin, and one without GPU."""
    node, plain, _ = pair
    return RankingEndpoint(node.model("m")), RankingEndpoint(plain.model("m"))


def tensors(client, keys, batch, extra=0):
    features, dense = request_of(keys, batch)
    if extra:
        features["seen"] = np.concatenate([features["seen"]] * (1 + extra), axis=1)
    arrays = features | dense
    made = []
    for name, array in arrays.items():
        kind = "INT64" if array.dtype == np.int64 else "FP32"
        shape = list(array.shape) if array.ndim == 2 else [len(array), 1]
        tensor = client.InferInput(name, shape, kind)
        tensor.set_data_from_numpy(array.reshape(shape))
        made.append(tensor)
    return made


class Sender:
    """Parses requests as a server of ``protocol`` does, and gives them to endpoints."""

    def __init__(self, protocol: str, endpoint: RankingEndpoint) -> None:
        self.endpoint = endpoint
        self._protocol = protocol
        self._parser = (HttpRequestParser if protocol == "rest" else GrpcRequestParser)(
            "m", endpoint.rules, 1 << 20
        )

    def call(self, keys, batch, **options) -> InferenceRequest:
        if self._protocol == "rest":
            made = tensors(triton_http, keys, batch)
            body, size = triton_http.InferenceServerClient.generate_request_body(made, **options)
            return self._parser.parse(body, size)
        made = tensors(triton_grpc, keys, batch)
        request = pb.ModelInferRequest(model_name="m")
        for each in made:
            request.inputs.append(each._get_tensor())
            request.raw_input_contents.append(each._get_content())
        message = request.SerializeToString()
        return self._parser.parse(message, address(message))

    def scores(self, call: InferenceRequest) -> np.ndarray:
        result = self.endpoint.submit(call, time.monotonic() + 30).result(30)
        return result.outputs["all"]


@pytest.fixture(params=PROTOCOLS)
def senders(request, scheduled):
    return [Sender(request.param, endpoint) for endpoint in scheduled]


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_repeated_requests_are_sent_without_arrays_and_get_their_own_scores(senders, batch):
    here, plain = senders
    here.scores(here.call(np.arange(10), batch))
    here.scores(here.call(np.arange(10), batch))
    for first in (50, 100):
        keys = np.arange(first, first + 60)
        call = here.call(keys, batch)
        assert call.form.prepared_message is not None
        scores = here.scores(call)
        assert call._inputs is None
        np.testing.assert_array_equal(scores, plain.scores(plain.call(keys, batch)))
        assert call.batch == batch


def test_prepared_requests_with_missing_rows_get_their_own_scores(senders):
    here, plain = senders
    for keys in (np.arange(100), np.arange(HELD - 50, HELD + 50), np.arange(100)):
        expected = plain.scores(plain.call(keys, 20))
        np.testing.assert_array_equal(here.scores(here.call(keys, 20)), expected)


def test_requests_of_another_shape_are_prepared_apart(senders):
    here, plain = senders
    for batch in (3, 4, 3, 4):
        keys = np.arange(100)
        scores = here.scores(here.call(keys, batch))
        np.testing.assert_array_equal(scores, plain.scores(plain.call(keys, batch)))


def test_closed_scheduler_fails_prepared_requests(senders, pair):  # noqa: F811
    here, _ = senders
    for _ in range(2):
        here.scores(here.call(np.arange(100), 2))
    call = here.call(np.arange(100), 2)
    pair[0].close()
    with pytest.raises(Unavailable):
        here.scores(call)
