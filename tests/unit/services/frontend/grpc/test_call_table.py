"""The calls of a port: on the event loop and on other threads, their limits, calls without requests."""

from __future__ import annotations

import threading
from contextlib import closing

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb

from hps.errors import BadRequest
from services.frontend.grpc import listener as port
from services.frontend.grpc import responders
from services.frontend.grpc import slow_readers as unsent_module
from services.frontend.grpc.http2 import calls as module
from services.frontend.grpc.http2 import unary_call as unary
from services.frontend.grpc.service import SERVICE
from tests.support.http2_client import Http2Client
from tests.support.waiting import until
from tests.unit.services.frontend.grpc.test_server import keys


def streams(running):
    """The streams that are open on a running server's connections."""
    connections = list(running.server.context.connections)  # copies, which no other thread changes
    return [each for connection in connections for each in list(connection.streams)]


def record_threads(running, monkeypatch):
    """Return a list that gets the name of the thread of each lookup submitted from now on."""
    endpoint = type(running.state.entries["words.lookup"].endpoint)
    names = []
    submit = endpoint.submit
    monkeypatch.setattr(
        endpoint,
        "submit",
        lambda *args, **kwargs: (
            names.append(threading.current_thread().name),
            submit(*args, **kwargs),
        )[1],
    )
    return names


def test_lookups_from_memory_are_answered_on_the_event_loop(serve, small, monkeypatch):
    names = record_threads(small, monkeypatch)
    with triton.InferenceServerClient(serve().server.url) as client:
        for _ in range(5):
            client.infer("words.lookup", [keys("left", 1)])
    assert len(set(names)) == 1
    assert not names[0].startswith("grpc-")


@pytest.mark.parametrize("method", ["ModelInfer", "ServerLive"])
def test_call_without_a_request_fails(serve, method):
    with grpc.insecure_channel(serve().server.url) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(f"/{SERVICE}/{method}")(iter([]), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "exactly one request message" in caught.value.details()


@pytest.mark.parametrize(
    "method", [f"{SERVICE}/ModelInfer", f"{SERVICE}/RepositoryModelLoad", "hps.v1.Lookup/Lookup"]
)
def test_calls_of_unknown_callers_are_rejected_before_their_message(serve, key_guard, method):
    """Messages can be large."""
    url, over = serve(key_guard).server.url, threading.Event()

    def nothing():
        over.wait()
        yield from ()

    with grpc.insecure_channel(url) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary(f"/{method}")(nothing(), timeout=50)
        over.set()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with triton.InferenceServerClient(url) as client:  # needs no key
        assert client.is_server_live()
        known = {"x-api-key": "r" * 16}
        client.infer("words.lookup", [keys("left", 1)], headers=known)
        client.get_model_metadata("words.lookup", headers=known)
        with pytest.raises(triton.InferenceServerException, match="needs role admin"):
            client.load_model("words", headers=known)


def test_api_key_is_checked_once_per_call(serve, key_guard, monkeypatch):
    monkeypatch.setattr(module, "_RECHECK_S", 600.0)
    checks = []
    check = key_guard.check
    monkeypatch.setattr(key_guard, "check", lambda *args: (checks.append(1), check(*args))[1])
    with triton.InferenceServerClient(serve(key_guard).server.url) as client:
        client.infer("words.lookup", [keys("left", 1)], headers={"x-api-key": "r" * 16})
        assert len(checks) == 1


@pytest.mark.parametrize("method", [f"{SERVICE}/ModelInfer", "hps.v1.Lookup/Lookup"])
def test_key_that_expires_before_the_message_arrives_is_rejected(
    serve, key_guard, monkeypatch, method
):
    monkeypatch.setattr(module, "_RECHECK_S", -1.0)
    server, revoked = serve(key_guard).server, threading.Event()

    def request():
        revoked.wait()
        yield b""

    with grpc.insecure_channel(server.url) as channel:
        key = [("x-api-key", "r" * 16)]
        call = channel.stream_unary(f"/{method}").future(request(), timeout=60, metadata=key)
        until(lambda: server.calls._expected)
        monkeypatch.setattr(key_guard._keys, "authenticate", lambda _key: None)
        revoked.set()
        with pytest.raises(grpc.RpcError) as caught:
            call.result()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", ["ModelInfer", "RepositoryModelLoad"])
def test_rejected_calls_end(serve, key_guard, method):
    """They do not count towards the maximum of open calls."""
    running = serve(key_guard)
    with grpc.insecure_channel(running.server.url) as channel:
        for _ in range(20):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{SERVICE}/{method}")(b"", timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    until(lambda: not streams(running))
    assert not running.server.calls.requests.open
    assert not running.server.calls.auxiliary.open


def test_invalid_message_is_rejected(serve):
    with grpc.insecure_channel(serve().server.url) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE}/ModelMetadata")(b"\xff\xff", timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_internal_error_does_not_end_the_server(serve, small, monkeypatch):
    server = serve()
    with triton.InferenceServerClient(server.server.url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(unary.UnaryCall, "answer", lambda self, message: 1 / 0)
            with pytest.raises(triton.InferenceServerException, match="INTERNAL"):
                client.infer("words.lookup", [keys("left", 1)])
        client.infer("words.lookup", [keys("left", 1)])


@pytest.mark.alone
def test_ended_calls_are_not_counted(serve, small):
    server = serve()
    requests = server.server.calls.requests.open
    small.store.gate.clear()
    with triton.InferenceServerClient(server.server.url) as client:
        client.infer("words.lookup", [keys("left", 1)])
        with pytest.raises(triton.InferenceServerException):
            client.infer("none", [keys("left", 1)])
        begun = small.store.fetches
        left = client.async_infer("words.lookup", [keys("left", 12)], lambda result, error: None)
        until(
            lambda: small.store.fetches > begun
        )  # a call that has not begun has no work to wait for
        left.cancel()
        until(lambda: not streams(server))
        assert requests  # its work still runs
        small.store.gate.set()
        until(lambda: not requests)


def test_calls_without_a_request_block_no_others_and_end(serve, monkeypatch):
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.0)
    monkeypatch.setattr(module, "SWEEP_S", 2.0)
    server = serve()
    gate = threading.Event()

    def nothing():
        gate.wait(60)
        yield from ()

    health, watch = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    with (
        grpc.insecure_channel(server.server.url) as channel,
        triton.InferenceServerClient(server.server.url) as client,
    ):
        waiting = [
            channel.stream_unary(method).future(nothing())
            for method in [health] * 20 + [f"/{SERVICE}/ModelInfer"] * 20
        ]
        unasked = [channel.stream_stream(watch)(nothing()) for _ in range(40)]
        watching = [channel.stream_stream(reflection)(nothing()) for _ in range(20)]
        assert client.is_server_live()
        check = channel.unary_unary(health)
        assert check(b"", timeout=60) == b"\x08\x01"
        client.infer("words.lookup", [keys("left", 1)])
        for call in waiting:
            with pytest.raises(grpc.RpcError) as caught:
                call.result(60)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for stream in unasked:
            assert stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.set()
        for stream in watching:
            stream.cancel()


def test_calls_that_wait_for_their_request_leave_slots_for_health(serve, monkeypatch):
    monkeypatch.setattr(port, "_REQUESTS", 6)
    monkeypatch.setattr(port, "_AUXILIARY", 2)
    url, gate = serve().server.url, threading.Event()

    def nothing():
        gate.wait(60)
        yield from ()

    health = "/grpc.health.v1.Health/Check"
    with grpc.insecure_channel(url) as channel, triton.InferenceServerClient(url) as client:
        waiting = [channel.stream_unary(health).future(nothing()) for _ in range(7)]
        assert channel.unary_unary(health)(b"", timeout=60) == b"\x08\x01"
        client.infer("words.lookup", [keys("left", 1)])
        waiting += [channel.stream_unary(health).future(nothing()) for _ in range(9)]
        until(lambda: sum(call.done() for call in waiting) == 8)
        refused = [call for call in waiting if call.done()]
        assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        gate.set()


def test_server_continues_if_cancelling_a_calls_work_fails(serve, small, monkeypatch):
    server = serve()

    def broken(*_):
        raise RuntimeError("broken")

    small.store.gate.clear()
    with triton.InferenceServerClient(server.server.url) as client:
        monkeypatch.setattr(unary.UnaryCall, "waits_for", lambda self, _: self.when_gone(broken))
        left = client.async_infer("words.lookup", [keys("left", 12)], lambda result, error: None)
        until(lambda: server.server.calls.requests.open)
        left.cancel()
        until(lambda: not streams(server))
        small.store.gate.set()
        client.infer("words.lookup", [keys("left", 1)])


def test_error_text_that_is_not_unicode_is_sent_with_replacements(serve, monkeypatch):
    server = serve()

    def broken(*_, **_only):
        raise BadRequest("lone: \udcff")

    monkeypatch.setattr("services.frontend.grpc.service.index", broken)
    with (
        triton.InferenceServerClient(server.server.url) as client,
        pytest.raises(triton.InferenceServerException, match=r"INVALID_ARGUMENT.*lone: \?"),
    ):
        client.get_model_repository_index(client_timeout=60)
    until(lambda: not server.server.calls.auxiliary.open)


def test_rejection_of_a_caller_stays_although_its_key_becomes_valid(
    serve, key_guard, small, monkeypatch
):
    """The call is not made if the key becomes valid meanwhile."""
    url, made = serve(key_guard).server.url, []
    monkeypatch.setattr("services.frontend.grpc.service.load", lambda *args: made.append(args))
    check = key_guard.check
    calls = []

    def once(*args):
        calls.append(1)
        if len(calls) == 1:
            return check(*args)
        return "somebody"

    monkeypatch.setattr(key_guard, "check", once)
    with grpc.insecure_channel(url) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE}/RepositoryModelLoad")(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert made == []


def test_large_requests_do_not_block_the_event_loop(serve, small, monkeypatch):
    names = record_threads(small, monkeypatch)
    monkeypatch.setattr(responders, "LARGE_BYTES", 8)
    with triton.InferenceServerClient(serve().server.url) as client:
        client.infer("words.lookup", [keys("left", 1)])
        monkeypatch.setattr(unary.UnaryCall, "answer", lambda self, message: 1 / 0)
        with pytest.raises(triton.InferenceServerException, match="INTERNAL"):
            client.infer("words.lookup", [keys("left", 1)])
    assert all(name.startswith("grpc-large") for name in names)


def test_long_error_details_arrive(client):
    with pytest.raises(triton.InferenceServerException, match="NOT_FOUND"):
        client.infer("ü" * 20_000, [keys("left", 1)])


@pytest.mark.parametrize("limit", ["_SEND_TIMEOUT_S", "_MAX_UNSENT_BYTES"])
def test_answers_that_the_client_does_not_read_are_dropped(serve, monkeypatch, limit):
    monkeypatch.setattr(unsent_module, "_SWEEP_S", 0.01)
    server = serve()
    values = [1] * 1900  # one frame of request, more than 16 KiB of answer
    request = pb.ModelInferRequest(model_name="words.lookup")
    request.inputs.add(name="left", datatype="INT64", shape=[len(values), 1])
    request.raw_input_contents.append(np.array(values).tobytes())
    with closing(Http2Client(server.server.url)) as stalled:
        stalled.call(f"/{SERVICE}/ModelInfer", request.SerializeToString())
        noted = server.server.calls.slow_readers._answers
        until(lambda: noted)
        with triton.InferenceServerClient(server.server.url) as client:
            client.infer("words.lookup", [keys("left", *values)])
        until(lambda: len(noted) == 1)  # that one was read
        assert len(streams(server)) == 1
        monkeypatch.setattr(unsent_module, limit, -1.0)
        until(lambda: not streams(server))
        assert not noted
