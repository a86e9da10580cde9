"""The parser of a connection: bounded heads, no tunnels, no other protocols, rejections in order."""

from __future__ import annotations

import asyncio

import httptools
import pytest

from hps.config.server_settings import ServerSettings
from services.frontend.auth import Authorizer
from services.frontend.http.protocol import probe
from services.frontend.http.protocol.connection import HttpProtocol
from services.frontend.http.protocol.parsing import (
    FIELD_BYTES,
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    SLICE_BYTES,
)
from services.ingest.app import ingest_app
from services.server_state import ServerState

UPGRADE = b"Connection: upgrade\r\nUpgrade: h2c\r\n"
CHUNKED = b"POST /v2/models/words/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
MOST_FIELDS = MAX_HEAD_BYTES // FIELD_BYTES

LARGE = {
    "a long target": b"GET /%b HTTP/1.1\r\n\r\n" % (b"a" * MAX_HEAD_BYTES),
    "a long value": b"GET /v2 HTTP/1.1\r\nx: %b\r\n\r\n" % (b"a" * MAX_HEAD_BYTES),
    "many fields": b"GET /v2 HTTP/1.1\r\n" + b"x: y\r\n" * MOST_FIELDS + b"\r\n",
    "an unfinished value": b"GET /v2 HTTP/1.1\r\nx: " + b"a" * 8 * MAX_HEAD_BYTES,
    "a long trailer": CHUNKED + b"3\r\nabc\r\n0\r\nx: %b\r\n\r\n" % (b"a" * MAX_HEAD_BYTES),
    "many trailers": CHUNKED + b"0\r\n" + b"x: y\r\n" * MOST_FIELDS + b"\r\n",
    "an unfinished trailer": CHUNKED + b"3\r\nabc\r\n0\r\nx: " + b"a" * 8 * MAX_HEAD_BYTES,
    "an unfinished extension": CHUNKED + b"3;" + b"a" * 8 * MAX_HEAD_BYTES,
}


@pytest.fixture(autouse=True, scope="module")
def probed():
    """The probe runs once per process, with connections of its own, which no test may count."""
    probe.is_supported()


@pytest.mark.private_interface("uvicorn answers invalid requests in text")
@pytest.mark.parametrize("piece", [256 << 10, 1000])
@pytest.mark.parametrize("sent", LARGE.values(), ids=LARGE)
def test_head_or_trailers_beyond_the_limit_are_rejected(http, sent, piece):
    async def scenario():
        protocol, wire = http.connect()
        for i in range(0, len(sent), piece):
            await http.read(protocol, sent[i : i + piece])
        assert wire.statuses == [431]
        assert wire.closed

    http.run(scenario)


def test_trailers_do_not_become_headers(http):
    async def scenario():
        protocol, wire = http.connect()
        await http.read(protocol, CHUNKED + b"3\r\nabc\r\n0\r\nAuthorization: x\r\n\r\n")
        await http.until(lambda: wire.statuses == [400])
        assert [name for name, _ in protocol.scope["headers"]] == [b"host", b"transfer-encoding"]
        assert not wire.closed

    http.run(scenario)


BAD = {
    "no request": (b"what?\r\n\r\n", 400),
    "CONNECT": (b"CONNECT /v2 HTTP/1.1\r\n\r\n", 400),
    "a head beyond the bound": (LARGE["many fields"], 431),
    "a chunk without a size": (CHUNKED + b"z\r\n", 400),
    "a second chunk without a size": (CHUNKED + b"3\r\nabc\r\nz\r\n", 400),
}


@pytest.mark.private_interface("uvicorn answers invalid requests in text")
@pytest.mark.parametrize("piece", [1 << 20, 100])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_rejection_is_sent_after_earlier_answers(small, http, bad, waits, piece):
    """``waits``: the first of the earlier requests waits for the store; later requests are not answered."""

    async def scenario():
        protocol, wire = http.connect()
        small.store.gate.clear()
        before = [http.request([12]), http.request([1])] if waits else [http.request([1])]
        sent = b"".join(before) + bad[0] + http.request([2])
        for i in range(0, len(sent), piece):
            await http.read(protocol, sent[i : i + piece])
        if waits:
            assert wire.statuses == []
            assert not wire.closed
        small.store.gate.set()
        await http.until(lambda: wire.closed)
        assert wire.statuses == [200] * len(before) + [bad[1]]
        protocol.connection_lost(None)
        await http.until(lambda: not protocol.tasks)

    http.run(scenario)


def test_invalid_body_after_its_answer_gets_no_second_answer(http):
    async def scenario():
        protocol, wire = http.connect()
        long = CHUNKED.replace(b"/v2/models/words/infer", b"/v2")
        await http.read(protocol, long + b"3\r\nabc\r\n")
        await http.until(lambda: wire.statuses == [405])
        await http.read(protocol, b"z\r\n")
        assert wire.statuses == [405]
        assert wire.closed

    http.run(scenario)


@pytest.mark.private_interface("uvicorn answers invalid requests in text")
def test_invalid_http_is_rejected(http):
    async def scenario():
        protocol, wire = http.connect()
        await http.read(protocol, b"what?\r\n\r\n")
        assert wire.statuses == [400]
        assert b'{"error":"Invalid HTTP request received."}' in wire.data
        assert wire.closed

    http.run(scenario)


def test_body_before_a_head_does_not_count_towards_the_head_limit(http):
    """Two consecutive requests, split in the second one's head."""

    async def scenario():
        protocol, wire = http.connect()
        second = http.request([1])
        await http.read(protocol, http.request([1] * 60_000) + second[:40])
        await http.read(protocol, second[40:])
        await http.until(lambda: wire.statuses == [200, 200])
        assert not wire.closed

    http.run(scenario)


@pytest.mark.private_interface("h11 parses")
@pytest.mark.parametrize("piece", [256 << 10, 1000])
@pytest.mark.parametrize("tail", [b"", b"what?\r\n\r\n"])
def test_pipeline_is_bounded_and_answered_in_order(small, http, tail, piece):
    """The first request waits for the store; what was received after a full pipeline stays unparsed."""
    short = b"GET /v2/health/live HTTP/1.1\r\n\r\n"
    most = MAX_PIPELINED + SLICE_BYTES // len(short) + 1
    sent = http.request([12]) + short * 2 * most + http.request([1] * 9000) + short + tail

    async def scenario():
        protocol, wire = http.connect()
        small.store.gate.clear()
        longest = 0
        for i in range(0, len(sent), piece):
            await http.read(protocol, sent[i : i + piece])
            longest = max(longest, len(protocol.pipeline))
        assert longest <= most
        assert wire.paused
        protocol.flow.resume_reading()  # as an application does that waits for a disconnect
        assert wire.paused
        small.store.gate.set()
        statuses = [200] * (2 * most + 3) + [400] * bool(tail)
        await http.until(lambda: len(wire.statuses) == len(statuses))
        assert wire.statuses == statuses
        assert b"[9000.0," in wire.data
        assert wire.closed == bool(tail)
        assert wire.closed or not wire.paused

    http.run(scenario)


@pytest.mark.private_interface("h11 parses")
def test_long_body_of_known_length_is_passed_in_two_slices(http, monkeypatch):
    """The part that arrived with its head in one slice, the rest in another."""
    fed = []
    feed = HttpProtocol._feed
    monkeypatch.setattr(
        HttpProtocol, "_feed", lambda self, data: fed.append(len(data)) or feed(self, data)
    )

    async def scenario():
        protocol, wire = http.connect()
        await http.read(protocol, http.request([1]) + http.binary(list(range(60_000))))
        await http.until(lambda: wire.statuses == [200, 200])

    http.run(scenario)
    assert len(fed) == 2


@pytest.mark.parametrize("protocol_name", ["h2c", "websocket"])
@pytest.mark.parametrize("cut", [0, 25, 90, 300, -5])
def test_upgrade_offer_is_ignored_and_the_request_answered(http, protocol_name, cut):
    """Java's client offers HTTP/2 with its first request, for any method and body."""
    offer = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol_name}\r\nHTTP2-Settings: AAMAAA\r\n"

    async def scenario():
        protocol, wire = http.connect()
        first = http.binary([1, 2], more=offer)
        if cut:
            await http.read(protocol, first[:cut])
        await http.read(protocol, first[cut:] + http.binary([3], more=offer) + http.binary([4]))
        await http.until(lambda: len(wire.statuses) == 3)
        assert http.vectors(wire) == [[1, 2], [3], [4]]
        await http.read(protocol, http.binary([5], more=offer) * 600)
        await http.until(lambda: len(wire.statuses) == 603)
        assert not wire.closed

    http.run(scenario)


@pytest.fixture
def parsers(monkeypatch):
    """Counts the parsers that connections create; stops a loop after a thousand."""
    made = []

    def counted(protocol):
        made.append(protocol)
        if len(made) > 1000:
            raise RecursionError("a head is parsed again and again")
        return httptools_parser(protocol)

    httptools_parser = httptools.HttpRequestParser
    monkeypatch.setattr(httptools, "HttpRequestParser", counted)
    return made


@pytest.fixture(params=["data", "admin", "ingest"])
def any_app(request, data, admin):
    """Applications of ports: the data port, and the admin ports of a server and of ``hps ingest``."""
    if request.param == "ingest":
        return ingest_app(ServerState("ingest"), ServerSettings(), Authorizer())
    return {"data": data, "admin": admin}[request.param]


@pytest.mark.private_interface("CONNECT is an unknown method")
@pytest.mark.parametrize("piece", [1 << 20, 1])
@pytest.mark.parametrize("more", [b"", UPGRADE, b"Content-Length: 3\r\n"])
@pytest.mark.parametrize("target", [b"/v2", b"other:80", b"*", b"/v2/models/words.lookup/infer"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_connect_is_rejected_and_closes_the_connection(
    http, any_app, parsers, version, target, more, piece
):
    async def scenario():
        protocol, wire = http.connect(any_app)
        sent = b"CONNECT %b HTTP/%b\r\nHost: other\r\n%b\r\nabc" % (target, version, more)
        for i in range(0, len(sent), piece):
            if not wire.closed:
                await http.read(protocol, sent[i : i + piece])
        await asyncio.sleep(0)
        assert wire.statuses == [400]
        assert b'{"error":"CONNECT is not supported' in wire.data
        assert wire.closed
        assert not protocol.tasks

    http.run(scenario)
    assert len(parsers) == 1


@pytest.mark.parametrize("piece", [1 << 20, 1])
@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"a, b", b"", b"x\r\nUpgrade: y"])
@pytest.mark.parametrize("body", [b"", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("method", [b"GET", b"POST", b"OPTIONS", b"SOURCE", b"QUERY"])
def test_upgrade_offer_creates_one_parser(http, admin, parsers, method, body, offer, piece):
    async def scenario():
        protocol, wire = http.connect(admin)
        head = b"%b /v2 HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: %b\r\n" % (
            method,
            offer,
        )
        sent = head + body + b"\r\n"
        if body:
            sent += b"abc" if b"Length" in body else b"3\r\nabc\r\n0\r\nUpgrade: h2c\r\n\r\n"
        sent += b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"
        for i in range(0, len(sent), piece):
            await http.read(protocol, sent[i : i + piece])
        await http.until(lambda: len(wire.statuses) == 2)
        assert wire.statuses == [200 if method == b"GET" else 405, 200]
        assert not wire.closed

    http.run(scenario)
    assert len(parsers) <= 2


@pytest.mark.private_interface("uvicorn answers invalid requests in text")
@pytest.mark.parametrize("piece", [1 << 20, 1])
@pytest.mark.parametrize("more", [b"", UPGRADE])
@pytest.mark.parametrize("version", [b"2.0", b"1.1"])
def test_http2_preface_is_rejected(http, parsers, version, more, piece):
    async def scenario():
        protocol, wire = http.connect()
        sent = b"PRI * HTTP/%b\r\n%b\r\nSM\r\n\r\n" % (version, more)
        for i in range(0, len(sent), piece):
            if not wire.closed:
                await http.read(protocol, sent[i : i + piece])
        assert wire.statuses == [400]
        assert wire.closed

    http.run(scenario)
    assert len(parsers) == 1
