"""Calls on the HTTP/2 transport by grpcio's clients."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import grpc
import pytest

from hps.errors import Unauthenticated
from services.frontend.grpc.http2.receive_budget import REQUEST_TIMEOUT_S
from tests.support.waiting import until


@pytest.fixture
def channel(port):
    with grpc.insecure_channel(port.url) as channel:
        yield channel


@pytest.mark.parametrize("method", ["Echo", "Thread"])
@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 70_000, 3_000_000])
def test_messages_of_all_sizes_are_echoed(channel, method, size):
    message = bytes(range(256)) * (size // 256 + 1)
    for _ in range(3):
        assert channel.unary_unary(f"/test/{method}")(message[:size], timeout=30) == message[:size]


def test_many_calls_in_parallel_are_answered(channel):
    echo = channel.unary_unary("/test/Thread")
    messages = [b"%d" % number * (number * 40 + 1) for number in range(60)]
    for _ in range(5):
        calls = [echo.future(each, timeout=30) for each in messages]
        assert [call.result() for call in calls] == messages


def test_grpc_aio_client_is_answered(port):
    async def call():
        async with grpc.aio.insecure_channel(port.url) as channel:
            echo = channel.unary_unary("/test/Echo")
            return await asyncio.gather(*[echo(b"%d" % number) for number in range(50)])

    assert asyncio.run(call()) == [b"%d" % number for number in range(50)]


def test_metadata_and_peer_are_passed(channel):
    call = channel.unary_unary("/test/Metadata")
    sent = [("x-request-id", "1"), ("a", "b"), ("raw-bin", b"\xff\0")]
    for _ in range(3):
        metadata, peer = eval(call(b"", metadata=sent, timeout=30))
        assert set(sent) <= set(metadata)
        assert dict(metadata)["user-agent"].startswith("grpc-python")
        assert not {"te", "content-type", ":path", "grpc-timeout"} & set(dict(metadata))
        assert peer.startswith("ipv4:127.0.0.1:")


@pytest.mark.parametrize(
    ("method", "code"),
    [("None", grpc.StatusCode.UNIMPLEMENTED), ("Broken", grpc.StatusCode.INTERNAL)],
)
def test_failed_calls_have_a_status(channel, method, code):
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/test/{method}")(b"", timeout=30)
    assert caught.value.code() is code


def test_call_without_a_message_fails(channel):
    with pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary("/test/Echo")(iter([]), timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "exactly one request message" in caught.value.details()


def test_too_large_message_is_rejected_by_its_prefix(channel):
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/test/Echo")(b"x" * (1 << 22 | 1), timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert channel.unary_unary("/test/Size")(b"x" * (1 << 22), timeout=30) == b"4194304"


@pytest.mark.parametrize("kind", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages_are_read(channel, kind):
    size = channel.unary_unary("/test/Size")
    for length in (100, 1_000_000):
        assert size(b"x" * length, compression=kind, timeout=30) == b"%d" % length
    with pytest.raises(grpc.RpcError) as caught:
        size(b"x" * 5_000_000, compression=kind, timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "ecompressed" in caught.value.details()


def test_several_answers_to_one_request_arrive(channel):
    answers = channel.unary_stream("/test/Several")(b"x" * 40_000, timeout=30)
    assert [next(answers) for _ in range(3)] == [b"x" * 40_000] * 3
    with pytest.raises(grpc.RpcError) as caught:
        next(answers)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_streams_echo_their_messages_and_send_trailers(port, channel):
    messages = [b"%d" % number * (number * 3000) for number in range(60)] + [b"y" * 3_000_000]
    call = channel.stream_stream("/test/Bidi")(iter(messages), timeout=30)
    assert list(call) == messages
    assert call.code() is grpc.StatusCode.OK
    assert set(call.trailing_metadata()) == {("left", "1"), ("raw-bin", b"\xff\0")}
    assert port.streams[0].events.count("sent") == len(messages)
    until(lambda: port.connection.is_idle)


def test_cancelled_call_keeps_its_slot_until_its_work_ends(port, channel):
    call = channel.unary_unary("/test/Later").future(b"x", timeout=30)
    until(lambda: port.calls.requests.open)
    call.cancel()
    assert port.gone.wait(10)
    assert port.calls.requests.open
    assert port.connection.running == 1
    port.gate.set()
    until(lambda: not port.calls.requests.open)
    assert port.connection.running == 0
    assert channel.unary_unary("/test/Echo")(b"1", timeout=30) == b"1"


def test_lost_connection_ends_its_calls(port):
    with grpc.insecure_channel(port.url) as channel:
        call = channel.unary_unary("/test/Later").future(b"x", timeout=30)
        until(lambda: port.calls.requests.open)
        port.call(port.connection.abort)
        assert port.gone.wait(10)
        assert call.exception(30).code() is grpc.StatusCode.UNAVAILABLE
    assert not port.context.connections


def test_calls_beyond_the_limit_are_rejected(make_port):
    port = make_port(most=2)
    with grpc.insecure_channel(port.url) as channel:
        later = channel.unary_unary("/test/Later")
        held = [later.future(b"x", timeout=30) for _ in range(2)]
        until(lambda: len(port.calls.requests.open) == 2)
        with pytest.raises(grpc.RpcError) as caught:
            later(b"", timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        port.gate.set()
        assert [call.result() for call in held] == [b"x", b"x"]
        assert channel.unary_unary("/test/Echo")(b"1", timeout=30) == b"1"


def test_connections_calls_wait_at_the_client_beyond_its_limit(make_port):
    port = make_port(max_calls_per_connection=2, most=64)
    with grpc.insecure_channel(port.url) as channel:
        calls = [channel.unary_unary("/test/Later").future(b"x", timeout=30) for _ in range(5)]
        until(lambda: len(port.calls.requests.open) == 2)
        time.sleep(0.1)
        assert len(port.calls.requests.open) == 2
        port.gate.set()
        assert [call.result() for call in calls] == [b"x"] * 5


def test_callers_are_checked_before_their_message(make_port):
    def check(context, role):
        if ("key", "right") in context.invocation_metadata():
            return "someone"
        raise Unauthenticated("no key")

    port = make_port(check=check)
    port.context.methods["/test/Echo"].reject = lambda error, reply: reply.fail(error)
    with grpc.insecure_channel(port.url) as channel:
        over = threading.Event()

        def nothing():
            over.wait(30)
            yield from ()

        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary("/test/Echo")(nothing(), timeout=30)
        over.set()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        echo = channel.unary_unary("/test/Echo")
        assert echo(b"1", metadata=[("key", "right")], timeout=30) == b"1"
    assert not port.calls.requests.open


def test_call_whose_request_does_not_arrive_ends(port, channel):
    over = threading.Event()

    def nothing():
        over.wait(30)
        yield from ()

    call = channel.stream_unary("/test/Echo").future(nothing(), timeout=300)
    until(lambda: port.calls._expected)
    port.sweep(REQUEST_TIMEOUT_S - 1)
    assert not call.done()
    port.sweep(REQUEST_TIMEOUT_S + 1)
    assert call.exception(30).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    over.set()
    assert not port.calls.requests.open


def test_deadline_ends_a_call_and_a_stream(port, channel):
    later = channel.unary_unary("/test/Later").future(b"x", timeout=100)
    stream = channel.stream_stream("/test/Bidi")(_never(port.gate), timeout=100)
    until(lambda: port.calls.requests.open and port.streams)
    port.sweep(103)
    assert later.exception(30).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert port.gone.is_set()
    assert port.streams[0].events == ["gone"]
    assert port.calls.requests.open  # the work still runs


def _never(gate):
    gate.wait(30)
    yield from ()


def test_drain_lets_calls_finish_and_closes(port, channel):
    later = channel.unary_unary("/test/Later").future(b"x", timeout=30)
    until(lambda: port.calls.requests.open)
    connection = port.connection
    port.call(connection.begin_drain)
    time.sleep(0.1)
    assert connection in port.context.connections
    port.gate.set()
    assert later.result() == b"x"
    until(lambda: connection not in port.context.connections)
    assert channel.unary_unary("/test/Echo")(b"1", timeout=30) == b"1"  # on another connection


def test_no_call_is_lost_while_connections_age(make_port):
    port = make_port(age_s=0.0, grace_s=30.0)
    with grpc.insecure_channel(port.url) as channel:
        echo = channel.unary_unary("/test/Thread")
        for number in range(300):
            assert echo(b"%d" % number, timeout=30) == b"%d" % number
            if number % 20 == 0:
                port.sweep()


def test_idle_and_unfinished_connections_end(port, connect):
    greeted, silent = connect(port), connect(port, preface=False)
    greeted.ping()
    until(lambda: len(port.context.connections) == 2)
    port.sweep(21)
    assert silent.receive() is None
    greeted.ping()
    port.sweep(301)
    assert greeted.receive_kind(7) is not None
    port.sweep(303)
    assert greeted.receive_kind(99) is None


def test_vanished_clients_are_noticed(port, raw):
    raw.ping()
    sock = port.connection.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 300
