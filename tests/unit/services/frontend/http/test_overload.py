"""Overload over HTTP: heads and bodies of rejected requests; the rest is in ../test_overload.py."""

from __future__ import annotations

import pytest

from hps.errors import Unauthenticated
from services.frontend.auth import Authorizer
from services.frontend.http.app import data_app
from tests.unit.services.frontend.conftest import load, rejections
from tests.unit.services.frontend.protocol_clients import infer_body

CTR = "/v2/models/ctr/infer"


@pytest.fixture
def limited(small, limit):
    """``limited(**settings)``: the data port with these settings of `server.admission`."""

    def make(guard=None, **settings):
        limit(**settings)
        return data_app(small.state, small.settings, guard or Authorizer())

    return make


def predict(http, *, more=""):
    """The bytes of a request of one sample."""
    return http.post(CTR, infer_body("ctr"), more=more)


def test_request_is_rejected_before_its_body_arrives(small, slow, limited, http):
    app = limited(running=1, queue=0)

    async def head_alone():
        first, _ = http.connect(app)
        await http.read(first, predict(http))
        protocol, wire = http.connect(app)
        head, _, body = predict(http).partition(b"\r\n\r\n")
        await http.read(protocol, head + b"\r\n\r\n")
        await http.until(lambda: wire.statuses)
        assert wire.statuses == [503]
        await http.read(protocol, body)
        slow.leave.set()
        await http.until(lambda: load(small) == (0, 0))
        await http.read(protocol, predict(http))
        await http.until(lambda: len(wire.statuses) == 2)
        assert wire.statuses == [503, 200]

    http.run(head_alone)


async def saturate(http, app, slow, more=""):
    """Cache the head of a request that arrives in pieces, as a large one does; then take the only slot.

    Return the first connection, its wire, and the wire of the request that holds the slot."""
    slow.leave.set()
    protocol, wire = http.connect(app)
    data = predict(http, more=more)
    for piece in (data[:150], data[150:200], data[200:]):
        await http.read(protocol, piece)
    await http.until(lambda: wire.statuses)
    assert wire.statuses == [200]
    assert len(app._heads) == 1
    slow.leave.clear()
    busy, slot_holder = http.connect(app)
    await http.read(busy, data)
    return protocol, wire, slot_holder


@pytest.mark.private_interface("no head is known")
@pytest.mark.parametrize("cut", [0, 1, 40, None], ids=["head", "a byte", "pieces", "whole"])
def test_request_with_cached_head_is_rejected_without_parsing(
    small, slow, limited, http, monkeypatch, cut
):
    """The connection continues with the next request."""
    app = limited(running=1, queue=0)

    async def refuse():
        protocol, wire, slot_holder = await saturate(http, app, slow)
        parsed = []
        monkeypatch.setattr(type(protocol), "_parse", lambda self, data: parsed.append(data))
        data = predict(http)
        head, _, body = data.partition(b"\r\n\r\n")
        first = data if cut is None else head + b"\r\n\r\n" + body[:cut]
        assert await http.read(protocol, first) == [200, 503]
        rest = data[len(first) :]
        for piece in filter(None, (rest[:50], rest[50:])):
            await http.read(protocol, piece)
        assert await http.read(protocol, data) == [200, 503, 503]
        assert not parsed
        monkeypatch.undo()
        slow.leave.set()
        await http.until(lambda: slot_holder.statuses)
        await http.until(lambda: load(small) == (0, 0))
        await http.read(protocol, data[:160])
        await http.read(protocol, data[160:])
        await http.until(lambda: len(wire.statuses) == 4)
        assert wire.statuses == [200, 503, 503, 200]

    http.run(refuse)
    assert rejections(small) == {"queue_full": 2}


@pytest.mark.private_interface("no head is known")
def test_request_that_arrives_with_the_end_of_a_discarded_body_is_answered(
    small, slow, limited, http
):
    app = limited(running=1, queue=0)

    async def refuse():
        protocol, wire, slot_holder = await saturate(http, app, slow)
        data = predict(http)
        assert await http.read(protocol, data[:-30]) == [200, 503]
        health = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
        await http.read(protocol, data[-30:] + health)
        await http.until(lambda: len(wire.statuses) == 3)
        assert wire.statuses == [200, 503, 200]
        slow.leave.set()
        await http.until(lambda: slot_holder.statuses)

    http.run(refuse)


@pytest.mark.private_interface("no head is known")
def test_connection_closes_when_a_discarded_body_stalls(small, slow, limited, http):
    app = limited(running=1, queue=0)

    async def stop():
        protocol, wire, slot_holder = await saturate(http, app, slow)
        await http.read(protocol, predict(http)[:-30])
        protocol.sweep(10)
        assert not wire.closed
        protocol.sweep(10)
        assert wire.closed
        slow.leave.set()
        await http.until(lambda: slot_holder.statuses)

    http.run(stop)


@pytest.mark.private_interface("no head is known")
def test_expired_key_with_cached_head_is_rejected_as_such_in_an_overload(
    small, slow, limited, http, key_guard, monkeypatch
):
    app = limited(key_guard, running=1, queue=0)

    def reject(*_):
        raise Unauthenticated("the key is no longer good")

    async def ask():
        more = f"X-API-Key: {'r' * 16}\r\n"
        protocol, wire, slot_holder = await saturate(http, app, slow, more)
        assert await http.read(protocol, predict(http, more=more)) == [200, 503]
        monkeypatch.setattr(key_guard, "check", reject)
        await http.read(protocol, predict(http, more=more))
        await http.until(lambda: len(wire.statuses) == 3)
        assert wire.statuses == [200, 503, 401]
        slow.leave.set()
        await http.until(lambda: slot_holder.statuses)

    http.run(ask)


def test_bodies_being_received_reserve_bytes(small, limited, http):
    app = limited(queue_bytes=1 << 20)

    async def two_bodies():
        head = f"POST {CTR} HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n".encode()
        first, one = http.connect(app)
        second, other = http.connect(app)
        await http.read(first, head + b"{" * 800_000)
        await http.read(second, head + b"{")  # announced bytes are not reserved
        await http.until(lambda: app.state.admission.byte_budget.held == 800_001)
        await http.read(second, b"{" * 400_000)
        await http.until(lambda: other.statuses)
        assert (one.statuses, other.statuses) == ([], [503])
        first.connection_lost(None)
        await http.until(lambda: app.state.admission.byte_budget.held == 0)

    http.run(two_bodies)
    assert rejections(small) == {"queue_bytes": 1}


@pytest.mark.parametrize("more", ["", "Expect: 100-continue\r\n"], ids=["head first", "withheld"])
def test_requests_rejected_before_their_body_do_not_count_against_rate_limit(
    small, slow, limited, http, more
):
    app = limited(running=1, queue=0, client={"per_second": 1e-3, "burst": 2})

    async def ask():
        first, slot_holder = http.connect(app)
        await http.read(first, predict(http))
        for _ in range(4):
            protocol, wire = http.connect(app)
            head, _, body = predict(http, more=more).partition(b"\r\n\r\n")
            for part in (head + b"\r\n\r\n", body):
                await http.read(protocol, part)
            await http.until(lambda wire=wire: 503 in wire.statuses)
        slow.leave.set()
        await http.until(lambda: slot_holder.statuses)
        protocol, wire = http.connect(app)
        for count in (1, 2):
            await http.read(protocol, predict(http))
            await http.until(lambda count=count: len(wire.statuses) == count)
        assert wire.statuses == [200, 429]

    http.run(ask)
