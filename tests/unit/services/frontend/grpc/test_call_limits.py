"""Calls of one gRPC client while another makes and cancels as many as it can."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from services.frontend.grpc.http2.limits import CALLS_PER_CONNECTION
from services.frontend.grpc.service import SERVICE
from tests.support import cancel_storm

METHOD = f"/{SERVICE}/ModelInfer"
STORM_S = 3


@pytest.fixture
def message():
    request = pb.ModelInferRequest(model_name="words.lookup")
    request.inputs.add(name="left", datatype="INT64", shape=[1, 1]).contents.int64_contents.append(
        1
    )
    return request.SerializeToString()


def test_no_call_fails_while_another_client_cancels_many(serve, message):
    url = serve().server.url
    command = [sys.executable, Path(cancel_storm.__file__), url, METHOD, str(STORM_S)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as storm, grpc.insecure_channel(url) as channel:
        storm.stdin.write(message)
        storm.stdin.close()
        assert storm.stdout.readline() == b"storm begins\n"
        infer, ends = channel.unary_unary(METHOD), Counter()
        while storm.poll() is None:
            calls = [infer.future(message, timeout=60) for _ in range(16)]
            ends.update(call.code() for call in calls)
        made = int(storm.stdout.read())
    assert made > 5 * CALLS_PER_CONNECTION
    assert set(ends) == {grpc.StatusCode.OK}, ends


def test_connection_may_have_all_its_calls_in_flight(serve, message):
    with grpc.insecure_channel(serve().server.url) as channel:
        infer = channel.unary_unary(METHOD)
        calls = [infer.future(message, timeout=60) for _ in range(CALLS_PER_CONNECTION)]
        assert {call.code() for call in calls} == {grpc.StatusCode.OK}
