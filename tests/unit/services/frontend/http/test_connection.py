"""HTTP connections: answers in order and without a task, bounds, closing."""

from __future__ import annotations

import asyncio
import inspect
import json
from functools import partial

import pytest

from services.frontend.connection_limit import ConnectionLimit
from services.frontend.http.connection_bounds import MAX_HEAD_BYTES
from services.frontend.http.protocol.cycle import resume_coroutine

PATH = "/v2/models/words.lookup/infer"
private = partial(pytest.mark.private_interface)


@pytest.mark.private_interface("no head is known")
def test_request_with_cached_head_is_answered_within_data_received(http):
    async def scenario():
        protocol, wire = http.connect()
        await http.read(protocol, http.request([1]))
        await http.until(lambda: wire.statuses == [200])
        assert b"[1.0,1.125,1.25]" in wire.data
        await http.until(lambda: not protocol.tasks)
        assert await http.read(protocol, http.request([2])) == [200, 200]
        assert not protocol.tasks

    http.run(scenario)


def test_request_in_pieces_is_answered(http):
    async def scenario():
        protocol, wire = http.connect()
        whole = http.request([1])
        for i in range(0, len(whole), 40):
            await http.read(protocol, whole[i : i + 40])
            await asyncio.sleep(0)
        await http.until(lambda: wire.statuses == [200])

    http.run(scenario)


def test_pipelined_requests_are_answered_in_order(small, http):
    async def scenario():
        protocol, wire = http.connect()
        small.store.gate.clear()
        await http.read(
            protocol,
            http.request([1], request_id="a")
            + http.request([12], request_id="b")  # waits for the store
            + b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"
            + http.request([3], request_id="c"),
        )
        assert wire.statuses == [200]
        await asyncio.sleep(0.05)
        assert wire.statuses == [200]
        small.store.gate.set()
        await http.until(lambda: wire.statuses == [200] * 4)
        places = [wire.data.index(b'"id":"%s"' % name) for name in (b"a", b"b", b"c")]
        assert places == sorted(places)
        await http.until(lambda: not protocol.tasks)

    http.run(scenario)


def test_waiting_request_can_be_cancelled_and_times_out(small, http):
    async def scenario():
        small.store.gate.clear()
        protocol, wire = http.connect()
        await http.read(protocol, http.request([12]))
        (task,) = protocol.tasks
        await asyncio.sleep(0.01)
        task.cancel()
        await http.until(lambda: wire.statuses == [503])
        assert b"shut down before it could answer" in wire.data
        body = json.loads(http.request([12]).partition(b"\r\n\r\n")[2])
        body["parameters"] = {"timeout": 20_000}
        text = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n".encode()
        await http.read(protocol, head + text)
        await http.until(lambda: wire.statuses == [503, 504])

    http.run(scenario)


def test_large_answer_closes_the_connection_on_request(http):
    async def scenario():
        protocol, wire = http.connect()
        many = http.request([1] * 3000, more="Connection: close\r\n")
        await http.read(protocol, many)
        assert wire.statuses == [200]
        assert b"connection: close\r\n" in wire.data.lower()
        assert wire.closed
        protocol.connection_lost(None)

    http.run(scenario)


def test_errors_are_answered_in_order(http):
    async def scenario():
        protocol, wire = http.connect()
        await http.read(protocol, http.request([1], path="/v2/models/nope/infer"))
        await http.read(protocol, http.request([]).replace(b"left", b"lift"))
        await http.until(lambda: wire.statuses == [404, 400])

    http.run(scenario)


def test_compressed_bodies_are_inflated_on_a_thread(http):
    import gzip

    async def scenario():
        protocol, wire = http.connect()
        plain = http.request([1] * 200_000).partition(b"\r\n\r\n")[2]
        body = gzip.compress(plain)
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n"
        await http.read(protocol, head.encode() + b"\r\n" + body)
        await http.until(lambda: wire.statuses == [200])

    http.run(scenario)


def test_long_bodies_do_not_count_towards_the_head_limit(http):
    async def scenario():
        protocol, wire = http.connect()
        whole = http.request([1] * 60_000)
        assert len(whole) > 2 * MAX_HEAD_BYTES
        for i in range(0, len(whole), 5000):
            await http.read(protocol, whole[i : i + 5000])
            await asyncio.sleep(0)
        await http.until(lambda: wire.statuses == [200])
        await http.read(protocol, http.request([1]))
        await http.until(lambda: wire.statuses == [200, 200])

    http.run(scenario)


@pytest.mark.private_interface("idle connections are closed at once")
def test_last_answer_of_a_stopping_server_closes_the_connection(http):
    async def scenario():
        protocol, wire = http.connect()
        await http.read(protocol, http.binary([1, 2]))
        protocol.shutdown()
        await http.read(protocol, http.binary([3, 4]))
        assert wire.data.count(b"connection: close\r\n") == 1
        assert wire.closed
        assert http.vectors(wire) == [[1, 2], [3, 4]]

    http.run(scenario)


def test_date_header_is_refreshed(http):
    async def scenario():
        protocol, wire = http.connect()
        for date in (b"now", b"now", b"later"):
            if date not in wire.data:
                protocol.server_state.default_headers = [(b"date", date)]
            await http.read(protocol, http.binary([1, 2]))
        assert wire.data.count(b"date: now\r\n") == 2
        assert wire.data.count(b"date: later\r\n") == 1

    http.run(scenario)


@pytest.mark.parametrize(
    ("sent", "sweeps"),
    [
        (0, 1),
        (20, 1),
        pytest.param(-5, 1, marks=private("the application's timeout ends a body")),
        (None, 8),
    ],
)
def test_idle_connections_are_closed(http, sent, sweeps):
    async def scenario():
        protocol, wire = http.connect()
        if sent != 0:
            await http.read(protocol, http.binary([1, 2])[:sent])
            await asyncio.sleep(0)
        for _ in range(sweeps):  # the first sweep starts the count
            protocol.sweep(10)
            assert not wire.closed
        protocol.sweep(10)
        assert wire.closed

    http.run(scenario)


@pytest.mark.parametrize(
    "answered", [False, pytest.param(True, marks=private("a body is noticed one sweep later"))]
)
def test_slow_head_or_discarded_body_closes_the_connection(http, admin, answered):
    """A head; a body that is discarded after its request was answered."""

    async def scenario():
        protocol, wire = http.connect(admin)
        await http.read(protocol, http.request([1]))  # an answered request does not count
        begun = b"GET /v2 HTTP/1.1\r\nHost: x\r\n"
        await http.read(protocol, begun)
        if answered:
            await http.read(protocol, b"Content-Length: 1000\r\n\r\n")
            await http.until(lambda: wire.statuses == [200, 200])
        protocol.sweep(10)
        assert not wire.closed
        await http.read(protocol, b"x")
        protocol.sweep(10)
        assert wire.closed

    http.run(scenario)


@pytest.mark.parametrize("cut", [20, -5])
def test_incomplete_request_does_not_cut_off_the_answer_before_it(small, http, cut):
    """Half its head, half its body."""

    async def scenario():
        small.store.gate.clear()
        protocol, wire = http.connect()
        await http.read(protocol, http.request([12]))
        request = http.request([1])
        await http.read(protocol, request[:cut])
        for _ in range(3):
            protocol.sweep(10)
        assert not wire.closed
        small.store.gate.set()
        await http.until(lambda: wire.statuses == [200])
        await http.read(protocol, request[cut:])
        await http.until(lambda: wire.statuses == [200, 200])

    http.run(scenario)


def test_steady_requests_keep_the_connection_open(http, admin):
    async def scenario():
        protocol, wire = http.connect(admin)
        begin, end = b"GET /v2 HTTP/1.1\r\n", b"Host: x\r\n\r\n"
        for number in range(1, 4):
            await http.read(protocol, begin)
            protocol.sweep(10)
            await http.read(protocol, end)
            await http.until(lambda number=number: wire.statuses == [200] * number)
        assert not wire.closed

    http.run(scenario)


def test_connections_beyond_the_limit_are_rejected(http, monkeypatch):

    async def scenario():
        there = ConnectionLimit(2)
        monkeypatch.setattr("services.frontend.http.server.ConnectionLimit", lambda _most: there)
        for module in ("protocol.connection_lifetime", "uvicorn_connection"):
            monkeypatch.setattr(f"services.frontend.http.{module}.LINGER_S", 0)
        assert there.enter("another")
        protocol, wire = http.connect()
        await http.read(protocol, http.request([1]))
        await http.until(lambda: wire.statuses == [200])
        surplus, refused = http.connect()
        assert refused.statuses == [503]
        await http.until(lambda: refused.aborted)
        surplus.connection_lost(None)
        protocol.connection_lost(None)
        _, wire = http.connect()
        assert not wire.statuses

    http.run(scenario)


@pytest.mark.parametrize("waits", [False, True])
def test_client_that_reads_no_answers_is_disconnected_by_abort(http, waits):
    """A mere close would keep the unsent bytes and the connection forever.

    ``waits``: another request has begun, and its answer waits for the client to read."""

    async def scenario():
        protocol, wire = http.connect()
        await http.read(protocol, http.request([1] * 3000))
        wire.unsent = 50_000
        if waits:
            protocol.flow.pause_writing()
            await http.read(protocol, http.binary([1, 2]))
        for _ in range(9):  # it reads some of it now and then
            for _ in range(7):
                protocol.sweep(10)
            wire.unsent -= 1
        assert not wire.closed
        for _ in range(8):
            protocol.sweep(10)
            assert not wire.aborted
        protocol.sweep(10)
        assert wire.aborted
        protocol.connection_lost(None)
        await asyncio.sleep(0.01)

    http.run(scenario)


def test_client_that_reads_no_answers_is_disconnected_within_a_request(http):
    async def scenario():
        protocol, wire = http.connect()
        await http.read(protocol, http.request([1] * 3000))
        wire.unsent = 50_000
        await http.read(protocol, http.request([1])[:20])
        for _ in range(8):
            protocol.sweep(10)
            assert not wire.aborted
        protocol.sweep(10)
        assert wire.closed
        for _ in range(8):
            protocol.sweep(10)
        assert wire.aborted

    http.run(scenario)


@pytest.mark.parametrize("behind", [0, 1])
def test_client_that_disconnects_while_its_answer_waits_is_not_an_error(http, caplog, behind):
    """``behind``: requests that it has sent after the one whose answer waits."""

    async def scenario():
        protocol, wire = http.connect()
        protocol.flow.pause_writing()
        await http.read(protocol, http.binary([1] * 3000))
        for _ in range(behind):
            await http.read(protocol, http.binary([2]))
        assert len(protocol.tasks) == 1
        wire.closed = True
        protocol.connection_lost(ConnectionResetError())
        await http.until(lambda: not protocol.tasks)
        assert wire.data == b""

    http.run(scenario)
    assert [record.message for record in caplog.records] == []


def test_continuation_in_a_task_is_a_coroutine():
    """From Python 3.12 on, a task accepts nothing else."""
    going_on = resume_coroutine(None, None)
    assert inspect.iscoroutine(going_on)
    going_on.close()
