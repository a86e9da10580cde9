"""Connections on uvicorn's public interface: bounds, answers, sweeps and shutdown."""

from __future__ import annotations

import pytest

from services.frontend.http.connection_bounds import MAX_HEAD_BYTES
from tests.unit.services.frontend.http import conftest as support

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"POST /v2/models/words.lookup/infer HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def http(data, monkeypatch):
    monkeypatch.setattr(support, "HTTP_PROTOCOL", "uvicorn")
    return support.Http(data)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 8 * MAX_HEAD_BYTES,
        b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + b"x: y\r\n" * MAX_HEAD_BYTES,
        CHUNKED + b"3\r\nabc\r\n0\r\nx: " + b"a" * 8 * MAX_HEAD_BYTES,
        CHUNKED + b"3;" + b"a" * 8 * MAX_HEAD_BYTES,
    ],
    ids=["target", "fields", "trailer", "extension"],
)
def test_head_beyond_the_bound_ends_the_connection(http, sent):
    async def scenario():
        protocol, wire = http.connect()
        piece = 8 << 10
        received = 0
        while not wire.closed and received < len(sent):
            await http.read(protocol, sent[received : received + piece])
            received += piece
        assert wire.closed
        assert received <= MAX_HEAD_BYTES + 2 * piece
        assert wire.statuses == [400]

    http.run(scenario)


@pytest.mark.parametrize("piece", [1 << 20, 1])
@pytest.mark.parametrize("target", [b"/v2", b"other:80", b"*"])
@pytest.mark.parametrize("more", [b"", b"Connection: upgrade\r\nUpgrade: h2c\r\n"])
def test_connect_is_answered_once_and_opens_no_tunnel(http, target, more, piece):
    async def scenario():
        protocol, wire = http.connect()
        sent = b"CONNECT %b HTTP/1.1\r\nHost: other\r\n%b\r\n" % (target, more)
        for i in range(0, len(sent), piece):
            await http.read(protocol, sent[i : i + piece])
        await http.until(lambda: wire.statuses and not protocol.tasks)
        assert len(wire.statuses) == 1
        assert 400 <= wire.statuses[0] < 500

    http.run(scenario)


def test_pipelined_requests_are_answered_in_order_and_read_in_turn(small, http):
    async def scenario():
        protocol, wire = http.connect()
        small.store.gate.clear()
        sent = http.request([12], request_id="a") + LIVE * 50 + http.request([1], request_id="b")
        await http.read(protocol, sent)
        await http.read(protocol, LIVE)
        assert wire.paused
        assert wire.statuses == []
        small.store.gate.set()
        await http.until(lambda: wire.statuses == [200] * 53)
        assert wire.data.index(b'"id":"a"') < wire.data.index(b'"id":"b"')
        assert not wire.paused

    http.run(scenario)


def test_leaving_connection_closes_after_the_next_answer(http):
    async def scenario():
        protocol, wire = http.connect()
        await http.read(protocol, LIVE)
        await http.until(lambda: wire.statuses == [200])
        assert b"connection: close" not in wire.data.lower()
        protocol.end_keep_alive()
        assert not wire.closed
        await http.read(protocol, LIVE)
        await http.until(lambda: wire.statuses == [200, 200])
        assert b"connection: close" in wire.data.lower()
        assert wire.closed

    http.run(scenario)


def test_body_of_an_answered_request_that_stalls_ends_the_connection(http):
    async def scenario():
        protocol, wire = http.connect()
        await http.read(protocol, b"GET /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        await http.until(lambda: wire.statuses == [200])
        await http.read(protocol, b"x")
        protocol.sweep(10)
        assert not wire.closed
        await http.read(protocol, b"x")
        protocol.sweep(10)
        assert wire.closed

    http.run(scenario)


def test_idle_connection_stays_open_between_sweeps(http):
    async def scenario():
        protocol, wire = http.connect()
        await http.read(protocol, LIVE)
        await http.until(lambda: wire.statuses == [200])
        for _ in range(5):
            protocol.sweep(10)
        assert not wire.closed

    http.run(scenario)
