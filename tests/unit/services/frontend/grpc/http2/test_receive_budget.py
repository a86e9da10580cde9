"""Bytes of messages that are arriving: their budget, the windows granted for them, and the time they take."""

from __future__ import annotations

import gzip
from contextlib import suppress

import grpc
import pytest

from services.frontend.grpc.http2 import frames, receive_budget
from tests.support.waiting import until

MIB = 1 << 20
WINDOW = frames.STREAM_WINDOW


def send_part(client, stream, size, *, announced=3 * MIB, path="/test/Size"):
    """Begin a message of ``announced`` bytes and send ``size`` bytes of it, without waiting for a window."""
    client.head(stream, path=path)
    data = b"\0" + announced.to_bytes(4, "big") + b"x" * (size - 5)
    for at in range(0, size, 16_384):
        client.frame(frames.DATA, 0, stream, data[at : at + 16_384])


def send_rest(client, stream, size):
    """Send the last ``size`` bytes of a message."""
    for at in range(0, size, 16_384):
        part = min(16_384, size - at)
        end = frames.END_STREAM if at + part == size else 0
        client.frame(frames.DATA, end, stream, b"x" * part)


def windows(client):
    """Return the windows of streams that the server has granted so far, by stream."""
    client.frame(frames.PING, 0, 0, b"windows!")
    granted = {}
    while (received := client.receive_kind(frames.WINDOW_UPDATE, frames.PING))[0] != frames.PING:
        granted[received[2]] = int.from_bytes(received[3], "big")
    granted.pop(0, None)
    return granted


def test_large_messages_wait_for_their_window_until_they_fit(make_port):
    port = make_port(queue_bytes=32 * MIB)
    peak, add = [0], port.budget.add

    def watched(size):
        add(size)
        peak[0] = max(peak[0], port.budget.held)

    port.budget.add = watched
    size = 4_000_000
    with grpc.insecure_channel(port.url) as channel:
        call = channel.unary_unary("/test/Size")
        calls = [call.future(b"x" * size, timeout=60) for _ in range(12)]
        assert [each.result() for each in calls] == [b"4000000"] * 12
    assert size < peak[0] <= 16 * MIB  # a connection's share
    assert port.budget.held == port.context.receiving.promised == 0
    assert not port.rejections


def test_parts_of_messages_beyond_half_of_the_budget_are_rejected(make_port, connect):
    port = make_port(queue_bytes=4 * MIB)
    client, other = connect(port), connect(port)
    for stream in range(1, 10, 2):
        send_part(client, stream, 400_000, announced=450_000)
    client.ping()
    assert port.budget.held == 5 * 400_000
    send_part(client, 11, 400_000, announced=450_000)
    fields = client.status(11)
    assert fields["grpc-status"] == "14"
    assert "(half of server.admission.queue_bytes)" in fields["grpc-message"]
    assert fields["grpc-retry-pushback-ms"]
    assert port.rejections == [1]
    send_part(other, 1, 400_000, announced=400_000 - 5)
    send_rest(other, 1, 0)
    other.frame(frames.DATA, frames.END_STREAM, 1)
    assert other.status(1)["grpc-status"] == "0"
    client.send(frames.reset(1, frames.ErrorCode.CANCEL))
    client.ping()
    assert port.budget.held < 5 * 400_000
    send_rest(client, 3, 50_005)
    assert client.status(3)["grpc-status"] == "0"
    client.close()
    until(lambda: port.budget.held == 0)


def test_full_budget_rejects_parts_of_messages(make_port, connect):
    """REST's bodies and queued requests share the budget."""
    port = make_port(queue_bytes=4 * MIB)
    port.budget.add(4 * MIB)
    client = connect(port)
    send_part(client, 1, 100_000)
    fields = client.status(1)
    assert fields["grpc-status"] == "14"
    assert "hold 4194304 bytes (server.admission.queue_bytes)" in fields["grpc-message"]
    client.head(3)
    client.message(3, b"1")  # in one frame: the admission queue decides
    assert client.status(3)["grpc-status"] == "0"


def test_announced_messages_wait_in_order_and_hold_nothing(make_port, connect):
    port = make_port(queue_bytes=8 * MIB)
    client, other = connect(port), connect(port)
    for stream in (1, 3, 5):
        send_part(client, stream, 5)
    assert windows(client) == {1: 3 * MIB - WINDOW + 5}
    assert port.budget.held == 15
    send_part(other, 1, 400_000, announced=399_995)
    other.frame(frames.DATA, frames.END_STREAM, 1)
    assert other.status(1)["grpc-status"] == "0"
    send_rest(client, 1, 3 * MIB)
    received = {
        client.receive_kind(*kinds)[2] for kinds in [(frames.DATA, frames.WINDOW_UPDATE)] * 2
    }
    assert received == {1, 3}  # stream 1's answer and stream 3's window
    client.send(frames.reset(3, frames.ErrorCode.CANCEL))
    assert client.receive_kind(frames.WINDOW_UPDATE)[2] == 5
    send_rest(client, 5, 3 * MIB)
    assert client.status(5)["grpc-status"] == "0"
    assert port.budget.held == port.context.receiving.promised == 0


def test_message_larger_than_the_budget_is_received(make_port):
    port = make_port(queue_bytes=MIB)
    with grpc.insecure_channel(port.url) as channel:
        size = channel.unary_unary("/test/Size")
        assert [size(b"x" * 4_000_000, timeout=30) for _ in range(3)] == [b"4000000"] * 3
    assert port.budget.held == 0


def test_message_without_a_window_is_rejected_after_a_time(make_port, connect, monkeypatch):
    monkeypatch.setattr(receive_budget, "_MAX_WAIT_S", 0.05)
    port = make_port(queue_bytes=4 * MIB)
    client = connect(port)
    for stream in (1, 3):
        send_part(client, stream, 5)
    fields = client.status(3)
    assert fields["grpc-status"] == "14"
    assert "server.admission.queue_bytes" in fields["grpc-message"]
    assert port.rejections == [1]


@pytest.mark.parametrize("path", ["/test/Hold", "/test/Size"])
def test_message_that_arrives_too_slowly_ends_its_call(port, raw, path):
    send_part(raw, 1, 600_000 - 100_000, announced=600_000, path=path)
    raw.ping()
    port.sweep(receive_budget.REQUEST_TIMEOUT_S - 1)
    assert port.connection.streams
    port.sweep(receive_budget.REQUEST_TIMEOUT_S + 1)
    assert raw.status(1)["grpc-status"] == "4"
    assert port.budget.held == port.context.receiving.promised == 0
    assert not port.context.receiving._arriving


def test_messages_of_a_stream_are_held_until_they_are_taken(port, raw):
    for stream in (1, 3):
        raw.head(stream, path="/test/Hold")
    for _ in range(3):
        raw.message(1, b"x" * 10_000, 0)
    raw.ping()
    assert port.budget.held == 3 * 10_005
    call = port.streams[0]
    port.call(call.connection.return_window, call.stream, 2 * 10_005)
    assert port.budget.held == 10_005
    raw.frame(frames.DATA, frames.END_STREAM, 1)
    assert raw.status(1)["grpc-status"] == "0"
    assert port.budget.held == 0


@pytest.mark.parametrize("path", ["Large", "Auxiliary"])
def test_message_is_held_while_it_waits_for_a_thread(port, path):
    with grpc.insecure_channel(port.url) as channel:
        call = channel.unary_unary(f"/test/{path}").future(b"x" * 300_000, timeout=30)
        until(lambda: port.budget.held > 300_000)
        call.cancel()
        until(lambda: port.connection.is_idle)
        assert port.budget.held > 300_000
        port.gate.set()
        until(lambda: not port.budget.held)


def test_inflated_bytes_are_reserved(make_port, connect):
    port = make_port(queue_bytes=2 * MIB)
    client = connect(port)
    for stream, size, status in [(1, MIB, "0"), (3, 3 * MIB, "14"), (5, 100_000, "0")]:
        client.head(stream, path="/test/Size", grpc_encoding="gzip")
        packed = gzip.compress(b"x" * size)
        data = b"\1" + len(packed).to_bytes(4, "big") + packed
        client.frame(frames.DATA, frames.END_STREAM, stream, data)
        fields = client.status(stream)
        assert fields["grpc-status"] == status
        port.budget.add(0 if stream > 1 else 1)  # another request holds a byte
    until(lambda: port.budget.held == 1)
    assert port.rejections == [1]


def test_rest_of_a_rejected_stream_is_discarded(port, connect):
    """Its status waits for an answer that its client does not take."""
    client = connect(port, settings=(4).to_bytes(2, "big") + (0).to_bytes(4, "big"))
    client.head(1, path="/test/Bidi")
    client.message(1, b"x" * 10, 0)
    client.frame(frames.DATA, 0, 1, b"\0\xff\xff\xff\xff")  # too large
    with suppress(ConnectionError):
        client.frame(frames.DATA, 0, 1, b"\0\0\0\0\1x" * 100)
    client.ping()
    assert port.streams[0].events == [10, "gone"]
    client.send(frames.window_update(1, 100))
    assert client.status(1)["grpc-status"] == "8"
    assert port.budget.held == 0
