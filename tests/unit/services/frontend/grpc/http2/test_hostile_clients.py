"""Clients that violate HTTP/2 or misuse it, by raw frames."""

from __future__ import annotations

import socket
import struct
import time

import pytest

from services.frontend.grpc.http2 import frames
from services.frontend.grpc.http2 import lifetime as lifetime_module
from services.frontend.grpc.http2.frames import (
    END_HEADERS,
    END_STREAM,
    ErrorCode,
    window_update,
)
from services.frontend.grpc.http2.preface import PREFACE
from tests.support.waiting import until
from tests.unit.services.frontend.grpc.http2.conftest import HEAD

CALM, PROTOCOL = ErrorCode.ENHANCE_YOUR_CALM, ErrorCode.PROTOCOL_ERROR
FRAMES = frames.STREAM_WINDOW // 16_384
HEADERS, DATA, CONTINUATION = frames.HEADERS, frames.DATA, frames.CONTINUATION


def ok(raw, stream):
    """Make a call that must succeed: the connection works."""
    raw.head(stream)
    raw.message(stream, b"1")
    assert raw.status(stream)["grpc-status"] == "0"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frames.frame(DATA, 0, 1, b"x"), PROTOCOL),
        (frames.frame(DATA, 0, 0, b"x"), PROTOCOL),
        (frames.frame(HEADERS, END_HEADERS, 2, b""), PROTOCOL),
        (frames.frame(HEADERS, END_HEADERS, 0, b""), PROTOCOL),
        (
            frames.frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff"),
            ErrorCode.COMPRESSION_ERROR,
        ),
        (frames.frame(HEADERS, END_HEADERS, 1, b"\xbe"), ErrorCode.COMPRESSION_ERROR),
        (frames.frame(HEADERS, END_HEADERS, 1, b"\0\x05a"), ErrorCode.COMPRESSION_ERROR),
        (frames.frame(HEADERS, END_HEADERS | 8, 1, b"\xffab"), PROTOCOL),
        (frames.frame(HEADERS, END_HEADERS | 8, 1, b""), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(HEADERS, 0, 1, b"") + frames.frame(DATA, 0, 1, b""), PROTOCOL),
        (frames.frame(HEADERS, 0, 1, b"") + frames.frame(CONTINUATION, 0, 3, b""), PROTOCOL),
        (frames.frame(CONTINUATION, END_HEADERS, 1, b""), PROTOCOL),
        (frames.frame(frames.PUSH_PROMISE, 0, 1, b"\0\0\0\2"), PROTOCOL),
        (frames.reset(1, ErrorCode.CANCEL), PROTOCOL),
        (frames.frame(frames.RST_STREAM, 0, 1, b"123"), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.PING, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.PING, 0, 1, b"12345678"), PROTOCOL),
        (frames.frame(frames.PRIORITY, 0, 1, b"1"), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.SETTINGS, 0, 1, b""), PROTOCOL),
        (frames.frame(frames.SETTINGS, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.SETTINGS, 1, 0, b"123456"), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.SETTINGS, 0, 0, struct.pack(">HL", 2, 2)), PROTOCOL),
        (frames.frame(frames.SETTINGS, 0, 0, struct.pack(">HL", 5, 1)), PROTOCOL),
        (
            frames.frame(frames.SETTINGS, 0, 0, struct.pack(">HL", 4, 1 << 31)),
            ErrorCode.FLOW_CONTROL_ERROR,
        ),
        (window_update(0, 0), PROTOCOL),
        (window_update(0, frames.MAX_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
        (window_update(1, 5), PROTOCOL),
        (frames.frame(frames.WINDOW_UPDATE, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
        (b"\1\0\0\0\0\0\0\0\1", ErrorCode.FRAME_SIZE_ERROR),
        (b"\xff\xff\xff\0\0\0\0\0\1", ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_violation_ends_the_connection(port, raw, connect, sent, code):
    raw.send(sent)
    assert raw.goodbye() is code
    until(lambda: not port.context.connections)
    ok(connect(port), 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"path": ""},
        {"grpc_timeout": "1"},
        {"grpc_timeout": "123456789S"},
        {"connection": "close"},
        {"Upper": "x"},
        {"x": "a\nb"},
        {"raw_bin": "a"},
        {":path2": "/"},
    ],
)
def test_malformed_request_ends_its_stream(raw, fields):
    raw.head(1, **fields)
    raw.message(1, b"")
    expected = {"grpc-status": "12"} if ":path2" in fields else PROTOCOL
    assert raw.status(1) == expected or ":path2" in fields
    ok(raw, 3)


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"method": "GET"}, "405"), ({"content-type": "application/grpcx"}, "415")],
)
def test_request_that_is_no_grpc_call_has_an_http_status(raw, fields, status):
    raw.head(1, **fields)
    raw.message(1, b"")
    assert raw.status(1)[":status"] == status
    ok(raw, 3)


def test_http1_client_is_told_so(port, connect):
    client = connect(port, preface=False)
    client.send(b"GET /")
    time.sleep(0.01)
    client.send(b" HTTP/1.1\r\nhost: x\r\n\r\n")
    answer = b""
    while more := client.socket.recv(4096):
        answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
    assert b"gRPC" in body


def test_other_bytes_close_the_connection(port, connect):
    client = connect(port, preface=False)
    client.send(b"\x16\x03\x01" + b"x" * 100)
    assert client.receive() is None


def test_frames_are_read_in_pieces_of_one_byte(port, connect):
    client = connect(port, preface=False)
    sent = PREFACE + frames.frame(frames.SETTINGS, 0, 0, b"")
    for at in range(len(sent)):
        client.send(sent[at : at + 1])
        time.sleep(0.0005)
    ok(client, 1)


def test_metadata_beyond_their_limit_are_rejected(raw):
    raw.head(1, big="x" * 16_300)
    raw.message(1, b"")
    assert raw.status(1)["grpc-status"] == "8"
    ok(raw, 3)


def test_large_metadata_arrive_by_continuation(raw):
    block = raw.encoder.encode([(n, v) for n, v in HEAD_FIELDS], huffman=False)
    raw.frame(HEADERS, END_STREAM, 1, block[:5])
    raw.frame(CONTINUATION, 0, 1, block[5:20])
    raw.frame(CONTINUATION, END_HEADERS, 1, block[20:])
    assert raw.status(1)["grpc-status"] == "12"  # no message
    ok(raw, 3)


HEAD_FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test/Echo"),
    ("content-type", "application/grpc"),
    ("big", "y" * 10_000),
]


def test_reset_calls_whose_work_runs_count_on_their_connection(make_port, connect):
    port = make_port(max_calls_per_connection=3)
    client = connect(port)
    for stream in (1, 3, 5, 7, 9):
        client.head(stream, path="/test/Later")
        client.message(stream, b"1")
        client.send(frames.reset(stream, ErrorCode.CANCEL))
    client.ping()
    assert len(port.calls.requests.open) == 3
    port.gate.set()
    until(lambda: not port.calls.requests.open)
    ok(client, 11)


def test_calls_beyond_the_connections_limit_are_refused(make_port, connect):
    client = connect(make_port(max_calls_per_connection=2))
    for stream in (1, 3, 5):
        client.head(stream)
    assert client.status(5) is ErrorCode.REFUSED_STREAM
    client.message(1, b"1")
    assert client.status(1)["grpc-status"] == "0"
    ok(client, 7)


def test_stream_is_not_reused(raw):
    ok(raw, 5)
    for stream in (5, 3):
        raw.head(stream)
        assert raw.status(stream) is ErrorCode.STREAM_CLOSED
    ok(raw, 7)


def test_data_after_the_end_of_a_request_ends_the_stream(port, raw):
    raw.head(1, path="/test/Hold")
    raw.message(1, b"1")
    raw.frame(DATA, 0, 1, b"x")
    # the echoing stream ended with its request, so that the data belong to no call
    ok(raw, 3)
    raw.head(5, path="/test/Later")
    raw.message(5, b"1")
    raw.frame(DATA, 0, 5, b"x")
    assert raw.status(5) is ErrorCode.STREAM_CLOSED
    assert port.gone.wait(10)


def test_windows_of_a_stream_are_enforced(port, raw):
    raw.head(1, path="/test/Hold")
    for _ in range(FRAMES):
        raw.frame(DATA, 0, 1, (b"\0\0\0\x3f\xfb" + b"x" * 16_379))
    raw.ping()
    assert len(port.streams[0].held) == FRAMES  # the window is used up, and none was returned
    raw.frame(DATA, 0, 1, b"\0\0\0\0\0")
    assert raw.status(1) is ErrorCode.FLOW_CONTROL_ERROR
    assert port.streams[0].events[-1] == "gone"
    ok(raw, 3)


def test_taken_messages_return_their_window(port, raw):
    raw.head(1, path="/test/Hold")
    for _ in range(FRAMES):
        raw.frame(DATA, 0, 1, b"\0\0\0\x3f\xfb" + b"x" * 16_379)
    raw.ping()
    call = port.streams[0]
    port.call(call.connection.return_window, call.stream, frames.STREAM_WINDOW)
    _, _, stream, payload = raw.receive_kind(frames.WINDOW_UPDATE)
    assert (stream, int.from_bytes(payload, "big")) == (1, frames.STREAM_WINDOW)


def test_padding_counts_towards_the_window_and_is_removed(raw):
    raw.head(1, path="/test/Size")
    raw.frame(DATA, 0, 1, b"\0\0\0\x17\x71")
    padded = b"\xff" + b"x" + b"\0" * 255
    raw.send(frames.frame(DATA, frames.PADDED, 1, padded) * 6000)
    assert raw.status(1) is ErrorCode.FLOW_CONTROL_ERROR
    raw.head(3)
    raw.frame(DATA, frames.PADDED | END_STREAM, 3, b"\x03" + b"\0\0\0\0\x01x" + b"\0\0\0")
    assert raw.receive_kind(DATA)[3] == b"\0\0\0\0\x01x"
    assert raw.status(3)["grpc-status"] == "0"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\0\0", "13"),
        (b"\0\0\0\0\x05abc", "13"),
        (b"\x02\0\0\0\0", "13"),
        (b"\x01\0\0\0\x01x", "13"),
        (b"\0\xff\xff\xff\xff", "8"),
        (b"", "12"),
    ],
)
def test_invalid_messages_have_a_status(port, raw, data, status):
    for stream, path in ((1, "/test/Echo"), (3, "/test/Hold")):
        raw.head(stream, path=path)
        raw.frame(DATA, END_STREAM, stream, data)
        if data or stream == 1:
            assert raw.status(stream)["grpc-status"] == status
    ok(raw, 5)
    assert not port.calls.requests.open


def test_unknown_compression_is_rejected(raw):
    raw.head(1, grpc_encoding="zstd")
    fields = raw.status(1)
    assert fields["grpc-status"] == "12"
    assert "gzip" in fields["grpc-accept-encoding"]


def test_bytes_of_messages_in_small_frames_take_little_memory(raw, port):
    raw.head(1, path="/test/Size")
    raw.frame(DATA, 0, 1, b"\0" + (200_000).to_bytes(4, "big"))
    raw.send(frames.frame(DATA, 0, 1, b"x") * 199_999)
    raw.ping()
    (stream,) = port.connection.streams.values()
    assert len(stream._reader._pieces) < 300
    raw.frame(DATA, END_STREAM, 1, b"x")
    assert raw.status(1)["grpc-status"] == "0"


def test_answers_wait_for_the_clients_windows(port, connect):
    client = connect(port, settings=struct.pack(">HL", 4, 10))
    client.head(1, path="/test/Big")
    client.message(1, b"100")
    client.head(3, path="/test/Big")
    client.message(3, b"3")  # overtakes the answer that waits
    assert client.status(3)["grpc-status"] == "0"
    client.send(window_update(1, 1000))
    assert client.status(1)["grpc-status"] == "0"
    client.head(5, path="/test/Big")
    client.message(5, b"200000")
    client.frame(frames.SETTINGS, 0, 0, struct.pack(">HL", 4, 300_000))
    received = 0
    while received < 65_535 - 113 - 8:
        received += len(client.receive_kind(DATA)[3])
    client.send(window_update(0, 1 << 20))  # the connection's
    assert client.status(5)["grpc-status"] == "0"
    client.head(7, path="/test/Big")
    client.message(7, b"1")
    assert client.status(7)["grpc-status"] == "0"


def test_large_answers_share_the_connection(port, connect):
    client = connect(port, settings=struct.pack(">HL", 4, 1 << 30))
    client.send(window_update(0, 1 << 30))
    for stream in (1, 3):
        client.head(stream, path="/test/Big")
        client.message(stream, b"20000000")
    received = {1: 0, 3: 0}
    while min(received.values()) < 20_000_005:
        _, _, stream, payload = client.receive_kind(DATA)
        received[stream] += len(payload)
        if sum(received.values()) > 20_000_000:
            assert min(received.values()) > 100_000
    assert client.status(3)["grpc-status"] == "0"


def test_client_that_reads_nothing_does_not_fill_the_memory(port, connect):
    client = connect(port)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # else these hold what the test sends
        client.socket.setsockopt(socket.SOL_SOCKET, option, 4096)
    client.socket.settimeout(1)
    client.head(1, path="/test/None", flags=END_HEADERS | END_STREAM)
    fields = [(n, "/test/None" if n == ":path" else v) for n, v in HEAD]
    block = client.encoder.encode(fields, huffman=False)
    flags = END_HEADERS | END_STREAM

    def send_all():
        for first in range(3, 1_000_000, 2000):
            streams = range(first, first + 2000, 2)
            client.send(b"".join(frames.frame(HEADERS, flags, each, block) for each in streams))

    with pytest.raises(TimeoutError):  # the server stops reading
        send_all()
    assert port.call(port.connection.transport.get_write_buffer_size) < 1 << 22


def test_client_that_stops_reading_is_disconnected(port, connect):
    client = connect(port, settings=struct.pack(">HL", 4, 1 << 30))
    client.send(window_update(0, 1 << 30))
    client.head(1, path="/test/Big")
    client.message(1, b"30000000")
    until(lambda: port.context.connections)
    until(lambda: port.call(port.connection.transport.get_write_buffer_size) > 1000)
    port.sweep()
    port.sweep(lifetime_module._STALL_S + 1)
    until(lambda: not port.context.connections)


def test_connections_beyond_the_limit_are_closed(make_port, connect):
    port = make_port(connections=2)
    ok(connect(port), 1)  # one client has half of the connections
    assert connect(port).goodbye() is CALM
    until(lambda: len(port.context.connections) == 1)


def test_graceful_end_names_the_last_call(port, raw):
    ok(raw, 1)
    port.call(port.connection.begin_drain)
    assert raw.receive_kind(frames.GOAWAY)[3][:4] == b"\x7f\xff\xff\xff"
    ping = raw.receive_kind(frames.PING)
    raw.head(3, path="/test/Later")
    raw.message(3, b"1")
    raw.frame(frames.PING, 1, 0, ping[3])
    assert raw.receive_kind(frames.GOAWAY)[3][:4] == b"\0\0\0\3"
    raw.head(5)
    raw.message(5, b"1")  # after GOAWAY: not answered
    raw.send(window_update(5, 1) + frames.reset(5, ErrorCode.CANCEL))
    raw.ping()
    port.gate.set()
    assert raw.status(3)["grpc-status"] == "0"
    assert raw.receive_kind(HEADERS, frames.RST_STREAM) is None
