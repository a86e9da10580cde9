"""Tests of the headers of a target."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from hps.tools.conformance import CheckedServer, SampleRequest
from hps.tools.conformance.grpc_checks import SUITE


class Nothing(grpc.GenericRpcHandler):
    """A server that has no call, and keeps the metadata of those it was asked for."""

    def __init__(self):
        self.asked = []

    def service(self, details):
        self.asked.append((details.method, dict(details.invocation_metadata)))


def test_headers_are_sent_with_every_call():
    nothing = Nothing()
    sample = SampleRequest("m", {"x": np.ones((2, 2), np.float32)}, ("y",))
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[nothing])
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        target = CheckedServer("", address, (sample,), {"x-api-key": "secret"})
        assert {check.verdict(target)[0] for check in SUITE.checks} >= {"differs"}
        server.stop(None).wait()
    methods = {method.split("/")[1] for method, _ in nothing.asked}
    assert methods >= {"grpc.health.v1.Health", "inference.GRPCInferenceService"}
    without = [method for method, sent in nothing.asked if sent.get("x-api-key") != "secret"]
    assert not without
