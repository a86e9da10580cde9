"""NumPy twin of the update message decoders (hps/native/src/codec.cpp), and what both share.

docs/wire-format.md describes the formats byte by byte."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.row_format import ROW_FORMAT_NAMES, row_format
from hps.types import KeyArray, VersionArray

Payloads = Sequence[bytes | None]


class Reason(IntEnum):
    """The result of decoding a message. Below ``TRUNCATED`` it is valid; the others are faults."""

    OK = 0
    BEACON = 1  # HPS's beacon: a header without rows
    NULL = 2  # no payload: Kafka's tombstone
    KEYED = 3  # the message has a key, as HPS's never have
    TRUNCATED = 16  # shorter than its header says, or not a whole number of rows
    BAD_MAGIC = 17  # of another format
    UNKNOWN_VERSION = 18  # a newer, incompatible version of the format
    CHECKSUM = 19
    ROW_SIZE = 20  # rows of another size than the table's
    OVERSIZE = 21
    MALFORMED = 22  # undamaged, but inconsistent
    # Detected by readers, who know the tables and the time, not by a decoder:
    UNKNOWN_TABLE = 23
    AHEAD = 24  # a version too far in the future

    @property
    def fault(self) -> bool:
        return self >= Reason.TRUNCATED


# The fields of a message, `Message` in hps/native/include/hps/codec.hpp. ``group`` is the number of its
# group of rows, or -1; ``at`` the position of the byte that caused the reason.
MESSAGE = np.dtype(
    {
        "names": [
            "reason",
            "group",
            "at",
            "upserts",
            "deletes",
            "ttl_s",
            "event_ms",
            "step",
            "dense_version",
        ],
        "formats": ["u1", "<i4", "<u4", "<u4", "<u4", "<u4", "<i8", "<u8", "<u8"],
        "offsets": [0, 4, 8, 12, 16, 20, 24, 32, 40],
        "itemsize": 48,
    }
)

HPS_MAGIC, HPS_HEADER = b"HCTR", 8
MAGIC, MAJOR, MINOR = b"HPSU", 1, 0
# magic, major, minor, header bytes | checksum, message bytes, upserts, deletes | dim, dtype, flags, table
# bytes | event time, TTL, unused | step, dense version
HEADER = struct.Struct("<4sBBHIIIIIBBHqIIQQ")
CHECKSUM = slice(8, 12)  # of all other bytes
DTYPES = (
    np.dtype("<f4"),
    np.dtype("<f2"),
)  # of vectors; the dtype of a message is a row format's code
LARGEST_DIM = 1 << 20
LATEST_MS = 1 << 44  # the largest time that fits into a version

Fault = tuple[Reason, int]
_OK: Fault = (Reason.OK, 0)


def crc32(data: NDArray[np.uint8], crc: int = 0) -> int:
    """Return zlib's CRC-32 of ``data (n,)``, continuing ``crc``."""
    return zlib.crc32(data.data, crc)


def _check_max_bytes(max_bytes: int) -> None:
    if not 0 <= max_bytes < 2**32:
        raise ValueError("max_bytes must be below 2^32")


def _check_hps(key_bytes: int, row_bytes: int) -> None:
    if key_bytes not in (4, 8):
        raise ValueError("key_bytes must be 4 or 8")
    if not 1 <= row_bytes < 2**32:
        raise ValueError("row_bytes must be at least 1 and below 2^32")


def _check_payloads(messages: Payloads) -> None:
    if not all(each is None or isinstance(each, bytes) for each in messages):
        raise TypeError("messages must be bytes or None")


def _start(payload: bytes | None, magic: bytes, max_bytes: int) -> Fault:
    if payload is None:
        return Reason.NULL, 0
    if len(payload) > max_bytes:
        return Reason.OVERSIZE, max_bytes
    if not magic.startswith(payload[:4]):
        return Reason.BAD_MAGIC, 0
    return _OK if len(payload) >= 4 else (Reason.TRUNCATED, len(payload))


def decode_hps(
    messages: Payloads,
    keyed: NDArray[np.uint8],
    stamps: VersionArray,
    key_bytes: int,
    row_bytes: int,
    max_bytes: int,
) -> tuple[NDArray[np.uint8], KeyArray, VersionArray, NDArray[np.uint8]]:
    """Decode HPS's messages (m,) of one table.

    ``keyed (m,)`` marks those with a key; ``stamps (m,)`` are the versions of their rows. Returns MESSAGEs
    (m * 48,) as bytes, keys (n,), versions (n,) and rows (n * row_bytes,) as bytes."""
    _check_hps(key_bytes, row_bytes)
    _check_max_bytes(max_bytes)
    _check_payloads(messages)
    if len(keyed) != len(messages) or len(stamps) != len(messages):
        raise ValueError("keyed and stamps must have one entry per message")
    row = np.dtype(
        [("key", f"<{'u' if key_bytes == 4 else 'i'}{key_bytes}"), ("row", "V", row_bytes)]
    )
    records, parts = np.zeros(len(messages), MESSAGE), [np.empty(0, row)]
    records["group"] = -1
    for i, payload in enumerate(messages):
        records[i]["reason"], records[i]["at"] = fault = (
            (Reason.KEYED, 0) if keyed[i] else _hps_fault(payload, row, max_bytes)
        )
        if fault == _OK and payload is not None:
            records[i]["group"] = 0
            records[i]["upserts"] = (len(payload) - HPS_HEADER) // row.itemsize
            parts.append(np.frombuffer(payload, row, offset=HPS_HEADER))
    rows = np.concatenate(parts)
    return (
        records.view(np.uint8),
        rows["key"].astype(np.int64),
        np.repeat(stamps, records["upserts"]),
        np.ascontiguousarray(rows["row"]).view(np.uint8),
    )


def _hps_fault(payload: bytes | None, row: np.dtype[Any], max_bytes: int) -> Fault:
    fault = _start(payload, HPS_MAGIC, max_bytes)
    if fault != _OK or payload is None:
        return fault
    if len(payload) < HPS_HEADER:
        return Reason.TRUNCATED, len(payload)
    if len(payload) == HPS_HEADER:
        return Reason.BEACON, 0
    if int.from_bytes(payload[4:8], "little") != row["row"].itemsize:
        return Reason.ROW_SIZE, 4
    left = (len(payload) - HPS_HEADER) % row.itemsize
    return (Reason.TRUNCATED, len(payload) - left) if left else _OK


def encode_hps(
    keys: KeyArray,
    vectors: NDArray[np.uint8],
    key_bytes: int,
    row_bytes: int,
    rows_per_message: int,
) -> list[bytes]:
    """Encode ``keys (n,)`` and ``vectors (n * row_bytes,)`` as messages of ``rows_per_message`` rows."""
    _check_hps(key_bytes, row_bytes)
    if len(vectors) != len(keys) * row_bytes:
        raise ValueError("vectors must have row_bytes bytes per key")
    if rows_per_message < 1:
        raise ValueError("rows_per_message must be at least 1")
    rows = np.empty(len(keys), [("key", f"<i{key_bytes}"), ("row", "V", row_bytes)])
    rows["key"] = keys.astype(f"<i{key_bytes}")
    rows["row"] = vectors.view(rows.dtype["row"]) if len(keys) else rows["row"]
    head = HPS_MAGIC + row_bytes.to_bytes(4, "little")
    return [
        head + rows[at : at + rows_per_message].tobytes()
        for at in range(0, len(keys), rows_per_message)
    ]


Group = tuple[
    str, int, int, KeyArray, VersionArray, NDArray[np.uint8], KeyArray, VersionArray
]  # table, dtype, dim; of rows: keys, versions, bytes; of deletions: keys, versions


def decode_native(messages: Payloads, max_bytes: int) -> tuple[NDArray[np.uint8], list[Group]]:
    """Decode native messages (m,).

    Returns MESSAGEs (m * 48,) as bytes, and the rows and deletions of each table and row format, in the
    messages' order."""
    _check_max_bytes(max_bytes)
    _check_payloads(messages)
    records = np.zeros(len(messages), MESSAGE)
    records["group"] = -1
    groups: dict[tuple[str, int, int], list[list[Any]]] = {}
    for i, payload in enumerate(messages):
        fault, fields, columns = _read_native(payload, max_bytes)
        records[i]["reason"], records[i]["at"] = fault
        if fault != _OK:
            continue
        name, dtype, dim = fields.pop("kind")
        parts = groups.setdefault((name, dtype, dim), [[], [], [], [], []])
        records[i]["group"] = list(groups).index((name, dtype, dim))
        for field, value in fields.items():
            records[i][field] = value
        for part, column in zip(parts, columns, strict=True):
            part.append(column)
    return records.view(np.uint8), [
        (*kind, *(np.concatenate(part) for part in parts))  # type: ignore[misc] # five of them
        for kind, parts in groups.items()
    ]


def _read_native(
    payload: bytes | None, max_bytes: int
) -> tuple[Fault, dict[str, Any], list[NDArray[Any]]]:
    """Return the fault, the fields of MESSAGE and the columns (keys, versions, rows, deletions)."""
    fault = _start(payload, MAGIC, max_bytes)
    if fault != _OK or payload is None:
        return fault, {}, []
    if len(payload) > 4 and payload[4] != MAJOR:
        return (Reason.UNKNOWN_VERSION, 4), {}, []
    if len(payload) < HEADER.size:
        return (Reason.TRUNCATED, len(payload)), {}, []
    fields = HEADER.unpack_from(payload)
    size = fields[5]
    if size > len(payload):
        return (Reason.TRUNCATED, len(payload)), {}, []
    if size < len(payload):
        return (Reason.MALFORMED, 12), {}, []
    start = zlib.crc32(payload[: CHECKSUM.start])
    if zlib.crc32(memoryview(payload)[CHECKSUM.stop :], start) != fields[4]:
        return (Reason.CHECKSUM, 8), {}, []
    return _read_fields(payload, fields)


def _read_fields(
    payload: bytes, fields: tuple[Any, ...]
) -> tuple[Fault, dict[str, Any], list[NDArray[Any]]]:
    _, _, minor, header, _, size, up, down, dim, dtype, flags, name_bytes, event_ms, *rest = fields
    keys_at = header + (name_bytes + 7) // 8 * 8
    name = payload[header : header + name_bytes]
    odd = next((i for i, c in enumerate(name) if not 0x21 <= c <= 0x7E), None)
    known = dtype < len(ROW_FORMAT_NAMES)
    row_bytes = row_format(ROW_FORMAT_NAMES[dtype]).row_bytes(dim) if known else 0
    end = keys_at + 16 * (up + down) + up * row_bytes
    checks = (
        (flags != 0, (Reason.UNKNOWN_VERSION, 29)),
        (not known, (Reason.UNKNOWN_VERSION, 28)),
        (header < HEADER.size or header % 8 or header > size, (Reason.MALFORMED, 6)),
        (not 1 <= dim <= LARGEST_DIM, (Reason.ROW_SIZE, 24)),
        (not 0 <= event_ms < LATEST_MS, (Reason.MALFORMED, 32)),
        (not 1 <= name_bytes <= size - header, (Reason.MALFORMED, 30)),
        (odd is not None, (Reason.MALFORMED, header + (odd or 0))),
        (end > size or (end < size and minor <= MINOR), (Reason.MALFORMED, 16)),
    )
    for wrong, fault in checks:
        if wrong:
            return fault, {}, []
    ttl_s, _, step, dense_version = rest
    message = {"upserts": up, "deletes": down, "ttl_s": ttl_s, "event_ms": event_ms}
    message |= {"step": step, "dense_version": dense_version, "kind": (name.decode(), dtype, dim)}
    keys = np.frombuffer(payload, "<i8", up + down, keys_at)
    versions = np.frombuffer(payload, "<u8", up + down, keys_at + 8 * len(keys))
    rows = np.frombuffer(payload, np.uint8, up * row_bytes, keys_at + 16 * len(keys))
    return _OK, message, [keys[:up], versions[:up], rows, keys[up:], versions[up:]]
