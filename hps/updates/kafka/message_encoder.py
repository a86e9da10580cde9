"""Encodes a producer's rows as messages for the partitions of a topic; needs no Kafka client.

All rows of a key go to one partition, so they stay in order: the partition hash gives a key group, the
group the partition, as HPS's producers choose them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from hps.array_inputs import flat_keys, tensor
from hps.errors import BadRequest
from hps.native import partition_hash
from hps.native.twin_codec import DTYPES, LATEST_MS
from hps.row_format import ROW_FORMAT_NAMES, RowFormat, row_format
from hps.suggestions import hint_for
from hps.tiers.positions import TableChanges
from hps.tiers.stored_rows import NotStorable, decode, to_rows
from hps.types import EmbeddingTable, IndexArray, KeyArray, VectorArray, VersionArray
from hps.updates.codec import FULL, MessageAttributes, encode_hps, encode_native
from hps.updates.version_clock import VersionClock

Format = Literal["native", "hps"]
_EMPTY = np.empty(0, np.int64)


def format_named(name: str) -> RowFormat:
    """The row format of that name. Raises BadRequest."""
    if name not in ROW_FORMAT_NAMES:
        hint = hint_for(name, ROW_FORMAT_NAMES, "the row formats are")
        raise BadRequest(f"there is no row format {name!r}{hint}")
    return row_format(name)


def unix_ms(event_time: float | None) -> int:
    """``event_time`` in Unix seconds, default now, as ms."""
    if event_time is None:
        return time.time_ns() // 1_000_000
    if not 0 <= event_time * 1000 < LATEST_MS - 1:
        raise BadRequest(f"event_time {event_time} is not a time in Unix seconds")
    return round(event_time * 1000)


def check_changes(
    keys: Any,
    rows: Any,
    versions: Any,
    deleted: Any,
    clock: VersionClock,
    event_ms: int,
    stored: RowFormat | None = None,
) -> TableChanges:
    """Check a caller's arrays and make versions for them.

    ``stored``: the format of ``rows``, or to which these are converted. Raises BadRequest."""
    new = flat_keys("keys", keys)
    vectors, dim = _rows(rows, len(new), stored)
    gone = _EMPTY if deleted is None else flat_keys("deleted", deleted)
    if versions is None:
        stamps = clock.take(event_ms, len(new) + len(gone))
    else:
        stamps = _versions(versions, len(new), len(gone))
    narrow = None if stored is None or stored.is_plain else stored
    return TableChanges(new, vectors, stamps[: len(new)], gone, stamps[len(new) :], narrow, dim)


def _rows(values: Any, n: int, stored: RowFormat | None) -> tuple[VectorArray, int]:
    """Return the rows to send and the number of their values."""
    given = tensor("rows", values)
    if stored is None or stored.is_plain:
        vectors = _vectors(values, n)
        dtype = vectors.dtype if stored is None else stored.dtype
        return vectors.astype(dtype, copy=False), vectors.shape[1]
    if given.dtype == stored.dtype and given.ndim == 2 and len(given) == n:
        dim = stored.dim(given.shape[1])
        vectors = decode(given, stored, dim)
        _check_finite(vectors)
        return given, dim
    vectors = _vectors(values, n)
    table = EmbeddingTable.make("rows", vectors.shape[1], rows=stored.name)
    try:
        return to_rows(table, vectors), vectors.shape[1]
    except NotStorable as error:
        raise BadRequest(str(error)) from error


def _vectors(values: Any, n: int) -> VectorArray:
    rows = tensor("rows", values)
    if rows.ndim != 2 or len(rows) != n:
        raise BadRequest(f"rows must be ({n}, dim), as there are {n} keys, not {rows.shape}")
    if rows.dtype not in DTYPES:
        raise BadRequest(f"rows must be float32 or float16, not {rows.dtype}; convert them first")
    _check_finite(rows)
    return rows


def _check_finite(rows: VectorArray) -> None:
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        at = int(np.argmin(finite))
        raise BadRequest(
            f"rows[{at}] holds a value that is not finite, and so do {np.count_nonzero(~finite) - 1} more; "
            "readers would reject it: leave such rows out, and find the training step that made them"
        )


def _versions(values: Any, n: int, gone: int) -> VersionArray:
    versions = tensor("versions", values)
    if versions.shape != (n + gone,):
        raise BadRequest(
            f"versions must be ({n + gone},), of the {n} keys and then of the {gone} deleted ones, "
            f"not {versions.shape}"
        )
    if len(versions) and (
        versions.dtype.kind not in "iu" or (versions.dtype.kind == "i" and versions.min() < 0)
    ):
        raise BadRequest(
            "versions must be whole numbers from 0 to 2^64-1: Unix ms << 20 | sequence"
        )
    return versions.astype(np.uint64)


def split_by_partition(
    changes: TableChanges, groups: int, partitions: int
) -> Iterator[tuple[int, TableChanges]]:
    """Split ``changes`` by Kafka partition (`partition_of`), in order."""
    if partitions == 1 or groups == 1:
        yield 0, changes
        return
    up = partition_of(changes.keys, groups, partitions)
    down = partition_of(changes.deleted, groups, partitions)
    order, gone = np.argsort(up, kind="stable"), np.argsort(down, kind="stable")
    bounds = np.arange(min(groups, partitions) + 1)
    ends, gone_ends = np.searchsorted(up[order], bounds), np.searchsorted(down[gone], bounds)
    for number in range(len(bounds) - 1):
        some = order[ends[number] : ends[number + 1]]
        lost = gone[gone_ends[number] : gone_ends[number + 1]]
        if len(some) or len(lost):
            yield number, changes.select(some, lost)


def partition_of(keys: KeyArray, groups: int, partitions: int) -> IndexArray:
    """The Kafka partition (n,) of each of ``keys (n,)``: HPS's key group, mod the topic's partitions."""
    group = partition_hash(keys) % np.uint64(groups)
    return (group % np.uint64(partitions)).astype(np.int64)


def encode(
    form: Format,
    table: str,
    changes: TableChanges,
    attributes: MessageAttributes,
    *,
    key_bits: Literal[32, 64] = 64,
    full: int = FULL,
) -> list[bytes]:
    """Messages of at most ``full`` bytes.

    Raises BadRequest for fields that the format does not have, and for a row that does not fit a message."""
    try:
        if form == "native":
            return encode_native(table, changes, attributes, full=full)
        if len(changes.deleted):
            raise BadRequest("HPS's format has no deletions; send them in the native format")
        if attributes.ttl_s or attributes.step or attributes.dense_version:
            raise BadRequest(
                "HPS's format has no ttl_s, step and dense_version; leave them out, or use "
                "the native format"
            )
        return encode_hps(changes.keys, changes.vectors, key_bits=key_bits, full=full)
    except ValueError as error:
        raise BadRequest(f"table {table}: {error}") from None
