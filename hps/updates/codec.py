"""Update messages to arrays and back: HPS's wire format and the native one (docs/wire-format.md).

Decoding takes many messages in one call and never raises for their content: a message that is damaged, of
another format or of the wrong size gets a `Reason` and contributes no rows; the others are decoded. All
functions may be called from several threads; the GIL is released while large batches are copied."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hps import native
from hps.native.twin_codec import (
    CHECKSUM,
    DTYPES,
    HEADER,
    HPS_HEADER,
    LARGEST_DIM,
    LATEST_MS,
    MAGIC,
    MAJOR,
    MESSAGE,
    MINOR,
    Payloads,
)
from hps.row_format import ROW_FORMAT_NAMES, RowFormat, row_format, row_format_of
from hps.tiers.positions import TableChanges
from hps.types import VERSION_SEQUENCE_BITS, IndexArray, KeyArray, VectorArray, VersionArray
from hps.updates.source import Reason, TableUpdate

LONGEST = 128 << 20  # largest message that is read, in bytes
FULL = 256 << 10  # largest message that is written, in bytes, as by HPS's producer

_TOPIC = re.compile(r"hps_et\.([\w-]+)\.([\w-]+)", re.ASCII)
_NAME = re.compile(r"[\x21-\x7e]{1,65535}")


@dataclass(frozen=True, slots=True)
class MessageAttributes:
    """Attributes of all rows of a message.

    ``event_ms``: when they were made; ``ttl_s``: their lifetime from then on (0: for ever); ``step``,
    ``dense_version``: training step and dense network that they belong to (0: none)."""

    event_ms: int
    ttl_s: int = 0
    step: int = 0
    dense_version: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class ConsumerRecords:
    """Kafka records: payloads, ``timestamps_ms (m,)``, ``offsets (m,)``, and keys if any record has one."""

    payloads: Payloads
    timestamps_ms: IndexArray
    offsets: IndexArray
    keys: Sequence[bytes | None] | None = None


@dataclass(frozen=True, eq=False, slots=True)
class DecodedMessages:
    """Decoded messages: ``messages (m,)`` of dtype `MESSAGE`, one per payload.

    ``updates``: one per table and row format, in the order of their first messages."""

    messages: NDArray[Any]
    updates: Sequence[TableUpdate]

    def faults(self) -> list[tuple[int, Reason, int]]:
        """Number, reason and offending byte of each message that cannot be applied."""
        wrong = np.flatnonzero(self.messages["reason"] >= Reason.TRUNCATED)
        return [
            (int(i), Reason(self.messages["reason"][i]), int(self.messages["at"][i])) for i in wrong
        ]


def hps_topic(model: str, table: str) -> str:
    """The topic from which HPS reads a table's updates."""
    return f"hps_et.{model}.{table}"


def hps_table(topic: str) -> tuple[str, str] | None:
    """The model and table of one of HPS's topics; None for another topic."""
    found = _TOPIC.fullmatch(topic)
    return (found[1], found[2]) if found else None


def record_versions(timestamps_ms: IndexArray, offsets: IndexArray) -> VersionArray:
    """Versions (m,) of records that carry none: timestamp, then offset mod 2^20.

    A record without a timestamp (negative) counts as written in 1970: only unversioned rows are older. A
    timestamp too large for a version, as one in microseconds, gets the latest version, which
    `drop_future_versions` rejects."""
    milliseconds = np.clip(timestamps_ms, 0, LATEST_MS - 1).astype(np.uint64)
    sequence = offsets.astype(np.uint64) & np.uint64((1 << VERSION_SEQUENCE_BITS) - 1)
    return milliseconds << np.uint64(VERSION_SEQUENCE_BITS) | sequence


def decode_hps(
    records: ConsumerRecords,
    table: str,
    dim: int,
    *,
    key_bits: Literal[32, 64] = 64,
    longest: int = LONGEST,
) -> DecodedMessages:
    """Decode messages of the topic of ``table``.

    ``dim`` is the table's: float32 rows of another one are ROW_SIZE."""
    payloads = records.payloads
    keyed = np.zeros(len(payloads), np.uint8)
    if records.keys is not None:
        keyed = np.fromiter(map(bool, records.keys), np.uint8, len(payloads))
    stamps = record_versions(
        np.asarray(records.timestamps_ms, np.int64), np.asarray(records.offsets, np.int64)
    )
    fields, rows, versions, vectors = native.decode_hps(
        payloads, keyed, stamps, key_bits // 8, 4 * dim, longest
    )
    messages = fields.view(MESSAGE)
    messages["event_ms"] = records.timestamps_ms
    nothing = (np.empty(0, np.int64), np.empty(0, np.uint64))
    changes = TableChanges(rows, vectors.view("<f4").reshape(-1, dim), versions, *nothing)
    return DecodedMessages(messages, _updates(messages, [(table, changes)] if len(rows) else []))


def decode_native(payloads: Payloads, *, longest: int = LONGEST) -> DecodedMessages:
    """Decode native messages of any tables."""
    fields, groups = native.decode_native(payloads, longest)
    tables = []
    for table, dtype, dim, keys, versions, rows, deleted, deleted_versions in groups:
        stored = row_format(ROW_FORMAT_NAMES[dtype])
        vectors = rows.view(stored.dtype).reshape(-1, stored.width(dim))
        changes = TableChanges(keys, vectors, versions, deleted, deleted_versions)
        if not stored.is_plain:
            changes = replace(changes, row_format=stored, row_dim=dim)
        tables.append((table, changes))
    messages = fields.view(MESSAGE)
    return DecodedMessages(messages, _updates(messages, tables))


def _updates(
    messages: NDArray[Any], tables: Sequence[tuple[str, TableChanges]]
) -> list[TableUpdate]:
    order = np.argsort(messages["group"], kind="stable")
    ends = np.searchsorted(messages["group"][order], np.arange(-1, len(tables)), side="right")
    updates = []
    for number, (table, changes) in enumerate(tables):
        numbers = order[ends[number] : ends[number + 1]]
        updates.append(TableUpdate(table, changes, messages[numbers], numbers))
    return updates


def encode_hps(
    keys: KeyArray, vectors: VectorArray, *, key_bits: Literal[32, 64] = 64, full: int = FULL
) -> list[bytes]:
    """Encode ``keys (n,)`` and ``vectors (n, dim)`` float32 as HPS messages of at most ``full`` bytes.

    Messages of one key must go to one partition, in order: the caller splits the keys by
    `hps.native.partition_hash` first. Raises ValueError for keys that do not fit 32 bits, and for
    arrays whose shapes do not match."""
    _check_rows(keys, vectors, (np.dtype("<f4"),))
    if key_bits == 32 and len(keys) and not (keys.min() >= 0 and keys.max() < 2**32):
        raise ValueError("keys of 32 bits must lie between 0 and 2^32 - 1")
    row_bytes = vectors.shape[1] * 4
    fit = _fitting(full - HPS_HEADER, key_bits // 8 + row_bytes, full)
    flat = np.ascontiguousarray(vectors).view(np.uint8).reshape(-1)
    return native.encode_hps(np.ascontiguousarray(keys), flat, key_bits // 8, row_bytes, fit)


def encode_native(
    table: str, changes: TableChanges, attributes: MessageAttributes, *, full: int = FULL
) -> list[bytes]:
    """Encode ``changes`` as native messages of at most ``full`` bytes; rows first, then deletions.

    ``vectors (n, dim)`` are float32 or float16, or rows of their ``row_format``. Raises ValueError for a
    name that is not printable ASCII without spaces, for attributes out of range, and for arrays whose
    shapes do not match. Partitions: see `encode_hps`."""
    _check_changes(table, changes)
    event_ms = attributes.event_ms
    if not 0 <= event_ms < LATEST_MS:
        raise ValueError(f"event_ms is out of range: {event_ms} is not Unix time in ms")
    count, gone = len(changes.keys), len(changes.deleted)
    dim, stored = changes.dim, changes.row_format or row_format_of(changes.vectors.dtype)
    name = table.encode() + bytes(-len(table) % 8)
    row = stored.row_bytes(dim)
    space = full - HEADER.size - len(name)
    rows_fit = _fitting(space, 16 + row if count else 16, full)
    fields = (
        *(dim, stored.code or 0, 0, len(table), event_ms),
        *(attributes.ttl_s, 0, attributes.step, attributes.dense_version),
    )
    keys, versions, vectors, deleted, deleted_versions = map(_bytes_of, _arrays(changes))
    messages = []
    up = down = 0
    while up < count or down < gone:  # rows [up, to) and deletions [down, end)
        to = min(up + rows_fit, count)
        end = min(down + (space - (to - up) * (16 + row)) // 16, gone)
        columns = (
            *(keys[8 * up : 8 * to], deleted[8 * down : 8 * end]),
            *(versions[8 * up : 8 * to], deleted_versions[8 * down : 8 * end]),
            vectors[row * up : row * to],
        )
        messages.append(_message(name, (to - up, end - down, *fields), columns))
        up, down = to, end
    return messages


def _arrays(changes: TableChanges) -> tuple[NDArray[Any], ...]:
    rows = (changes.keys, changes.versions, changes.vectors)
    return (*rows, changes.deleted, changes.deleted_versions)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _message(name: bytes, fields: tuple[int, ...], columns: Sequence[memoryview]) -> bytes:
    size = HEADER.size + len(name) + sum(map(len, columns))
    try:
        head = HEADER.pack(MAGIC, MAJOR, MINOR, HEADER.size, 0, size, *fields)
    except struct.error as error:
        raise ValueError(f"ttl_s, step or dense_version is out of range: {error}") from None
    start, rest = head[: CHECKSUM.start], b"".join((head[CHECKSUM.stop :], name, *columns))
    checksum = native.crc32(np.frombuffer(rest, np.uint8), zlib.crc32(start))
    return b"".join((start, checksum.to_bytes(4, "little"), rest))


def _fitting(space: int, entry_bytes: int, full: int) -> int:
    """Number of entries that fit a message. Raises ValueError if none does."""
    if space < entry_bytes:
        need = full - space + entry_bytes
        raise ValueError(
            f"a message of one row has {need} bytes, but at most {full} are allowed; raise message_bytes"
        )
    return space // entry_bytes


def _check_rows(keys: KeyArray, vectors: VectorArray, dtypes: Sequence[np.dtype[Any]]) -> None:
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise ValueError(f"keys must be (n,) int64, not {keys.shape} {keys.dtype}")
    if vectors.ndim != 2 or len(vectors) != len(keys):
        raise ValueError(f"vectors must be ({len(keys)}, dim), not {vectors.shape}")
    if vectors.dtype not in dtypes:
        names = " or ".join(each.name for each in dtypes)
        raise ValueError(f"vectors must be {names}, not {vectors.dtype}")
    if not 1 <= vectors.shape[1] <= LARGEST_DIM:
        raise ValueError(f"dim must be between 1 and {LARGEST_DIM}, not {vectors.shape[1]}")


def _check_stored(changes: TableChanges, stored: RowFormat) -> None:
    expected = (len(changes.keys), stored.width(changes.row_dim))
    if (changes.vectors.shape, changes.vectors.dtype) != (expected, stored.dtype):
        raise ValueError(
            f"rows of {stored.name} with {changes.row_dim} values must be {expected} {stored.dtype}, not "
            f"{changes.vectors.shape} {changes.vectors.dtype}"
        )
    if not 1 <= changes.row_dim <= LARGEST_DIM:
        raise ValueError(f"dim must be between 1 and {LARGEST_DIM}, not {changes.row_dim}")


def _check_changes(table: str, changes: TableChanges) -> None:
    if not _NAME.fullmatch(table):
        raise ValueError(f"a table's name must be printable ASCII without spaces, not {table!r}")
    stored = changes.row_format
    if stored is None:
        _check_rows(changes.keys, changes.vectors, DTYPES)
    else:
        _check_stored(changes, stored)
    for keys, versions in (
        (changes.keys, changes.versions),
        (changes.deleted, changes.deleted_versions),
    ):
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise ValueError(f"keys must be (n,) int64, not {keys.shape} {keys.dtype}")
        if versions.dtype != np.uint64 or versions.shape != keys.shape:
            raise ValueError(
                f"versions must be {keys.shape} uint64, not {versions.shape} {versions.dtype}"
            )
