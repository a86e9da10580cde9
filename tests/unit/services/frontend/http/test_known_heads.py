"""Requests with a cached head bypass the parser, and their answers do not differ."""

from __future__ import annotations

import asyncio
import gzip
import re
from dataclasses import replace

import numpy as np
import pytest

from hps.observability import metric_names as m
from services.frontend.http.response import HttpResponseEncoder
from tests.unit.services.conftest import serve_models

pytestmark = pytest.mark.private_interface("no head is known")

PATH = "/v2/models/words.lookup/infer"


class Parser:
    """Records the bytes that the HTTP parser gets."""

    def __init__(self, parser):
        self._parser = parser
        self.fed = 0

    def feed_data(self, data):
        self.fed += 1
        self._parser.feed_data(data)

    def __getattr__(self, name):
        return getattr(self._parser, name)


@pytest.fixture
def connect(http):
    def connect(app=None):
        protocol, wire = http.connect(app)
        protocol.parser = Parser(protocol.parser)
        return protocol, wire

    return connect


def test_head_is_parsed_once_and_each_request_gets_its_answer(small, http, connect):
    async def scenario():
        protocol, wire = connect()
        for keys in ([1, 2], [3, 4], [5, 99]):
            await http.read(protocol, http.binary(keys))
        await http.until(lambda: len(wire.statuses) == 3)  # 99 is requested below
        assert http.vectors(wire) == [[1, 2], [3, 4], [5, 0]]
        assert protocol.parser.fed == 1
        assert protocol.server_state.total_requests == 3
        other, wire = connect()  # heads are cached for all connections
        await http.read(other, http.binary([6, 7]))
        assert http.vectors(wire) == [[6, 7]]
        assert other.parser.fed == 0
        assert small.state.entries["words.lookup"].statistics.success_count == 4
        text = small.node.metrics.render().decode()
        labels = 'code="200",method="infer",model="words.lookup",protocol="http",version="1"'
        assert f"{m.REQUEST_SECONDS}_count{{{labels}}} 4.0" in text

    http.run(scenario)


def test_cached_head_before_other_bytes_than_its_body(http, connect):
    """A body that is too short, too long or invalid, another request in between."""

    async def scenario():
        protocol, wire = connect()
        whole = http.binary([1, 2])
        await http.read(protocol, whole)
        await http.read(protocol, whole[:-5])
        assert wire.statuses == [200]
        await http.read(protocol, whole[-5:])
        await http.until(lambda: len(wire.statuses) == 2)
        await http.read(protocol, whole + whole)
        await http.read(protocol, whole[:-16] + whole[:16])  # keys are keys
        await http.until(lambda: wire.statuses == [200] * 5)
        await http.read(protocol, whole.replace(b"left", b"lift"))
        assert wire.statuses == [200] * 5 + [400]
        assert b"'lift' for model" not in wire.data.partition(b"400")[0]
        await http.read(protocol, b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        await http.until(lambda: len(wire.statuses) == 7)
        await http.read(protocol, whole)
        assert wire.statuses[-1] == 200
        assert len(wire.statuses) == 8

    http.run(scenario)


def test_raw_body_in_pieces_is_answered(http, connect):
    async def scenario():
        protocol, wire = connect()
        head = b"POST /v2/models/halves.lookup/infer HTTP/1.1\r\nContent-Length: 16\r\n"
        whole = head + b"Inference-Header-Content-Length: 0\r\n\r\n" + np.array([1, 2]).tobytes()
        await http.read(protocol, whole)
        await http.read(protocol, whole[:-8])
        await asyncio.sleep(0.01)
        assert wire.statuses == [200]
        await http.read(protocol, whole[-8:])
        await http.until(lambda: wire.statuses == [200, 200])
        first, second = wire.data.split(b"HTTP/1.1 200")[1:]
        assert first == second

    http.run(scenario)


def test_body_that_looks_like_a_known_request_is_not_one(http, connect):
    async def scenario():
        protocol, wire = connect()
        whole = http.binary([1, 2])
        await http.read(protocol, whole)
        await http.read(protocol, b"GET /v2/health/live HTTP/1.1\r\nX: ")
        await http.read(protocol, whole)
        await http.until(lambda: wire.statuses == [200, 200])
        assert wire.data.endswith(b'{"live":true}')

    http.run(scenario)


def test_head_within_a_body_is_not_cached(http, connect):
    """A request for one model, cut so that its second piece looks like a request for another."""

    async def scenario():
        protocol, wire = connect()
        whole = http.binary([1, 2])
        await http.read(protocol, b"POST /v2/models/words/infer HTTP/1.1\r\nX: ")
        await http.read(protocol, whole)
        for n in (2, 3):
            await http.until(lambda n=n: len(wire.statuses) == n - 1)
            await http.read(protocol, whole)
        names = re.findall(rb'"model_name":"([a-z.]+)"', wire.data)
        assert names == [b"words", b"words.lookup", b"words.lookup"]

    http.run(scenario)


def test_compressed_raw_body_is_decompressed(http, connect):
    async def scenario():
        protocol, wire = connect()
        bodies = (gzip.compress(np.arange(n).tobytes()) for n in range(1, 10_000))
        body = next(b for b in bodies if len(b) % 8 == 0)
        head = b"POST /v2/models/halves.lookup/infer HTTP/1.1\r\nContent-Encoding: gzip\r\n"
        head += b"Inference-Header-Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(body)
        await http.read(protocol, head + body)
        await http.until(lambda: wire.statuses == [200])
        keys = len(gzip.decompress(body)) // 8
        assert b'"shape":[1,4]' in wire.data  # pooled
        assert b'"hps_defaulted":%d,' % max(0, keys - 20) in wire.data

    http.run(scenario)


def test_answer_waits_while_the_client_does_not_read(http, connect):
    async def scenario():
        protocol, wire = connect()
        await http.read(protocol, http.binary([1, 2]))
        protocol.pause_writing()
        await http.read(protocol, http.binary([3, 4]))
        await asyncio.sleep(0.02)
        assert wire.statuses == [200]
        protocol.resume_writing()
        await http.until(lambda: wire.statuses == [200, 200])
        assert http.vectors(wire) == [[1, 2], [3, 4]]

    http.run(scenario)


def test_waiting_request_with_cached_head_keeps_its_order(small, http, connect):
    async def scenario():
        protocol, wire = connect()
        await http.read(protocol, http.binary([1, 2]))
        small.store.gate.clear()
        await http.read(protocol, http.binary([12, 13]))  # waits for the store
        assert protocol.parser.fed == 1
        await http.read(protocol, http.binary([3, 4]))
        await asyncio.sleep(0.02)
        assert wire.statuses == [200]
        protocol.sweep(10)
        protocol.sweep(10)
        assert not wire.closed
        small.store.gate.set()
        await http.until(lambda: len(wire.statuses) == 3)
        assert http.vectors(wire) == [[1, 2], [12, 13], [3, 4]]
        await http.until(lambda: not protocol.tasks)

    http.run(scenario)


@pytest.mark.parametrize(
    "more",
    [
        "Expect: 100-continue\r\n",
        "Content-Encoding: identity\r\n",
        "Connection: close\r\n",
        f"X: {'y' * 3000}\r\n",
    ],
)
def test_uncacheable_heads_are_parsed_again(http, connect, more):
    async def scenario():
        for _ in range(2):
            protocol, wire = connect()
            await http.read(protocol, http.binary([1, 2], more=more))
            await http.until(lambda wire=wire: 200 in wire.statuses)
            assert protocol.parser.fed == 1
            assert wire.closed == ("close" in more)

    http.run(scenario)


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def named(http, keys, **own):
    """A request with header lines of its own, such as an id, in the middle of its head."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in own.items())
    return http.binary(keys, more=f"A: 1\r\n{lines}B: 2\r\n")


def ids(wire):
    return re.findall(rb"x-request-id: (\S+)", wire.data)


def test_head_is_cached_without_the_lines_of_single_requests(small, http, connect):
    async def scenario():
        protocol, wire = connect()
        await http.read(protocol, named(http, [1, 2], X_Request_ID="a"))
        await http.read(protocol, named(http, [3, 4], x_request_id="b", Traceparent=TRACE))
        await http.read(protocol, named(http, [5, 6], traceparent=TRACE, tracestate="v=1"))
        await http.read(protocol, named(http, [7, 8], X_Request_Id="c  "))
        await http.read(protocol, named(http, [9, 1], X_Request_ID=""))
        assert protocol.parser.fed == 1
        assert ids(wire) == [b"a", b"b", b"c"]
        await http.read(protocol, named(http, [1, 2]))  # has none
        assert protocol.parser.fed == 1
        assert ids(wire) == [b"a", b"b", b"c"]
        assert http.vectors(wire) == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 1], [1, 2]]

    http.run(scenario)


@pytest.mark.parametrize(
    "line",
    [
        "X-Request-ID: a\r\n b\r\n",  # goes on in the next line
        "X-Request-ID : a\r\n",
        "X-Request-ID: \x01\r\n",
        "\r\nX-Request-ID: a\r\n",
        "X-Request-IDs: a\r\n",
    ],
)
def test_unusual_lines_in_a_head_are_left_to_the_parser(http, connect, line):
    async def scenario():
        protocol, _ = connect()
        plain = http.binary([1, 2], more="A: 1\r\nB: 2\r\n")
        await http.read(protocol, plain)
        assert protocol.parser.fed == 1
        await http.read(protocol, plain.replace(b"B: 2", line.encode() + b"B: 2"))
        assert protocol.parser.fed == 2
        front = connect()[0]
        await http.read(front, b"\r\nX-Request-ID: a\r\n" + plain)
        assert front.parser.fed == 1

    http.run(scenario)


def test_client_that_accepts_compression_gets_compressed_answers(http, connect):
    async def scenario():
        protocol, wire = connect()
        for n in (1, 2):
            await http.read(protocol, http.binary([7] * 400, more="Accept-Encoding: gzip\r\n"))
            assert wire.statuses == [200] * n
            head, _, body = wire.data.rpartition(b"HTTP/1.1 200")[2].partition(b"\r\n\r\n")
            assert b"content-encoding: gzip" in head
            assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
            assert (
                gzip.decompress(body)[-4800:]
                == np.tile(np.float32([7, 7.125, 7.25]), 400).tobytes()
            )
        assert protocol.parser.fed == 1

    http.run(scenario)


def test_callers_role_is_checked_for_each_request(small, http, connect):
    class Moody:
        enabled = True
        allowed = True

        def check(self, headers, role, certificate=tuple):
            assert headers[b"x-api-key"] == b"k"
            if not self.allowed:
                from hps.errors import Unauthenticated

                raise Unauthenticated("not any more")

    async def scenario():
        guard = Moody()
        protocol, wire = connect(small.app(guard=guard))
        request = http.binary([1, 2], more="X-API-Key: k\r\n")
        await http.read(protocol, request)
        guard.allowed = False
        await http.read(protocol, request)
        await http.until(lambda: wire.statuses == [200, 401])

    http.run(scenario)


def test_limits_hold_for_cached_heads(small, http, connect):
    async def scenario():
        protocol, wire = connect(small.app(max_keys=3))
        await http.read(protocol, http.binary([1, 2, 3]))
        await http.read(protocol, http.binary([1, 2, 3]).replace(b"[3,1]", b"[4,1]"))
        await http.read(protocol, http.binary([1, 2, 3, 4]))
        await http.until(lambda: wire.statuses == [200, 400, 413])
        protocol, wire = connect(small.app(max_body_bytes=100))
        for n in (1, 2):
            await http.read(protocol, http.binary([1, 2]))
            await http.until(lambda n=n: wire.statuses == [413] * n)

    http.run(scenario)


def test_number_of_cached_heads_is_bounded(small, http, connect):
    async def scenario():
        app = small.app()
        protocol, wire = connect(app)
        for i in range(1100):
            await http.read(protocol, http.binary([1], more=f"X: {i}\r\n"))
        assert wire.statuses == [200] * 1100
        assert len(app._heads) <= 1024

    http.run(scenario)


def test_cached_head_reaches_the_current_model(small, http, connect):
    async def scenario():
        protocol, wire = connect()
        models = dict(small.node.models)
        await http.read(protocol, http.binary([1]))
        models["words"] = replace(models["words"], version=2)
        serve_models(small, models)
        small.state.serve(small.node)
        await http.read(protocol, http.binary([1]))
        assert wire.statuses == [200, 200]
        assert wire.data.index(b'"model_version":"1"') < wire.data.index(b'"model_version":"2"')
        del models["words"]
        serve_models(small, models)
        small.state.serve(small.node)
        await http.read(protocol, http.binary([1]))
        await http.until(lambda: wire.statuses == [200, 200, 404])

    http.run(scenario)


def test_model_change_drops_cached_heads_but_keeps_templates_of_other_models(small, http, connect):
    async def scenario():
        app = small.app()
        protocol, _ = connect(app)
        await http.read(protocol, http.binary([1]))
        (head,) = app._heads.values()
        small.state.serve(small.node)
        assert not app._heads
        await http.read(protocol, http.binary([1]))
        assert next(iter(app._heads.values())).route is head.route

    http.run(scenario)


@pytest.mark.parametrize("between", ["", "\r\n"], ids=["nothing", "an empty line"])
@pytest.mark.parametrize("size", [1, 40])
def test_request_in_pieces_caches_only_its_own_head(small, http, connect, size, between):
    """Wherever two requests are split, and whatever is sent between them."""

    async def scenario():
        one = http.binary([1], more="X-First: 1\r\n")
        other = http.request([1, 2], path="/v2/models/words/infer", more="X-Other: 1\r\n")
        both = one + between.encode() + other
        app = small.app()
        known = set()
        for cut in range(1, len(both)):
            app._heads.clear()
            protocol, wire = connect(app)
            for piece in (both[:cut], both[cut : cut + size], both[cut + size :]):
                if piece:
                    await http.read(protocol, piece)
            await http.until(lambda wire=wire: wire.statuses == [200, 200])
            for text, head in app._heads.items():
                assert text in (one[: -head.body_size], other[: -head.body_size])
                assert app._routes[text.split()[1].decode()] is head.route
                assert (b"x-first" in head.headers) == (b"X-First" in text)
                known.add(text)
        assert len(known) == 2

    http.run(scenario)


def test_answer_to_be_compressed_is_encoded_once(small, http, connect, monkeypatch):
    encoded = []
    encode = HttpResponseEncoder.encode

    def count(*args):
        encoded.append(args)
        return encode(*args)

    monkeypatch.setattr(HttpResponseEncoder, "encode", count)

    async def scenario():
        app = small.app()
        data = http.binary([1] * 200, more="Accept-Encoding: gzip\r\n")
        for requests in (1, 2):  # the second one's head is known
            protocol, wire = connect(app)
            await http.read(protocol, data)
            await http.until(lambda wire=wire: wire.statuses == [200])
            await http.until(lambda wire=wire: b"content-encoding: gzip" in wire.data)
            assert len(app._heads) == 1
            assert len(encoded) == requests

    http.run(scenario)
