"""Requests with a cached head whose body arrives in pieces, as a large one does."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from contextlib import ExitStack
from http.client import HTTPResponse

import numpy as np
import pytest
import uvloop

from hps.config.server_settings import Listener, TlsSettings
from hps.errors import Unauthenticated
from services.frontend.certificates import server_context
from services.frontend.http.head import RequestHead
from services.frontend.http.protocol import connection
from services.frontend.http.protocol.connection import HttpProtocol
from services.frontend.http.server import HttpPortOptions, HttpServer
from services.frontend.listening import listen
from tests.support.server_thread import Running

pytestmark = pytest.mark.private_interface("no head is known")

KEYS = [1 + n % 9 for n in range(2000)]
HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def collected_s(monkeypatch):
    """``collected_s(seconds)``: the time of collection from then on; longer than any test by default."""

    def collected_s(seconds):
        monkeypatch.setattr(connection, "_COLLECTED_S", seconds)

    collected_s(3600)
    return collected_s


@pytest.fixture
def parsed(monkeypatch):
    """The data that the parser of any connection gets."""
    parsed = []
    parse = HttpProtocol._parse

    def record(self, data):
        parsed.append(bytes(data))
        parse(self, data)

    monkeypatch.setattr(HttpProtocol, "_parse", record)
    return parsed


@pytest.fixture
def known(http, parsed):
    """``await known(app)``: a connection that has got one answer, so that its head is cached."""

    async def known(app=None, data=None):
        protocol, wire = http.connect(app)
        await http.read(protocol, data or http.binary(KEYS))
        await http.until(lambda: wire.statuses)
        wire.data = b""
        parsed.clear()
        return protocol, wire

    return known


def held(small):
    return small.state.admission.byte_budget.held


@pytest.mark.parametrize("size", [700, 9000])
def test_body_in_pieces_is_answered_without_the_parser(small, http, known, parsed, size):
    async def scenario():
        protocol, wire = await known()
        for keys in (KEYS, KEYS[::-1]):
            whole = http.binary(keys)
            for at in range(0, len(whole), size):
                assert len(wire.statuses) == (keys is not KEYS)
                await http.read(protocol, whole[at : at + size])
        assert wire.statuses == [200, 200]  # within the read of the last byte
        assert http.vectors(wire) == [KEYS, KEYS[::-1]]
        assert not parsed
        assert not protocol.tasks
        assert held(small) == 0
        assert protocol.server_state.total_requests == 3

    http.run(scenario)


def test_idle_connection_keeps_no_head(small, http, known):
    """A head refers to a version of the model, which must be freed once others are served."""

    async def scenario():
        app = small.app()
        protocol, wire = await known(app)
        whole = http.binary(KEYS)
        for piece in (whole[:9000], whole[9000:]):
            await http.read(protocol, piece)
        assert wire.statuses == [200]
        routes = [*app._routes.values()]
        app._find_routes()  # as after a change of the models
        gc.collect()
        # `type`, because objects of other libraries warn when their class is asked for.
        heads = [each for each in gc.get_objects() if type(each) is RequestHead]
        assert not [head for head in heads if any(head.route is route for route in routes)]

    http.run(scenario)


def test_pieces_may_end_at_any_byte(http, known, parsed):
    async def scenario():
        whole = http.binary([3, 4])
        protocol, wire = await known(data=whole)
        begins = whole.index(b"\r\n\r\n") + 4
        for cut in range(begins, len(whole)):
            for piece in (whole[:cut], whole[cut : cut + 3], whole[cut + 3 :]):
                if piece:
                    await http.read(protocol, piece)
        assert http.vectors(wire) == [[3, 4]] * (len(whole) - begins)
        assert not parsed

    http.run(scenario)


def test_bytes_after_the_body_are_the_next_requests(http, known, parsed):
    async def scenario():
        protocol, wire = await known()
        whole = http.binary(KEYS)
        await http.read(protocol, whole[:9000])
        await http.read(protocol, whole[9000:] + whole[:8000])
        await http.read(protocol, whole[8000:] + HEALTH)
        await http.until(lambda: len(wire.statuses) == 3)
        assert wire.statuses == [200, 200, 200]
        assert wire.data.endswith(b'{"live":true}')
        assert parsed == [HEALTH]

    http.run(scenario)


def test_answer_in_flight_precedes_the_next_request(small, http, known):
    async def scenario():
        protocol, wire = await known()
        small.store.gate.clear()
        whole = http.binary([12, *KEYS[1:]])  # waits for the store
        await http.read(protocol, whole[:9000])
        await http.read(protocol, whole[9000:] + HEALTH)
        await asyncio.sleep(0.02)
        assert not wire.statuses
        small.store.gate.set()
        await http.until(lambda: len(wire.statuses) == 2)
        assert wire.data.endswith(b'{"live":true}')

    http.run(scenario)


def test_fault_is_reported_as_for_a_request_in_one_piece(small, http, known, parsed):
    async def scenario():
        protocol, wire = await known()
        bad = http.binary(KEYS).replace(b"left", b"lift")
        await http.read(protocol, bad)
        await http.until(lambda: wire.statuses)
        expected, wire.data = wire.data, b""
        parsed.clear()
        await http.read(protocol, bad[:9000])
        assert not parsed
        await http.read(protocol, bad[9000:] + HEALTH)
        await http.until(lambda: len(wire.statuses) == 2)
        assert wire.statuses == [400, 200]
        assert wire.data.startswith(expected)
        assert b"".join(parsed) == bad + HEALTH
        assert small.state.entries["words.lookup"].statistics.fail_count == 2
        assert held(small) == 0

    http.run(scenario)


def test_bytes_received_are_reserved(small, http, known, parsed):
    """A body that exceeds the byte budget is rejected, and the connection continues."""

    async def scenario():
        budget = small.state.admission.byte_budget
        protocol, wire = await known()
        whole = http.binary(KEYS)
        begins = whole.index(b"\r\n\r\n") + 4
        await http.read(protocol, whole[:9000])
        assert budget.held == 9000 - begins
        budget.limit, limit = 10_000, budget.limit
        budget.add(5000)  # of another request
        await http.read(protocol, whole[9000:12_000])
        await http.until(lambda: wire.statuses)
        assert wire.statuses == [503]
        assert b"server.admission.queue_bytes" in wire.data
        assert budget.held == 5000
        budget.add(-5000)
        budget.limit = limit
        await http.read(protocol, whole[12_000:])
        await http.read(protocol, whole)
        await http.until(lambda: len(wire.statuses) == 2)
        assert wire.statuses == [503, 200]
        assert budget.held == 0

    http.run(scenario)


def test_body_that_stalls_times_out(small, http, known, collected_s):
    async def scenario():
        collected_s(0.01)
        protocol, wire = await known(small.app(request_timeout_ms=50))
        await http.read(protocol, http.binary(KEYS)[:9000])
        await http.until(lambda: wire.statuses)
        assert wire.statuses == [408]
        assert b"waiting for the rest of the request body" in wire.data
        assert held(small) == 0

    http.run(scenario)


def test_slow_body_is_passed_to_the_parser_and_answered(small, http, known, parsed, collected_s):
    async def scenario():
        collected_s(0.05)
        protocol, wire = await known()
        whole = http.binary(KEYS)
        await http.read(protocol, whole[:9000])
        await http.until(lambda: parsed)
        assert parsed == [whole[:9000]]
        await http.until(lambda: held(small) > 0)
        await http.read(protocol, whole[9000:])
        await http.until(lambda: wire.statuses)
        assert http.vectors(wire) == [KEYS]
        parsed.clear()
        collected_s(3600)
        await http.read(protocol, whole[:9000])  # the connection's next request is collected again
        await http.read(protocol, whole[9000:])
        assert wire.statuses == [200, 200]
        assert not parsed

    http.run(scenario)


def test_timer_of_an_earlier_body_does_not_end_a_later_one(http, known, parsed):
    async def scenario():
        protocol, wire = await known()
        whole = http.binary(KEYS)
        for piece in (whole[:9000], whole[9000:], whole[:9000]):
            await http.read(protocol, piece)
        protocol._check_body(protocol._requests - 1)
        assert not parsed
        await http.read(protocol, whole[9000:])
        assert wire.statuses == [200, 200]

    http.run(scenario)


def test_client_that_disconnects_frees_its_bytes_and_its_slot(small, http, known, limit):
    limit(client={"running": 1})

    async def scenario():
        app = small.app()
        protocol, _ = await known(app)
        other, wire = http.connect(app)
        await http.read(protocol, http.binary(KEYS)[:9000])
        await http.read(other, http.binary(KEYS))
        await http.until(lambda: wire.statuses)
        assert wire.statuses == [429]  # a request whose body is arriving is in flight
        assert held(small) > 0
        protocol.connection_lost(None)
        assert held(small) == 0
        await http.read(other, http.binary(KEYS))
        assert wire.statuses == [429, 200]

    http.run(scenario)


@pytest.mark.parametrize("stop", ["shutdown", "end_keep_alive"])
def test_server_that_stops_answers_a_request_that_is_arriving(small, http, known, stop):
    async def scenario():
        protocol, wire = await known()
        whole = http.binary(KEYS)
        await http.read(protocol, whole[:9000])
        getattr(protocol, stop)()
        await asyncio.sleep(0.6)  # longer than idle connections stay
        assert not wire.closed
        await http.read(protocol, whole[9000:])
        await http.until(lambda: wire.closed)
        assert http.vectors(wire) == [KEYS]
        assert b"connection: close\r\n" in wire.data

    http.run(scenario)


def test_answer_waits_while_the_client_does_not_read(http, known):
    async def scenario():
        protocol, wire = await known()
        whole = http.binary(KEYS)
        await http.read(protocol, whole[:9000])
        protocol.pause_writing()
        await http.read(protocol, whole[9000:])
        await asyncio.sleep(0.02)
        assert not wire.statuses
        protocol.resume_writing()
        await http.until(lambda: wire.statuses)
        assert http.vectors(wire) == [KEYS]

    http.run(scenario)


def test_body_beyond_the_bound_is_left_to_the_parser(http, known, parsed, monkeypatch):
    monkeypatch.setattr("services.frontend.http.inference_app._COLLECTED_BYTES", 10_000)

    async def scenario():
        protocol, wire = await known()
        whole = http.binary(KEYS)
        await http.read(protocol, whole[:9000])
        assert parsed == [whole[:9000]]
        await http.read(protocol, whole[9000:])
        await http.until(lambda: wire.statuses)
        assert http.vectors(wire) == [KEYS]

    http.run(scenario)


def test_role_is_checked_before_the_body_arrives(small, http, known, parsed):
    class Guard:
        enabled, allowed = True, True

        def check(self, headers, role, certificate=tuple):
            if not self.allowed:
                raise Unauthenticated("not any more")

    async def scenario():
        guard = Guard()
        protocol, wire = await known(small.app(guard=guard))
        guard.allowed = False
        await http.read(protocol, http.binary(KEYS)[:9000])
        await http.until(lambda: wire.statuses)
        assert wire.statuses == [401]
        assert parsed

    http.run(scenario)


@pytest.fixture
def serve(data):
    """``serve(tls)``: the port of a running server of the small node, on uvloop."""
    with ExitStack() as stack:

        def serve(tls):
            listening = listen("127.0.0.1", 0, "server.http")
            port = listening.getsockname()[1]
            server = HttpServer(data, listening, HttpPortOptions(60, tls))
            running = Running(server, uvloop.new_event_loop())
            stack.callback(running.join)
            stack.callback(running.stop, force=True)
            return port

        yield serve


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
def test_large_requests_over_a_socket_are_parsed_once(serve, http, parsed, tls, secured):
    """Each is larger than one read of the event loop."""
    context = server_context(Listener(port=0, tls=TlsSettings(**tls)), "x") if secured else None
    sock = socket.create_connection(("127.0.0.1", serve(context)), timeout=60)
    if secured:
        client = ssl.create_default_context(cafile=tls["client_ca_file"])
        client.load_cert_chain(tls["certificate_file"], tls["key_file"])
        sock = client.wrap_socket(sock, server_hostname="localhost")
    keys = KEYS * 20
    with sock:
        for seed in range(4):
            keys = keys[seed:] + keys[:seed]
            whole = http.binary(keys)
            assert len(whole) > 300_000
            sock.sendall(whole)
            answer = HTTPResponse(sock)
            answer.begin()
            assert answer.status == 200
            body = answer.read()[int(answer.headers["inference-header-content-length"]) :]
            assert np.frombuffer(body, np.float32)[::3].tolist() == keys
            if seed == 0:
                assert sum(map(len, parsed)) == len(whole)
                parsed.clear()
    assert not parsed
