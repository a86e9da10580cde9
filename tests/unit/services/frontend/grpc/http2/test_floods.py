"""Floods of frames, settings and metadata that cost the server more than their client."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest

from services.frontend.grpc.http2 import frames, limits
from services.frontend.grpc.http2.frames import END_HEADERS, END_STREAM, ErrorCode
from tests.support.waiting import until
from tests.unit.services.frontend.grpc.http2.conftest import HEAD

CALM = ErrorCode.ENHANCE_YOUR_CALM
HEADERS, DATA, CONTINUATION = frames.HEADERS, frames.DATA, frames.CONTINUATION


@pytest.mark.parametrize("fields", [HEAD, []])
def test_flood_of_metadata_that_decode_to_much_ends_the_connection(raw, fields):
    """Each field takes four bytes of the block, and 33 of the limit."""
    block = raw.encoder.encode(fields, huffman=False) + b"\0\1a\0" * 1000
    with suppress(ConnectionError):
        raw.send(b"".join(frames.frame(HEADERS, 5, stream, block) for stream in range(1, 99, 2)))
    assert raw.status(1)["grpc-status"] == "8"
    assert raw.goodbye() is CALM


def test_flood_of_large_metadata_ends_the_connection(raw, monkeypatch):
    monkeypatch.setattr(limits, "_PER_S", 10)
    with suppress(ConnectionError):
        for stream in range(1, 9, 2):
            block = raw.encoder.encode([*HEAD, ("a", "x" * 40_000)], huffman=False)
            raw.frame(HEADERS, END_STREAM, stream, block[:16_384])
            raw.frame(CONTINUATION, 0, stream, block[16_384:32_768])
            raw.frame(CONTINUATION, END_HEADERS, stream, block[32_768:])
            if stream == 1:
                assert raw.status(1)["grpc-status"] == "8"
    assert raw.goodbye() is CALM


@pytest.mark.parametrize("piece", [b"", b"x", b"x" * 16_384])
def test_continuation_flood_ends_the_connection(raw, piece):
    raw.frame(HEADERS, 0, 1, b"")
    raw.send(frames.frame(CONTINUATION, 0, 1, piece) * 20)
    assert raw.goodbye() is CALM


def test_hpack_bomb_ends_the_connection(raw):
    bomb = b"\x40\x01a\x7f\x81\x1e" + b"x" * 4000  # one entry of the table, then references to it
    raw.frame(HEADERS, END_HEADERS, 1, bomb + b"\xbe" * 8000)
    assert raw.goodbye() in (CALM, ErrorCode.COMPRESSION_ERROR)


@pytest.mark.parametrize(
    "useless",
    [
        frames.frame(frames.PING, 0, 0, b"12345678"),
        frames.frame(frames.SETTINGS, 0, 0, b""),
        frames.frame(frames.PRIORITY, 0, 1, b"12345"),
        frames.frame(DATA, 0, 1, b""),
        frames.frame(200, 0, 0, b""),
    ],
    ids=["ping", "settings", "priority", "empty", "unknown"],
)
def test_flood_of_useless_frames_ends_the_connection(port, raw, useless, monkeypatch):
    monkeypatch.setattr(limits, "_PER_S", 10)
    raw.head(1, path="/test/Hold")
    raw.send(useless * (limits._BURST - 100))
    raw.ping()
    raw.send(useless * 300)
    assert raw.goodbye() is CALM
    until(lambda: not port.context.connections)


def test_settings_cost_as_much_as_the_streams_that_they_concern(port, connect, monkeypatch):
    monkeypatch.setattr(limits, "_PER_S", 10)
    client = connect(port, settings=struct.pack(">HL", 4, 0))
    for stream in range(1, 2 * 512, 2):
        client.head(stream, path="/test/Big")
        client.message(stream, b"1")
    client.ping()
    assert port.call(lambda: port.connection.sender.blocked_streams) == 512
    with suppress(ConnectionError):
        client.send(frames.frame(frames.SETTINGS, 0, 0, b"") * 600)
    assert client.goodbye() is CALM


def test_settings_of_many_entries_cost_as_much_as_several(raw, monkeypatch):
    monkeypatch.setattr(limits, "_PER_S", 10)
    large = frames.frame(frames.SETTINGS, 0, 0, struct.pack(">HL", 99, 1) * 10_000)
    with suppress(ConnectionError):
        raw.send(large * 20)
    assert raw.goodbye() is CALM


def test_pings_and_resets_between_answers_are_no_flood(port, connect, monkeypatch):
    monkeypatch.setattr(limits, "_PER_S", 0)
    monkeypatch.setattr(limits, "_BURST", 200)
    raw = connect(port)
    ping = frames.frame(frames.PING, 0, 0, b"bdp-ping")
    for stream in range(1, limits._BURST, 4):
        raw.head(stream)
        raw.message(stream, b"1")
        assert raw.status(stream)["grpc-status"] == "0"
        raw.send(ping * 3)
        raw.head(stream + 2)
        raw.send(frames.reset(stream + 2, ErrorCode.CANCEL))
    raw.ping()
    raw.send(ping * (limits._BURST + 10))
    assert raw.goodbye() is CALM


def test_rapid_reset_ends_the_connection_and_holds_no_slot(port, raw, monkeypatch):
    monkeypatch.setattr(limits, "_PER_S", 10)
    raw.head(1)
    with suppress(ConnectionError):
        for stream in range(3, 2 * limits._BURST + 400, 2):
            raw.head(stream)
            raw.send(frames.reset(stream, ErrorCode.CANCEL))
    assert raw.goodbye() is CALM
    until(lambda: not port.context.connections)
    assert not port.calls.requests.open
    assert not port.calls._expected


def test_flood_of_trailers_that_decode_to_much_ends_the_connection(raw):
    block = b"\0\1a\0" * 1000
    raw.head(1, END_HEADERS | END_STREAM)
    with suppress(ConnectionError):
        raw.send(frames.frame(HEADERS, END_HEADERS | END_STREAM, 1, block) * 30)
    assert raw.goodbye() is CALM
