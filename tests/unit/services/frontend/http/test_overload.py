"""More requests than can be answered: who is refused, with what, and what goes on meanwhile."""

from __future__ import annotations

import pytest

from hps.config import Settings
from hps.config.admission_settings import AdmissionSettings, ClientSettings
from hps.errors import Unauthenticated
from hps.observability import metric_names as m
from services.frontend.auth import NoAuthorizer
from services.frontend.http.app import data_app
from services.frontend.state import FrontendState

CTR = "/v2/models/ctr/infer"


@pytest.fixture
def limited(small):
    """``limited(**settings)``: the data port with these of `server.admission`; two requests are worked at and
    three wait."""

    def make(guard=None, **settings):
        admission = AdmissionSettings(**{"running": 2, "queue": 3, **settings})
        chosen = small.settings.model_copy(update={"admission": admission})
        state = FrontendState(settings=Settings(server=chosen))
        state.serve(small.node)
        return data_app(state, chosen, guard or NoAuthorizer())

    return make


def predict(http, *, timeout_us=None, more=""):
    """The bytes of a request of one sample."""
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": "INT64", "data": [1]}
        for name in ("user", "item", "history")
    ]
    inputs.append({"name": "dense", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]})
    asked = {"inputs": inputs}
    if timeout_us is not None:
        asked["parameters"] = {"timeout": timeout_us}
    return http.post(CTR, asked, more=more)


def line_of(app):
    return app.state.entries["ctr"].endpoint


def refused(small):
    counted = small.node.metrics.numbers()[m.REQUESTS_REFUSED]
    return {labels[0]: n for labels, n in counted.items()}


def test_an_overloaded_model_refuses_at_once_and_answers_the_others(small, slow, limited, http):
    app = limited()
    line = line_of(app)

    async def overload():
        asked = [http.connect(app) for _ in range(40)]
        for protocol, _ in asked:
            await http.read(protocol, predict(http))
        wires = [wire for _, wire in asked]
        await http.until(lambda: sum(bool(wire.data) for wire in wires) == 35)
        # All of this while not one prediction has ended.
        assert [wire.statuses for wire in wires] == [[]] * 5 + [[503]] * 35
        assert b"retry-after: 1\r\n" in wires[-1].data
        assert b"Exceeds maximum queue size" in wires[-1].data
        assert (line.running, line.queued) == (2, 3)
        protocol, wire = http.connect(app)
        await http.read(protocol, b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        await http.until(lambda: wire.statuses)
        await http.read(protocol, http.request([1]))
        assert wire.statuses == [200, 200]
        slow.leave.set()
        await http.until(lambda: all(wire.statuses for wire in wires))
        assert [wire.statuses for wire in wires[:5]] == [[200]] * 5
        await http.until(lambda: (line.running, line.queued) == (0, 0))

    http.run(overload)
    assert slow.runs == 5
    assert refused(small) == {"queue_full": 35}


def test_a_refused_request_is_not_waited_for(small, slow, limited, http):
    """Its body is not: the answer is there when the head is."""
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
        await http.until(lambda: line_of(app).running == 0)
        await http.read(protocol, predict(http))
        await http.until(lambda: len(wire.statuses) == 2)
        assert wire.statuses == [503, 200]

    http.run(head_alone)


async def crowded(http, app, slow, more=""):
    """A connection on which a request came in pieces, as a large one does, so that its head is known; and the
    wire of another one, whose request takes the only place."""
    slow.leave.set()
    protocol, wire = http.connect(app)
    data = predict(http, more=more)
    for piece in (data[:150], data[150:200], data[200:]):
        await http.read(protocol, piece)
    await http.until(lambda: wire.statuses)
    assert wire.statuses == [200]
    assert len(app._heads) == 1
    slow.leave.clear()
    busy, taken = http.connect(app)
    await http.read(busy, data)
    return protocol, wire, taken


@pytest.mark.parametrize("cut", [0, 1, 40, None], ids=["head", "a byte", "pieces", "whole"])
def test_a_known_request_is_refused_unread(small, slow, limited, http, monkeypatch, cut):
    """The parser sees nothing of it, and the connection goes on with the next one."""
    app = limited(running=1, queue=0)

    async def refuse():
        protocol, wire, taken = await crowded(http, app, slow)
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
        await http.until(lambda: taken.statuses)
        await http.until(lambda: line_of(app).running == 0)
        await http.read(protocol, data[:160])
        await http.read(protocol, data[160:])
        await http.until(lambda: len(wire.statuses) == 4)
        assert wire.statuses == [200, 503, 503, 200]

    http.run(refuse)
    assert refused(small) == {"queue_full": 2}


def test_what_follows_a_body_that_nobody_reads_is_answered(small, slow, limited, http):
    """Though it comes with the body's last bytes."""
    app = limited(running=1, queue=0)

    async def refuse():
        protocol, wire, taken = await crowded(http, app, slow)
        data = predict(http)
        assert await http.read(protocol, data[:-30]) == [200, 503]
        health = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
        await http.read(protocol, data[-30:] + health)
        await http.until(lambda: len(wire.statuses) == 3)
        assert wire.statuses == [200, 503, 200]
        slow.leave.set()
        await http.until(lambda: taken.statuses)

    http.run(refuse)


def test_a_body_that_nobody_reads_and_that_stops_ends_its_connection(small, slow, limited, http):
    app = limited(running=1, queue=0)

    async def stop():
        protocol, wire, taken = await crowded(http, app, slow)
        await http.read(protocol, predict(http)[:-30])
        protocol.sweep(10)
        assert not wire.closed
        protocol.sweep(10)
        assert wire.closed
        slow.leave.set()
        await http.until(lambda: taken.statuses)

    http.run(stop)


def test_a_key_that_is_no_longer_good_is_told_so_though_there_is_no_room(
    small, slow, limited, http, key_guard, monkeypatch
):
    """With a head that was read when it was."""
    app = limited(key_guard, running=1, queue=0)

    def refuses(*_):
        raise Unauthenticated("the key is no longer good")

    async def ask():
        more = f"X-API-Key: {'r' * 16}\r\n"
        protocol, wire, taken = await crowded(http, app, slow, more)
        assert await http.read(protocol, predict(http, more=more)) == [200, 503]
        monkeypatch.setattr(key_guard, "check", refuses)
        await http.read(protocol, predict(http, more=more))
        await http.until(lambda: len(wire.statuses) == 3)
        assert wire.statuses == [200, 503, 401]
        slow.leave.set()
        await http.until(lambda: taken.statuses)

    http.run(ask)


def test_bodies_that_are_coming_hold_room(small, limited, http):
    app = limited(queue_bytes=1 << 20)

    async def two_bodies():
        head = f"POST {CTR} HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n".encode()
        first, one = http.connect(app)
        second, other = http.connect(app)
        await http.read(first, head + b"{" * 800_000)
        await http.read(second, head + b"{")  # what is only announced holds nothing
        await http.until(lambda: app.state.admission.byte_budget.held == 800_001)
        await http.read(second, b"{" * 400_000)
        await http.until(lambda: other.statuses)
        assert (one.statuses, other.statuses) == ([], [503])
        first.connection_lost(None)
        await http.until(lambda: app.state.admission.byte_budget.held == 0)

    http.run(two_bodies)
    assert refused(small) == {"queue_bytes": 1}


def test_a_client_that_hangs_up_leaves_the_line(small, slow, limited, http):
    app = limited(running=1)
    line = line_of(app)

    async def hang_up():
        connections = [http.connect(app)[0] for _ in range(3)]
        for protocol in connections:
            await http.read(protocol, predict(http))
        await http.until(lambda: line.queued == 2)
        connections[1].connection_lost(None)
        assert line.queued == 1
        slow.leave.set()
        await http.until(lambda: line.running == 0)

    http.run(hang_up)
    assert slow.runs == 2


def test_a_requests_time_runs_while_it_waits(small, slow, limited, http):
    app = limited(running=1)

    async def late():
        first, _ = http.connect(app)
        await http.read(first, predict(http))
        protocol, wire = http.connect(app)
        await http.read(protocol, predict(http, timeout_us=2000))
        await http.until(lambda: wire.statuses)
        assert wire.statuses == [504]
        assert line_of(app).queued == 0

    http.run(late)


def test_a_wait_that_is_too_long_ends(small, slow, limited, http):
    app = limited(running=1, max_wait_ms=10)

    async def wait():
        first, _ = http.connect(app)
        await http.read(first, predict(http))
        protocol, wire = http.connect(app)
        await http.read(protocol, predict(http))
        await http.until(lambda: wire.statuses)
        assert wire.statuses == [503]

    http.run(wait)
    assert refused(small) == {"queue_wait": 1}


def test_a_client_that_asks_too_much(small, slow, limited, http, key_guard):
    app = limited(key_guard, running=8, client=ClientSettings(running=2))

    async def greedy():
        def ask(key):
            return predict(http, more=f"X-API-Key: {key * 16}\r\n")

        wires = []
        for key in "rrrw":
            protocol, wire = http.connect(app)
            wires.append(wire)
            await http.read(protocol, ask(key))
        await http.until(lambda: wires[2].statuses)
        assert [wire.statuses for wire in wires] == [[], [], [429], []]
        assert b"retry-after: 1\r\n" in wires[2].data
        slow.leave.set()
        await http.until(lambda: all(wire.statuses for wire in wires))
        protocol, wire = http.connect(app)
        for count in (1, 2, 3):
            await http.read(protocol, ask("r"))
            await http.until(lambda count=count: len(wire.statuses) == count)
        assert wire.statuses == [200] * 3

    http.run(greedy)
    assert refused(small) == {"client_running": 1}


def test_clients_without_keys_are_known_by_address(small, limited, http):
    app = limited(client=ClientSettings(per_second=1e-3, burst=3))

    async def ask():
        statuses = []
        for _ in range(4):
            protocol, wire = http.connect(app)
            await http.read(protocol, http.binary([1]))
            await http.until(lambda wire=wire: wire.statuses)
            statuses += wire.statuses
        assert statuses == [200, 200, 200, 429]

    http.run(ask)
    assert refused(small) == {"client_rate": 1}


@pytest.mark.parametrize("way", ["whole", "head first", "body later", "after waiting"])
def test_what_there_is_no_room_for_is_not_counted_as_sent(small, slow, limited, http, way):
    """Whichever way it comes."""
    waits = {"queue": 3, "max_wait_ms": 1} if way == "after waiting" else {"queue": 0}
    app = limited(running=1, client=ClientSettings(per_second=1e-3, burst=2), **waits)
    more = "Expect: 100-continue\r\n" if way == "body later" else ""

    async def ask():
        first, taken = http.connect(app)
        await http.read(first, predict(http))
        for _ in range(4):
            protocol, wire = http.connect(app)
            head, _, body = predict(http, more=more).partition(b"\r\n\r\n")
            parts = [head + b"\r\n\r\n" + body]
            if way in ("head first", "body later"):
                parts = [head + b"\r\n\r\n", body]
            for part in parts:
                await http.read(protocol, part)
            await http.until(lambda wire=wire: 503 in wire.statuses)
        slow.leave.set()
        await http.until(lambda: taken.statuses)
        protocol, wire = http.connect(app)
        for count in (1, 2):
            await http.read(protocol, predict(http))
            await http.until(lambda count=count: len(wire.statuses) == count)
        assert wire.statuses == [200, 429]

    http.run(ask)


def test_a_faulty_request_counts_once(small, limited, http):
    app = limited(client=ClientSettings(running=1))

    async def ask():
        for body in ({"inputs": []}, {"inputs": "?"}):
            protocol, wire = http.connect(app)
            await http.read(protocol, http.post(CTR, body))
            await http.until(lambda wire=wire: wire.statuses)
            assert wire.statuses == [400]
        protocol, wire = http.connect(app)
        await http.read(protocol, predict(http))
        await http.until(lambda: wire.statuses)
        assert wire.statuses == [200]

    http.run(ask)
    assert not any(c.running for c in app.state.admission.clients._clients.values())
