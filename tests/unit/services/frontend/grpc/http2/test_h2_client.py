"""The transport by the client of `h2`, which checks what the server sends."""

from __future__ import annotations

import socket
import struct

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from services.frontend.grpc.http2 import frames
from services.frontend.grpc.http2.headers import ANSWER_HEAD, EMPTY_TABLE
from tests.unit.services.frontend.grpc.http2.conftest import HEAD, RawClient


class H2Client:
    """Calls by `h2`'s state machine, which raises for each violation of HTTP/2."""

    def __init__(self, port, **settings):
        self.socket = socket.create_connection(("127.0.0.1", port.number), 20)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.update_settings(settings) if settings else None
        self.h2.initiate_connection()
        self.ended: dict[int, dict[str, str]] = {}
        self.data: dict[int, bytes] = {}
        self.pings: list[bytes] = []
        self.flush()

    def flush(self):
        self.socket.sendall(self.h2.data_to_send())

    def call(self, path, message, pieces=1 << 20):
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, [(n, path if n == ":path" else v) for n, v in HEAD])
        data = struct.pack(">BI", 0, len(message)) + message
        while data:
            size = min(
                pieces, self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size
            )
            if not size:
                self.flush()
                self.read()
                continue
            self.h2.send_data(stream, data[:size], end_stream=len(data) <= size)
            data = data[size:]
        self.flush()
        return stream

    def read(self):
        received = self.socket.recv(1 << 16)
        assert received
        for event in self.h2.receive_data(received):
            if isinstance(event, h2.events.DataReceived):
                self.data[event.stream_id] = self.data.get(event.stream_id, b"") + event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                self.ended[event.stream_id] = dict(event.headers)
            elif isinstance(event, h2.events.PingAckReceived):
                self.pings.append(event.ping_data)
        self.flush()

    def result(self, stream):
        while "grpc-status" not in self.ended.get(stream, {}):
            self.read()
        return self.ended[stream]["grpc-status"], self.data.get(stream, b"")[5:]


@pytest.fixture
def client(port):
    client = H2Client(port)
    yield client
    client.socket.close()


@pytest.mark.parametrize("pieces", [7, 1 << 20])
@pytest.mark.parametrize("size", [0, 1000, 100_000])
def test_echo(client, size, pieces):
    message = bytes(range(250)) * (size // 250)
    assert client.result(client.call("/test/Echo", message, pieces)) == ("0", message)


def test_messages_beyond_the_window_arrive(client):
    message = b"x" * 3_500_000
    assert client.result(client.call("/test/Size", message)) == ("0", b"3500000")
    assert client.result(client.call("/test/Big", b"3000000")) == ("0", b"x" * 3_000_000)


def test_calls_in_parallel_with_a_small_window(port):
    client = H2Client(port)
    client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1000})
    streams = [client.call("/test/Big", b"%d" % (number * 997)) for number in range(40)]
    for number, stream in enumerate(streams):
        assert client.result(stream) == ("0", b"x" * (number * 997))
    client.socket.close()


def test_statuses_and_streams(client):
    assert client.result(client.call("/test/None", b""))[0] == "12"
    assert client.result(client.call("/test/Broken", b""))[0] == "13"
    assert client.result(client.call("/test/Bidi", b"abc")) == ("0", b"abc")


def test_pings_are_answered_between_calls(client):
    client.h2.ping(b"12345678")
    assert client.result(client.call("/test/Echo", b"1")) == ("0", b"1")
    assert client.pings == [b"12345678"]


def test_client_with_a_small_header_table_is_told_that_none_is_used(port):
    """`hpack` and nghttp2 require that the next header block begins with the table's size."""
    client = H2Client(port)
    assert client.result(client.call("/test/Echo", b"1")) == ("0", b"1")
    held = client.call("/test/Later", b"1")
    client.h2.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 0})
    client.flush()
    port.gate.set()
    assert client.result(held) == ("0", b"1")
    for path, status in [("/test/Echo", "0"), ("/test/None", "12"), ("/test/Bidi", "0")]:
        assert client.result(client.call(path, b"1"))[0] == status
    client.socket.close()


def test_smaller_table_is_announced_once(port):
    """Later blocks begin with their fields: answers to such a client need no other path."""
    client = RawClient(port, settings=struct.pack(">HL", 1, 0))
    first_bytes = []
    for stream in (1, 3, 5):
        client.head(stream)
        client.message(stream, b"1")
        _, _, _, block = client.receive_kind(frames.HEADERS)
        first_bytes.append(block[:1])
        client.status(stream)
    assert first_bytes == [EMPTY_TABLE, ANSWER_HEAD[:1], ANSWER_HEAD[:1]]
    client.close()


def test_table_reduced_while_an_answer_waits_is_announced_in_its_trailers(port):
    client = H2Client(port)
    client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10})
    stream = client.call("/test/Big", b"100")
    while stream not in client.data:
        client.read()
    client.h2.update_settings(
        {
            h2.settings.SettingCodes.HEADER_TABLE_SIZE: 100,
            h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1000,
        }
    )
    client.flush()
    assert client.result(stream) == ("0", b"x" * 100)
    client.socket.close()
