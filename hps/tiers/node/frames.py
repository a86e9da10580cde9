"""The frames on a node's socket: a head of 8 bytes, then the payload.

The head is the payload's size (u32), the kind of frame (u8) and three zeros; all numbers are little-endian.
One side sends requests, the other answers each in turn. Both are on one machine and of one version of
hps (`PROTOCOL` is compared at the start), so arrays are sent in memory layout.

========  ==============================================  ==============================================
request   payload                                         payload of its ``OK``
========  ==============================================  ==============================================
HELLO     JSON: protocol, tables [[id, dim, dtype]…]      JSON: protocol, lacking [number of a table…]
FETCH     f64 seconds left (NaN: any), u32 parts, u32 0;  u32 rows by part (and a 0, to a multiple of 8
          (u32 table, u32 keys) by part; i64 keys         bytes); u64 version by key; the rows; u8 source by
                                                          key; u8 by key, 1: answered; names of the tiers
                                                          that were skipped, by commas
PROMOTE   u32 table, u32 0; i64 keys                      nothing
ASK       JSON: a name, and its arguments             JSON
REPORT    JSON: the state of the process's models    JSON: the models that it must open and serve
========  ==============================================  ==============================================

Tables are identified by their number in HELLO. Rows are sent only for keys whose source is not 0. A key that
is answered without a row was deleted. For REPORT see `hps.tiers.node.attached_processes`. ``FAILED`` answers
with JSON: the error's kind and its message.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import orjson

from hps.tiers.base import Part
from hps.types import EmbeddingTable, KeyArray

PROTOCOL = 2
SOCKET = "node.sock"
MAX_PAYLOAD = 64 << 20
"""Bytes of one frame."""
_HEAD = struct.Struct("<IB3x")
_FETCH = struct.Struct("<dII")
_PROMOTE = struct.Struct("<II")
# Bytes per key in an answer, besides its row.
KEY_BYTES = 10
_SPARE = 4096

Buffer = bytes | bytearray | memoryview
Pieces = list[Any]
"""A payload in pieces: bytes and C-contiguous arrays."""


class FrameKind(IntEnum):
    HELLO = 0
    FETCH = 1
    PROMOTE = 2
    ASK = 3
    REPORT = 4
    OK = 64
    FAILED = 65


class ConnectionEnded(ConnectionError):
    """The peer closed the connection between two frames."""


class BadFrame(Exception):
    """The received bytes are not a frame of this protocol."""


def send(connection: socket.socket, kind: FrameKind, pieces: Pieces) -> None:
    """Send one frame. Raises OSError, and ValueError if it is too large."""
    flat = [view for piece in pieces if (view := _flat(piece)).nbytes]
    size = sum(view.nbytes for view in flat)
    if size > MAX_PAYLOAD:
        raise ValueError(f"a frame of {size:,} bytes; {MAX_PAYLOAD:,} are allowed")
    # Small frames in one call: one segment, and one wake-up of the peer.
    if size <= 1 << 16:
        connection.sendall(b"".join([_HEAD.pack(size, kind), *flat]))
        return
    connection.sendall(_HEAD.pack(size, kind))
    for view in flat:
        connection.sendall(view)


def receive_head(connection: socket.socket) -> tuple[int, int]:
    """Return the kind and the size of the next frame. Raises ConnectionEnded, OSError or BadFrame."""
    head = bytearray(_HEAD.size)
    received = connection.recv_into(head)
    if not received:
        raise ConnectionEnded("the peer closed the connection")
    _fill(connection, memoryview(head)[received:])
    size, kind = _HEAD.unpack(head)
    if size > MAX_PAYLOAD:
        raise BadFrame(f"a frame of {size:,} bytes; {MAX_PAYLOAD:,} are allowed")
    return kind, size


def receive_payload(connection: socket.socket, size: int) -> bytearray:
    """Return the payload that follows a head. Raises OSError."""
    payload = bytearray(size)
    _fill(connection, memoryview(payload))
    return payload


def _fill(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the connection ended within a frame")
        view = view[received:]


def _flat(piece: Any) -> memoryview:
    if isinstance(piece, np.ndarray):
        piece = piece.reshape(-1).view(np.uint8)
    return memoryview(piece)


def most_keys(row_bytes: int) -> int:
    """Return the most keys of one table, with rows of ``row_bytes``, that fit a fetch."""
    return (MAX_PAYLOAD - _SPARE) // (row_bytes + KEY_BYTES)


# -- fetch -----------------------------------------------------------------------------------------


def fetch_request(requests: Sequence[tuple[int, KeyArray]], left_s: float | None) -> Pieces:
    """Encode a fetch. ``requests``: the table number and the keys ``(n,)`` of each part."""
    head = _FETCH.pack(math.nan if left_s is None else left_s, len(requests), 0)
    sizes = np.array([(table, len(keys)) for table, keys in requests], np.uint32)
    return [head, sizes, *(np.ascontiguousarray(keys) for _, keys in requests)]


def read_fetch(
    payload: bytearray, tables: Sequence[EmbeddingTable | None]
) -> tuple[list[Part], float | None]:
    """Decode a fetch into new parts and the seconds left. Raises BadFrame."""
    try:
        left_s, count, _ = _FETCH.unpack_from(payload)
        sizes = np.frombuffer(payload, np.uint32, 2 * count, _FETCH.size).reshape(count, 2)
        at = _FETCH.size + sizes.nbytes
        parts, answer = [], _SPARE
        for number, n in sizes.tolist():
            table = tables[number]
            if table is None:
                raise BadFrame(f"table {number} is not served")
            answer += n * (table.row_bytes + KEY_BYTES)
            if answer > MAX_PAYLOAD:  # checked before memory is allocated
                raise BadFrame(f"{n:,} keys of table {table.id} are too many for one frame")
            parts.append(Part.make(table, np.frombuffer(payload, np.int64, n, at)))
            at += 8 * n
    except (struct.error, ValueError, IndexError) as error:
        raise BadFrame(f"invalid fetch: {error}") from None
    if at != len(payload):
        raise BadFrame("the size of a fetch does not match its number of keys")
    return parts, None if math.isnan(left_s) else left_s


def fetch_answer(parts: Sequence[Part], degraded: Sequence[str]) -> Pieces:
    hits = [np.flatnonzero(part.source) for part in parts]
    counts = np.zeros(len(parts) + len(parts) % 2, np.uint32)
    counts[: len(parts)] = [len(positions) for positions in hits]
    answered = []
    for part in parts:
        done = np.ones(len(part.keys), np.uint8)
        done[part.missing] = 0
        answered.append(done)
    return [
        counts,
        *(part.versions for part in parts),
        *(
            part.out if len(positions) == len(part.keys) else part.out[positions]
            for part, positions in zip(parts, hits, strict=True)
        ),
        *(part.source for part in parts),
        *answered,
        ",".join(degraded).encode(),
    ]


def read_fetch_answer(
    payload: bytearray, requests: Sequence[tuple[Part, Any]], degraded: list[str]
) -> list[Any]:
    """Copy the answer into each part at its requested positions (k,); return the missing ones per part.

    Raises BadFrame."""
    reader = _PayloadReader(payload)
    sizes = [len(positions) for _, positions in requests]
    counts = reader.array(np.uint32, len(requests) + len(requests) % 2)[: len(requests)].tolist()
    versions = [reader.array(np.uint64, n) for n in sizes]
    rows = [
        reader.array(part.table.row_dtype, count * part.table.row_width).reshape(
            count, part.table.row_width
        )
        for (part, _), count in zip(requests, counts, strict=True)
    ]
    sources = [reader.array(np.uint8, n) for n in sizes]
    answered = [reader.array(np.bool_, n) for n in sizes]
    missing = []
    for i, (part, positions) in enumerate(requests):
        hits = np.flatnonzero(sources[i])
        if len(hits) != counts[i]:
            raise BadFrame("an answer's number of rows does not match its sources")
        if len(hits) == len(positions):
            part.out[positions] = rows[i]
            part.versions[positions] = versions[i]
            part.source[positions] = sources[i]
        else:
            part.out[positions[hits]] = rows[i]
            known = positions[answered[i]]
            part.versions[known] = versions[i][answered[i]]
            part.source[known] = sources[i][answered[i]]
        missing.append(positions[~answered[i]])
    names = reader.rest().decode()
    degraded.extend(name for name in names.split(",") if name and name not in degraded)
    return missing


class _PayloadReader:
    """Reads arrays out of a payload, in order. Raises BadFrame if it is too short."""

    def __init__(self, payload: bytearray) -> None:
        self._payload = payload
        self._at = 0

    def array(self, dtype: Any, count: int) -> Any:
        try:
            values = np.frombuffer(self._payload, dtype, count, self._at)
        except ValueError as error:
            raise BadFrame(f"invalid answer: {error}") from None
        self._at += values.nbytes
        return values

    def rest(self) -> bytes:
        return bytes(self._payload[self._at :])


# -- other requests --------------------------------------------------------------------------------


def promote_request(table: int, keys: KeyArray) -> Pieces:
    return [_PROMOTE.pack(table, 0), np.ascontiguousarray(keys)]


def read_promote(
    payload: bytearray, tables: Sequence[EmbeddingTable | None]
) -> tuple[EmbeddingTable, KeyArray]:
    """Decode a promotion. Raises BadFrame."""
    try:
        number, _ = _PROMOTE.unpack_from(payload)
        table = tables[number]
        keys = np.frombuffer(payload, np.int64, -1, _PROMOTE.size)
    except (struct.error, ValueError, IndexError) as error:
        raise BadFrame(f"invalid promotion: {error}") from None
    if table is None:
        raise BadFrame(f"table {number} is not served")
    return table, keys


def as_json(value: Any) -> Pieces:
    return [orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)]


def read_json(payload: Buffer) -> Any:
    """Decode JSON. Raises BadFrame."""
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise BadFrame(f"invalid JSON: {error}") from None
