"""Tests of the headers of a target."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from hps.tools.conformance import CheckedServer, SampleRequest
from hps.tools.conformance.grpc_checks import SUITE


class NoMethods(grpc.GenericRpcHandler):
    """A server that has no call, and keeps the metadata of those it was asked for."""

    def __init__(self):
        self.calls = []

    def service(self, details):
        self.calls.append((details.method, dict(details.invocation_metadata)))


def test_headers_are_sent_with_every_call():
    handler = NoMethods()
    sample = SampleRequest("m", {"x": np.ones((2, 2), np.float32)}, ("y",))
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[handler])
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        target = CheckedServer("", address, (sample,), {"x-api-key": "secret"})
        assert {check.verdict(target)[0] for check in SUITE.checks} >= {"differs"}
        server.stop(None).wait()
    methods = {method.split("/")[1] for method, _ in handler.calls}
    assert methods >= {"grpc.health.v1.Health", "inference.GRPCInferenceService"}
    without = [method for method, sent in handler.calls if sent.get("x-api-key") != "secret"]
    assert not without
