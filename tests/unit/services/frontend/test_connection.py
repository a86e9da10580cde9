"""The protocol under uvicorn: answered where the last byte was read, in order, within bounds."""

from __future__ import annotations

import asyncio
import json

import pytest
import uvicorn
from uvicorn.server import ServerState

from services.frontend.connection import MAX_HEAD_BYTES, Protocol

PATH = "/v2/models/words.lookup/infer"


def request(keys, *, path=PATH, request_id="", more=""):
    tensor = {"name": "left", "shape": [1, len(keys)], "datatype": "INT64", "data": keys}
    body = json.dumps({"inputs": [tensor], "id": request_id})
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n\r\n{body}".encode()


class Wire(asyncio.Transport):
    """Collects what is written."""

    def __init__(self):
        super().__init__()
        self.data = b""
        self.closed = False

    def write(self, data):
        self.data += data

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    @property
    def statuses(self):
        return [int(part[:3]) for part in self.data.split(b"HTTP/1.1 ")[1:]]


@pytest.fixture
def connect(small, data):
    def connect():
        config = uvicorn.Config(
            data,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        config.load()
        loop = asyncio.get_running_loop()
        protocol = Protocol(config, ServerState(), {}, _loop=loop)
        protocol.connection_made(Wire())
        return protocol, protocol.transport

    return connect


def run(scenario):
    async def bounded():
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


async def read(protocol, data):
    """Hand over ``data`` as an event loop does, outside every task; the statuses right afterwards."""
    loop = asyncio.get_running_loop()
    there = loop.create_future()

    def callback():
        protocol.data_received(data)
        there.set_result(protocol.transport.statuses)

    loop.call_soon(callback)
    return await there


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_a_request_that_came_whole_is_answered_without_a_turn_of_the_loop(connect):
    async def scenario():
        protocol, wire = connect()
        assert await read(protocol, request([1])) == [200]
        assert b"[1.0,1.125,1.25]" in wire.data
        assert not protocol.tasks
        assert await read(protocol, request([2])) == [200, 200]

    run(scenario)


def test_a_request_in_pieces(connect):
    async def scenario():
        protocol, wire = connect()
        whole = request([1])
        for i in range(0, len(whole), 40):
            await read(protocol, whole[i : i + 40])
            await asyncio.sleep(0)
        await until(lambda: wire.statuses == [200])

    run(scenario)


def test_pipelined_requests_keep_their_order(small, connect):
    async def scenario():
        protocol, wire = connect()
        small.store.gate.clear()
        await read(
            protocol,
            request([1], request_id="a")
            + request([12], request_id="b")  # waits for the store
            + b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"
            + request([3], request_id="c"),
        )
        assert wire.statuses == [200]
        await asyncio.sleep(0.05)
        assert wire.statuses == [200]
        small.store.gate.set()
        await until(lambda: wire.statuses == [200] * 4)
        places = [wire.data.index(b'"id":"%s"' % name) for name in (b"a", b"b", b"c")]
        assert places == sorted(places)
        await until(lambda: not protocol.tasks)

    run(scenario)


def test_what_waits_can_be_cancelled_and_runs_out_of_time(small, connect):
    async def scenario():
        small.store.gate.clear()
        protocol, wire = connect()
        await read(protocol, request([12]))
        (task,) = protocol.tasks
        await asyncio.sleep(0.01)
        task.cancel()
        await until(lambda: wire.statuses == [503])
        assert b"shut down before it could answer" in wire.data
        body = json.loads(request([12]).partition(b"\r\n\r\n")[2])
        body["parameters"] = {"timeout": 20_000}
        text = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nContent-Length: {len(text)}\r\n\r\n".encode()
        await read(protocol, head + text)
        await until(lambda: wire.statuses == [503, 504])

    run(scenario)


def test_large_answers_and_closed_connections(connect):
    async def scenario():
        protocol, wire = connect()
        many = request([1] * 3000, more="Connection: close\r\n")
        await read(protocol, many)
        assert wire.statuses == [200]
        assert b"connection: close\r\n" in wire.data
        assert wire.closed
        protocol.connection_lost(None)

    run(scenario)


def test_errors_of_requests_that_came_whole(connect):
    async def scenario():
        protocol, wire = connect()
        await read(protocol, request([1], path="/v2/models/nope/infer"))
        await read(protocol, request([]).replace(b"left", b"lift"))
        await until(lambda: wire.statuses == [404, 400])

    run(scenario)


def test_compressed_bodies_leave_the_loop_and_come_back(connect):
    import gzip

    async def scenario():
        protocol, wire = connect()
        plain = request([1] * 200_000).partition(b"\r\n\r\n")[2]
        body = gzip.compress(plain)
        head = f"POST {PATH} HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n"
        await read(protocol, head.encode() + b"\r\n" + body)
        await until(lambda: wire.statuses == [200])

    run(scenario)


@pytest.mark.parametrize("line", [b"x: y\r\n", b"z" * 1000])
def test_a_head_has_a_bound(connect, line):
    async def scenario():
        protocol, wire = connect()
        await read(protocol, b"GET /v2 HTTP/1.1\r\nx: ")
        for _ in range(MAX_HEAD_BYTES // len(line) + 2):
            await read(protocol, line)
        assert wire.statuses[0] == 431
        assert wire.closed

    run(scenario)


def test_long_bodies_do_not_count_as_heads(connect):
    async def scenario():
        protocol, wire = connect()
        whole = request([1] * 60_000)
        assert len(whole) > 2 * MAX_HEAD_BYTES
        for i in range(0, len(whole), 5000):
            await read(protocol, whole[i : i + 5000])
            await asyncio.sleep(0)
        await until(lambda: wire.statuses == [200])
        await read(protocol, request([1]))
        await until(lambda: wire.statuses == [200, 200])

    run(scenario)


def test_what_is_no_http(connect):
    async def scenario():
        protocol, wire = connect()
        await read(protocol, b"what?\r\n\r\n")
        assert wire.statuses == [400]
        assert b'{"error":"Invalid HTTP request received."}' in wire.data
        assert wire.closed

    run(scenario)
