"""Clients of gRPC that make, cancel and miss many calls: none is taken for a hostile one."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from services.frontend.grpc.http2 import limits
from tests.unit.services.frontend.grpc.http2.conftest import RawClient

OK, CANCELLED, MISSED = (
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


@pytest.fixture
def port(make_port, monkeypatch):
    """A port that allows few useless frames but for the calls that it answers."""
    monkeypatch.setattr(limits, "_BURST", 200)
    monkeypatch.setattr(limits, "_PER_S", 0)
    port = make_port(most=4096)
    made = []
    enter = port.context.limit.enter
    port.context.limit.enter = lambda host: made.append(host) or enter(host)
    yield port
    assert len(made) == 1  # no client had to connect again


def test_threads_that_cancel_half_of_their_calls(port):
    with grpc.insecure_channel(port.url) as channel:
        call = channel.unary_unary("/test/Thread")
        for _ in range(20):
            calls = [call.future(b"x" * 1000, timeout=30) for _ in range(100)]
            for each in calls[::2]:
                each.cancel()
            assert {each.code() for each in calls} <= {OK, CANCELLED}
            assert all(each.result() == b"x" * 1000 for each in calls[1::2])


def test_aio_client_with_short_deadlines(port):
    async def run():
        async with grpc.aio.insecure_channel(port.url) as channel:
            call = channel.unary_unary("/test/Thread")
            seen = set()
            for number in range(20):
                some = [call(b"x" * 20_000, timeout=0.0005 * (n % 40)) for n in range(100)]
                seen |= {await each.code() for each in some}
                assert await call(b"%d" % number, timeout=30) == b"%d" % number
            return seen

    assert asyncio.run(run()) <= {OK, MISSED}


def test_clients_whose_calls_all_fail(port):
    client = RawClient(port)
    for stream in range(1, 2000, 2):
        client.head(stream, path="/test/None")
        client.frame(6, 0, 0, b"12345678")
        assert client.status(stream)["grpc-status"] == "12"
    client.close()


def test_client_of_tiny_frames_on_64_streams(port, raw):
    """Only empty frames are useless, not small ones."""
    for stream in range(1, 129, 2):
        raw.head(stream, path="/test/Size")
    message = b"\0\0\0\0\x14" + b"x" * 20
    for at in range(25):
        for stream in range(1, 129, 2):
            raw.frame(0, int(at == 24), stream, message[at : at + 1])
    for stream in range(1, 129, 2):
        assert raw.status(stream)["grpc-status"] == "0"
