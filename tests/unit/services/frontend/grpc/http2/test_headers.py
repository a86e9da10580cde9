"""Header blocks: decoding with the cache, metadata, timeouts, statuses."""

from __future__ import annotations

import math
from urllib.parse import unquote

import hpack
import pytest

from services.frontend.grpc.http2 import headers as module
from services.frontend.grpc.http2.frames import ConnectionFailed, ErrorCode, StreamFailed
from services.frontend.grpc.http2.headers import HeaderDecoder, changes_table, status_block
from services.frontend.grpc.http2.limits import MAX_BLOCK_BYTES
from tests.unit.services.frontend.grpc.http2.conftest import HEAD


@pytest.fixture
def encoder():
    return hpack.Encoder()


def encode(encoder, *more, huffman=True, **replaced):
    fields = [(n, replaced.get(n.removeprefix(":"), v)) for n, v in HEAD]
    return encoder.encode([*fields, *more], huffman=huffman)


def test_repeated_block_is_not_decoded_again(encoder):
    decoder = HeaderDecoder()
    first = decoder.call_head(encode(encoder))
    repeated = encode(encoder)
    assert decoder.call_head(repeated) == first
    decoder._decoder = None
    assert decoder.call_head(repeated) == first
    assert first.path == "/test/Echo"


def test_change_of_the_table_invalidates_the_cache():
    """The same bytes mean other fields."""
    decoder = HeaderDecoder()
    decoder.call_head(literal() + b"\x40\x01a\x011")  # adds entry 62 of the table
    newest = literal() + b"\xbe"  # refers to it
    assert decoder.call_head(newest).metadata == (("a", "1"),)
    assert decoder._cache
    decoder.decode(b"\x40\x01a\x012")
    assert decoder.call_head(newest).metadata == (("a", "2"),)


def test_table_that_shrinks_invalidates_the_cache(encoder):
    decoder = HeaderDecoder()
    for _ in range(2):
        decoder.call_head(encode(encoder, ("a", "1")))
    assert decoder._cache
    encoder.header_table_size = 64
    decoder.call_head(encode(encoder, ("a", "2")))
    assert not decoder._cache


def test_cache_is_bounded():
    decoder = HeaderDecoder()
    for number in range(100):
        decoder.call_head(literal(("a", str(number))))
    assert 0 < len(decoder._cache) <= module._CACHED
    decoder = HeaderDecoder()
    decoder.call_head(literal(("a", "x" * module._CACHED_BLOCK)))
    assert not decoder._cache


def literal(*more):
    """A block of literals that leave the table alone."""
    return b"".join(
        module._literal(name.encode(), value.encode()) for name, value in [*HEAD, *more]
    )


def test_blocks_that_change_the_table_are_known():
    encoder = hpack.Encoder()
    assert changes_table(encode(encoder, ("a", "1")))
    assert not changes_table(encode(encoder, ("a", "1")))
    assert not changes_table(literal(("a", "x" * 300)))
    assert not changes_table(b"\x0f\x10\x10application/grpc" + b"\x88" * 3)
    assert changes_table(literal() + b"\x40\x01a\x01b")
    assert changes_table(b"\x20")
    never = encoder.encode([hpack.NeverIndexedHeaderTuple("authorization", "x")])
    assert not changes_table(never)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1H", 3600), ("2M", 120), ("3S", 3), ("99999999m", 99999.999), ("5u", 5e-6), ("7n", 7e-9)],
)
def test_timeout_is_in_seconds(text, seconds):
    head = HeaderDecoder().call_head(literal(("grpc-timeout", text)))
    assert head.timeout_s == pytest.approx(seconds)


def test_call_without_a_timeout_has_none():
    head = HeaderDecoder().call_head(literal())
    assert head.timeout_s == math.inf
    assert head.encoding == "identity"
    assert not head.http_error


@pytest.mark.parametrize("value", ["/wA", "/wA=", "/wA=,AAAA"])
def test_binary_metadata_are_decoded_with_and_without_padding(value):
    head = HeaderDecoder().call_head(literal(("a-bin", value)))
    assert head.metadata == (("a-bin", b"\xff\0"),)


@pytest.mark.parametrize(
    ("content_type", "error"),
    [
        ("application/grpc", 0),
        ("application/grpc+proto", 0),
        ("application/grpc;charset=utf-8", 0),
        ("application/grpc-web", 415),
        ("application/json", 415),
    ],
)
def test_content_type_tells_grpc_calls(encoder, content_type, error):
    block = encode(encoder, **{"content-type": content_type})
    assert HeaderDecoder().call_head(block).http_error == error


@pytest.mark.parametrize(
    "fields",
    [
        [("a", "b"), *HEAD],
        [*HEAD, (":path", "/x")],
        [each for each in HEAD if each[0] != ":method"],
        [each for each in HEAD if each[0] != ":scheme"],
        [*HEAD, ("Upper", "x")],
        [*HEAD, ("", "x")],
        [*HEAD, ("a b", "x")],
        [*HEAD, ("a", "x\0y")],
        [*HEAD, ("transfer-encoding", "chunked")],
    ],
)
def test_malformed_heads_are_rejected_and_the_table_stays_valid(fields):
    decoder, encoder = HeaderDecoder(), hpack.Encoder()
    with pytest.raises(StreamFailed) as caught:
        decoder.call_head(encoder.encode(fields))
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR
    assert decoder.call_head(encode(encoder)).path == "/test/Echo"


def test_oversized_list_ends_the_connection():
    encoder, decoder = hpack.Encoder(), HeaderDecoder()
    head = decoder.call_head(encode(encoder, ("a", "x" * 17_000)))
    assert head.is_too_large
    with pytest.raises(ConnectionFailed) as caught:
        decoder.call_head(encode(encoder, ("a", "x" * MAX_BLOCK_BYTES)))
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("text", ["plain", "100 % ü\n\0", "lone \udcff", "x" * 5000, "ü" * 3000])
def test_details_are_escaped_and_bounded(text):
    fields = dict(hpack.Decoder().decode(status_block(5, text, None)))
    assert fields["grpc-status"] == "5"
    shown = unquote(fields["grpc-message"], errors="strict")
    expected = text.encode(errors="replace").decode()
    assert expected.startswith(shown)
    assert len(shown.encode()) >= min(len(expected.encode()), module.MAX_DETAILS_BYTES - 3)
    assert fields["grpc-message"].isascii()
    assert fields["grpc-message"].isprintable()


def test_trailers_are_encoded():
    block = status_block(0, "", [("a", "b"), ("c", b"d"), ("e-bin", b"\xff\0")])
    fields = hpack.Decoder().decode(block)
    assert fields == [("grpc-status", "0"), ("a", "b"), ("c", "d"), ("e-bin", "/wA")]


@pytest.mark.parametrize("trailer", [("A", "b"), ("a", "b\n"), ("a", "ü"), ("", "b"), (":a", "b")])
def test_invalid_trailers_are_refused(trailer):
    with pytest.raises(ValueError, match="metadata"):
        status_block(0, "", [trailer])
