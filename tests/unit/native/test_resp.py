"""The Redis reply decoder, compiled and twin: rows, tombstones, misses and errors in chunks of any size."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps import native
from hps.native import twin_resp

DECODERS = [
    pytest.param((twin_resp.RowReplies, twin_resp.ProtocolError), id="twin"),
    pytest.param((native.RowReplies, native.ProtocolError), id="native"),
]
CODE = 3
DIM = 4


def row(first):
    return (first + np.arange(DIM)).astype(np.float32).tobytes()


def bulk(value):
    return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


def reply(*values):
    return b"*%d\r\n%s" % (len(values), b"".join(map(bulk, values)))


def value(version, first):
    return struct.pack("<QB", version, 0) + row(first)


def tombstone(version):
    return struct.pack("<QB", version, 1)


class Decoding:
    def __init__(self, decoder, counts, positions, n, *, versioned=True, oldest=(0, 0)):
        self.out = np.full((n, DIM), -1, np.float32)
        self.versions = np.full(n, 7, np.uint64)
        self.source = np.zeros(n, np.uint8)
        self.replies = decoder(
            np.array(counts, np.int64),
            np.array(positions, np.int64),
            (self.out, self.versions, self.source),
            CODE,
            versioned,
            oldest,
        )

    def feed(self, data, piece=None):
        """Feed ``data`` in chunks of ``piece`` bytes, as a socket would; return the bytes not consumed."""
        buffer = np.frombuffer(data, np.uint8)
        begin, end = 0, 0
        while end < len(data) and not self.replies.done:
            end = min(len(data), end + (piece or len(data)))
            begin = self.replies.feed(buffer, begin, end)
        return data[begin:]

    def result(self):
        return (
            self.out.tolist(),
            self.versions.tolist(),
            self.source.tolist(),
            sorted(self.replies.left.tolist()),
            self.replies.errors,
            self.replies.wrong_length,
            self.replies.done,
        )


@pytest.fixture(params=DECODERS)
def decoder(request):
    return request.param[0]


@pytest.fixture(params=DECODERS)
def decoder_and_error(request):
    return request.param


@pytest.mark.parametrize("piece", [None, 1, 7, 40])
def test_rows_tombstones_and_misses_are_written_to_their_positions(decoder, piece):
    decoding = Decoding(decoder, [3, 0, 2], [4, 1, 0, 3, 2], 5)
    data = reply(value(9, 10), None, tombstone(8)) + reply() + reply(value(2**64 - 1, 30), None)
    assert decoding.feed(data, piece) == b""
    assert decoding.replies.done
    assert decoding.out[4].tolist() == [10, 11, 12, 13]
    assert decoding.out[3].tolist() == [30, 31, 32, 33]
    assert (decoding.out[[0, 1, 2]] == -1).all()
    assert decoding.versions.tolist() == [8, 7, 7, 2**64 - 1, 9]
    assert decoding.source.tolist() == [0, 0, 0, CODE, CODE]
    assert sorted(decoding.replies.left.tolist()) == [1, 2]
    assert decoding.replies.left.dtype == np.int64


def test_rows_without_version_get_version_zero(decoder):
    decoding = Decoding(decoder, [2], [1, 0], 2, versioned=False)
    assert decoding.feed(reply(row(1), None)) == b""
    assert decoding.versions.tolist() == [7, 0]
    assert decoding.out[1].tolist() == [1, 2, 3, 4]


def test_bytes_after_the_last_reply_are_not_consumed(decoder):
    decoding = Decoding(decoder, [1], [0], 1)
    assert decoding.feed(reply(value(1, 1)) + b"+PONG\r\n") == b"+PONG\r\n"


def test_error_reply_fails_only_its_own_elements(decoder):
    decoding = Decoding(decoder, [2, 1, -1, 1], [0, 1, 2, 3], 4)
    data = b"-MOVED 42 1.2.3.4:7000\r\n" + reply(value(1, 5)) + b"+OK\r\n" + reply(None)
    assert decoding.feed(data, 3) == b""
    assert decoding.replies.errors == [(0, "MOVED 42 1.2.3.4:7000")]
    assert decoding.replies.left.tolist() == [3]
    assert decoding.source.tolist() == [0, 0, CODE, 0]


def test_rows_and_tombstones_older_than_the_limits_count_as_absent(decoder):
    decoding = Decoding(decoder, [4], [0, 1, 2, 3], 4, oldest=(5, 6))
    assert decoding.feed(reply(value(4, 1), value(5, 2), tombstone(5), tombstone(6))) == b""
    assert decoding.source.tolist() == [0, CODE, 0, 0]
    assert decoding.versions.tolist() == [7, 5, 7, 6]
    assert (decoding.out[0] == -1).all()
    assert sorted(decoding.replies.left.tolist()) == [0, 2]


@pytest.mark.parametrize("length", [0, 8, 9, 24, 26, 3000])
@pytest.mark.parametrize("piece", [None, 5])
def test_value_of_another_length_is_reported_and_left(decoder, length, piece):
    decoding = Decoding(decoder, [2], [0, 1], 2, versioned=False)
    assert decoding.feed(reply(b"x" * length, row(7)), piece) == b""
    assert decoding.replies.wrong_length == max(length, 1)
    assert decoding.source.tolist() == [0, CODE]
    assert decoding.replies.left.tolist() == [0]


def test_null_of_resp3_is_a_miss(decoder):
    decoding = Decoding(decoder, [2], [0, 1], 2)
    assert decoding.feed(b"*2\r\n_\r\n" + bulk(value(1, 1)), 1) == b""
    assert decoding.replies.left.tolist() == [0]


@pytest.mark.parametrize(
    "data",
    [
        b"*3\r\n",
        b"*x\r\n",
        b"*-1\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"*2\r\n:1\r\n",
        b"*2\r\n$x\r\n",
        b"*2\r\n$99999999999\r\n",
        b"*2\r\n$25\r\n" + value(1, 1) + b"$-",
        b"*2\r\n$9\r\n" + tombstone(1) + b"ab",
        b"x" * 70_000,
    ],
)
def test_bytes_that_do_not_answer_the_request_raise_protocol_error(decoder_and_error, data):
    decoder, error = decoder_and_error
    decoding = Decoding(decoder, [2], [0, 1], 2)
    with pytest.raises(error):
        decoding.feed(data)


def test_arrays_and_ranges_that_do_not_fit_are_rejected(decoder):
    for counts, positions, n in (([2], [0], 2), ([1], [2], 2), ([1], [-1], 2)):
        with pytest.raises(ValueError, match="positions must"):
            Decoding(decoder, counts, positions, n)
    decoding = Decoding(decoder, [1], [0], 1)
    for begin, end in ((0, 9), (3, 2)):
        with pytest.raises(ValueError, match="buffer"):
            decoding.replies.feed(np.zeros(8, np.uint8), begin, end)


@pytest.mark.skipif(not native.COMPILED, reason="the twin trusts its arrays")
@pytest.mark.parametrize(
    ("out", "versions", "source"),
    [
        (np.zeros((1, DIM)), np.zeros(1, np.int64), np.zeros(1, np.uint8)),
        (np.zeros((1, DIM)), np.zeros(1, np.uint64), np.zeros(1, np.int8)),
        (np.zeros((1, 2 * DIM))[:, ::2], np.zeros(1, np.uint64), np.zeros(1, np.uint8)),
    ],
)
def test_compiled_decoder_rejects_arrays_that_it_would_have_to_convert(out, versions, source):
    counts, positions = np.array([1]), np.array([0])
    with pytest.raises(TypeError):
        native.RowReplies(counts, positions, (out, versions, source), CODE, True, (0, 0))


VALUES = st.one_of(
    st.none(),
    st.builds(value, st.integers(0, 2**64 - 1), st.integers(0, 99)),
    st.builds(tombstone, st.integers(0, 2**64 - 1)),
    st.binary(max_size=60),
)
ERROR = st.sampled_from([b"-OOM no\r\n", b"-ASK 1 \xff:1\r\n"])


@given(
    st.lists(st.one_of(st.lists(VALUES, max_size=5), ERROR), max_size=5),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_valid_replies_decode_equally_in_both_decoders(replies, piece, random):
    counts = [2 if isinstance(r, bytes) else len(r) for r in replies]
    data = b"".join(r if isinstance(r, bytes) else reply(*r) for r in replies)
    n = sum(counts)
    positions = random.sample(range(n), n)
    decoded = []
    for each in DECODERS:
        decoding = Decoding(each.values[0][0], counts, positions, n, oldest=(2**40, 2**41))
        assert decoding.feed(data, piece) == b""
        decoded.append(decoding.result())
    assert decoded[0] == decoded[1]
    assert decoded[0][-1]


@given(st.binary(max_size=300))
def test_random_bytes_give_the_same_result_or_error_in_both_decoders(data):
    outcomes = []
    for each in DECODERS:
        decoder, error = each.values[0]
        decoding = Decoding(decoder, [2, 1], [0, 1, 2], 3)
        try:
            decoding.feed(b"*2\r\n" + data, 11)
            outcomes.append(decoding.result())
        except error as raised:
            outcomes.append(str(raised))
    assert outcomes[0] == outcomes[1]
