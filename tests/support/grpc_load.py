"""gRPC clients whose server stops while a second server runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    GRPCInferenceServiceStub,
    add_GRPCInferenceServiceServicer_to_server,
)

CLIENTS, CALLS = 8, 50
# What a client has to say for its calls to be sent again.
_RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


class _Replica(GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers everything."""

    def ModelInfer(self, request: pb.ModelInferRequest, context: object) -> pb.ModelInferResponse:
        return pb.ModelInferResponse(id="replica")


def _lookup_request() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="words.lookup")
    request.inputs.add(name="word", datatype="INT64", shape=[1, 1])
    request.raw_input_contents.append(np.array([1]).tobytes())
    return request


@contextmanager
def no_call_lost(address: str) -> Iterator[None]:
    """Clients ask the server at ``address`` as fast as they can; entered when each has been answered some
    times. What is done inside ends it: then all must be answered by another, and no call may fail."""
    replica = grpc.server(ThreadPoolExecutor(4))
    add_GRPCInferenceServiceServicer_to_server(_Replica(), replica)
    other = f"127.0.0.1:{replica.add_insecure_port('127.0.0.1:0')}"
    replica.start()
    answered = [threading.Semaphore(0) for _ in range(CLIENTS)]

    def ask_until_the_other_answers(mine: threading.Semaphore) -> None:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.service_config", json.dumps(_RETRIES)),
        ]
        with grpc.insecure_channel(f"ipv4:{address},{other}", options) as channel:
            infer = GRPCInferenceServiceStub(channel).ModelInfer
            while infer(_lookup_request(), timeout=60).id != "replica":
                mine.release()

    with ThreadPoolExecutor(CLIENTS) as pool:
        ends = [pool.submit(ask_until_the_other_answers, each) for each in answered]
        for each in answered:
            assert all(each.acquire(timeout=60) for _ in range(CALLS))
        yield
        for end in ends:
            end.result(60)
    replica.stop(None)
