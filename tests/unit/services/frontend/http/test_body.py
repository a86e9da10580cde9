"""Request bodies: limits, timeouts, content codings."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.errors import BadRequest
from services.frontend.admission.byte_budget import ByteBudget
from services.frontend.errors import (
    Overloaded,
    RequestBodyTimeout,
    RequestTooLarge,
    UnknownEncoding,
)
from services.frontend.http import body as body_module
from services.frontend.http.body import (
    ClientGone,
    accepted_coding,
    compress,
    decompress,
    discard,
    read_body,
)

ENCODERS = {"gzip": gzip.compress, "deflate": zlib.compress}


class Source:
    """An ASGI ``receive`` that returns ``chunks`` and then waits forever."""

    def __init__(self, *chunks, gone=False, more=False):
        self.chunks = list(chunks)
        self.gone = gone
        self.more = more
        self.reads = 0

    async def __call__(self):
        self.reads += 1
        if not self.chunks:
            if self.gone:
                return {"type": "http.disconnect"}
            await asyncio.sleep(3600)
        chunk = self.chunks.pop(0)
        more = bool(self.chunks) or self.gone or self.more
        return {"type": "http.request", "body": chunk, "more_body": more}


def read(source, limit=100, timeout_s=5.0, room=None, **headers):
    named = {k.replace("_", "-").encode(): v.encode("latin-1") for k, v in headers.items()}
    room = room or ByteBudget(1 << 20)

    async def inflated():
        body = await read_body(source, named, limit, timeout_s, room)
        if "content_encoding" in headers:
            body = await decompress(body, headers["content_encoding"], limit, room)
        return body

    return asyncio.run(inflated())


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=4))
def test_chunks_are_joined(chunks):
    assert read(Source(*chunks)) == b"".join(chunks)


def test_announced_length_beyond_the_limit_is_rejected_unread():
    source = Source(b"x" * 101)
    with pytest.raises(RequestTooLarge, match="has 101 bytes, at most 100 are taken"):
        read(source, content_length="101")
    assert source.reads == 0


def test_chunked_body_is_rejected_when_it_exceeds_the_limit():
    source = Source(*[b"x" * 40] * 1000)
    with pytest.raises(RequestTooLarge, match="at least 120 bytes"):
        read(source)
    assert source.reads == 3


def test_stalled_body_times_out():
    with pytest.raises(RequestBodyTimeout, match=r"timed out after 0.05 s"):
        read(Source(b"x", more=True), timeout_s=0.05)


def test_slow_body_times_out(monkeypatch):
    """Although bytes arrive all the time."""
    now = [1000.0]
    monkeypatch.setattr(body_module.time, "monotonic", lambda: now[0])

    class Slow(Source):
        async def __call__(self):
            now[0] += 2.0
            return await super().__call__()

    with pytest.raises(RequestBodyTimeout):
        read(Slow(*[b"x"] * 20))
    chunks = [b"x" * (130 << 10)] * 20
    assert len(read(Slow(*chunks), limit=4 << 20, room=ByteBudget(4 << 20))) == 2600 << 10


def test_received_bytes_are_reserved():
    room = ByteBudget(100)
    room.add(50)
    with pytest.raises(Overloaded, match="hold 90 bytes"):
        read(Source(*[b"x" * 20] * 4), room=room)
    assert room.held == 50
    assert len(read(Source(b"x" * 20, b"x" * 20), room=room)) == 40
    room.add(-50)
    assert (
        len(read(Source(*[b"x" * 50] * 4), limit=1000, room=room)) == 200
    )  # the only one may be larger


def test_disconnect_raises_client_gone():
    with pytest.raises(ClientGone):
        read(Source(gone=True))
    with pytest.raises(ClientGone):
        read(Source(b"x", gone=True))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "GZIP ", "x-gzip", "identity", ""])
def test_content_codings_are_decoded(coding):
    encode = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress}
    body = encode.get(coding.strip().lower(), bytes)(b"hello" * 4)
    assert read(Source(body), content_encoding=coding) == b"hello" * 4


def test_large_body_is_inflated_on_a_thread():
    plain = bytes(range(256)) * 4096
    for name, encode in ENCODERS.items():
        body = encode(plain)
        assert read(Source(body), len(plain), content_encoding=name) == plain
        with pytest.raises(RequestTooLarge):
            read(Source(body), len(plain) - 1, content_encoding=name)


@pytest.mark.parametrize("coding", ENCODERS)
def test_compression_bomb_takes_no_more_memory_than_the_limit(coding):
    body = ENCODERS[coding](bytes(64 << 20))
    tracemalloc.start()
    with pytest.raises(RequestTooLarge):
        read(Source(body), 1 << 20, content_encoding=coding)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("coding", ENCODERS)
def test_inflated_bytes_are_reserved(coding):
    room, body = ByteBudget(8 << 20), ENCODERS[coding](bytes(64 << 20))
    room.add(1 << 20)
    tracemalloc.start()
    with pytest.raises(Overloaded, match=r"hold \d+ bytes \(server.admission.queue_bytes"):
        read(Source(body), 64 << 20, room=room, content_encoding=coding)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert room.held == 1 << 20
    small = ENCODERS[coding](bytes(4 << 20))
    assert len(read(Source(small), 64 << 20, room=room, content_encoding=coding)) == 4 << 20
    assert room.held == 1 << 20


@pytest.mark.parametrize("coding", ENCODERS)
def test_damaged_compressed_bodies_are_rejected(coding):
    body = ENCODERS[coding](b"hello" * 9)
    with pytest.raises(BadRequest, match="ends early"):
        read(Source(body[:-3]), content_encoding=coding)
    with pytest.raises(BadRequest, match="bytes follow"):
        read(Source(body + b"x"), content_encoding=coding)
    with pytest.raises(BadRequest, match="not a valid"):
        read(Source(b"hello"), content_encoding=coding)
    with pytest.raises(BadRequest, match="ends early"):
        read(Source(b""), content_encoding=coding)


def test_unknown_coding_is_rejected():
    with pytest.raises(UnknownEncoding, match="'br' is not supported; use gzip, deflate"):
        read(Source(b""), content_encoding="br")


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        (b"", None),
        (b"identity", None),
        (b"br, zstd, *", None),
        (b"gzip", "gzip"),
        (b"gzip, deflate", "gzip"),
        (b"deflate, gzip;q=0.5", "deflate"),
        (b"gzip;q=0, deflate;q=0.001", "deflate"),
        (b"gzip;q=0", None),
        (b"GZip ; q=1", "gzip"),
        (b"gzip;q=x", None),
    ],
)
def test_accept_encoding_is_parsed(accept, coding):
    assert accepted_coding(accept) == coding


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_compressed_answers_are_decompressible(size):
    body = bytes(range(10)) * (size // 10)
    assert gzip.decompress(asyncio.run(compress(body, "gzip"))) == body
    assert zlib.decompress(asyncio.run(compress(body, "deflate"))) == body


def test_rest_of_a_rejected_body_is_discarded():
    source = Source(*[b"x"] * 50)
    asyncio.run(discard(source))
    assert source.reads == 50
    source = Source(b"x", gone=True)
    asyncio.run(discard(source))
    assert source.reads == 2
