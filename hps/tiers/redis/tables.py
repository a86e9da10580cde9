"""Tables in a Redis: checks against this configuration, sizes, names, erasure.

Each table has a small hash of metadata: layout, partitions, dim, dtype. The table's first writer writes
it and all users compare it; reading writes nothing. A table filled by HPS has no metadata yet; a few of
its rows are checked instead. A table that does not fit is rejected with both values, and checked again
every few seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hps.config.store_settings import RedisSettings
from hps.errors import TierMisfit
from hps.native import partition_hash
from hps.tiers.base import TableName
from hps.tiers.redis.client import RedisClient
from hps.tiers.redis.connection import NAME, RedisCommand, read_replies
from hps.tiers.redis.layout import (
    DESCRIBE_SCRIPT,
    TableLayout,
    packed_script,
    parse_key,
    scan_pattern,
)
from hps.types import EmbeddingTable, KeyArray

log = logging.getLogger(__name__)

_RECHECK_S = 5.0
_SAMPLE_ROWS = 8  # rows checked per partition, if there is no metadata
_SCANNED = 1000
_FIRST_FIELD = "layout"
_FLOORS = "floors"
_MOST_FLOORS = 1 << 20  # 8 MiB per partition


@dataclass(slots=True, eq=False)
class RedisTable:
    """A table in use.

    ``slots``, ``entries``: the cluster's slot and the entries at the last count, with tombstones, of each
    partition. ``refused``: the reason why its rows do not fit the table; None if they do. ``recorded``: its
    metadata existed at the last check. ``floors``: versions of evicted rows are kept. ``lost``: loaded rows
    are missing."""

    layout: TableLayout
    slots: list[int]
    metadata_slot: int
    entries: list[int]
    refused: str | None = None
    recorded: bool = False
    floors: bool = False
    lost: bool = False
    checked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class RedisTableUsage:
    """``entries`` of a table, with tombstones, and Redis's estimate of their ``bytes``."""

    entries: int
    bytes: int


class RedisTables:
    """Checks, counts, lists and erases tables.

    Thread-safe. Every method except `entries` may wait for a server."""

    def __init__(self, client: RedisClient, settings: RedisSettings) -> None:
        self._client = client
        self._layout = settings.layout
        self._partitions = settings.partitions
        self._floors = min(settings.overflow_margin or 0, _MOST_FLOORS)
        self._open: dict[EmbeddingTable, RedisTable] = {}
        self._lock = threading.Lock()

    def opened(self) -> list[RedisTable]:
        return list(self._open.values())

    def ready(self, tables: Iterable[EmbeddingTable], deadline: float) -> list[RedisTable]:
        """Return the tables, checked before their first use.

        Some may be refused. Some may be unchecked (``checked_at`` is 0), because the server with their
        metadata is unhealthy."""
        wanted = [self._table(table) for table in tables]
        now = time.monotonic()
        due = [
            each
            for each in dict.fromkeys(wanted)
            if not each.checked_at or (each.refused and now > each.checked_at + _RECHECK_S)
        ]
        if due:
            self.check_tables(due, deadline)
        return wanted

    def usable(self, table: EmbeddingTable, deadline: float) -> RedisTable:
        """Return the table, checked. Raises TierMisfit if it is refused."""
        (opened,) = self.ready([table], deadline)
        if not opened.checked_at:
            key = opened.layout.metadata_key
            self._client.call(key, "EXISTS", key)  # raises the reason
            self.check_tables([opened], deadline)
        if opened.refused:
            raise TierMisfit(NAME, opened.refused)
        return opened

    def entries(self, table: EmbeddingTable) -> int:
        """Return the number of entries at the last count."""
        return sum(self._table(table).entries)

    def _table(self, table: EmbeddingTable) -> RedisTable:
        opened = self._open.get(table)
        if opened is None:
            layout = TableLayout(table, self._layout, self._partitions)
            slots = [self._client.slot(key) for key in layout.rows_keys]
            metadata_slot = self._client.slot(layout.metadata_key)
            opened = RedisTable(layout, slots, metadata_slot, [0] * self._partitions)
            with self._lock:
                opened = self._open.setdefault(table, opened)
        return opened

    def check_tables(self, tables: Sequence[RedisTable], deadline: float) -> None:
        """Compare the tables' metadata, or some of their rows if there is no metadata; count their entries.

        Tables on an unhealthy server of a cluster stay unchanged."""
        uncertain = [not t.checked_at or t.refused or not any(t.entries) for t in tables]
        calls = [(t.layout.metadata_key, ("HGETALL", t.layout.metadata_key)) for t in tables]
        replies = self._client.call_all(calls, deadline=deadline, allow_partial=True)
        self.count(tables, deadline, allow_partial=True)
        for table, reply, check_rows in zip(tables, replies, uncertain, strict=True):
            if isinstance(reply, Exception):
                continue
            metadata = _pairs(reply)
            table.recorded = _FIRST_FIELD in metadata
            table.floors = _FLOORS in metadata
            if table.recorded:
                _set_refusal(table, _mismatch(table, metadata))
            elif check_rows:
                _set_refusal(table, self._refused_rows(table, deadline))
            table.checked_at = time.monotonic()

    def writable(self, table: EmbeddingTable, deadline: float) -> RedisTable:
        """Return the table like `usable`, with its metadata recorded; call it before writing rows."""
        opened = self.usable(table, deadline)
        if not opened.recorded:
            metadata = [text.encode() for pair in opened.layout.metadata.items() for text in pair]
            request = packed_script(DESCRIBE_SCRIPT, [opened.layout.metadata_key], metadata)
            command = RedisCommand(opened.metadata_slot, request)
            self._client.run([command], read_replies, deadline)
            opened.recorded = True
            _set_refusal(opened, _mismatch(opened, _pairs(command.reply)))
            if opened.refused:  # another process recorded its metadata first
                raise TierMisfit(NAME, opened.refused)
        if self._floors and not opened.floors and opened.layout.values.versioned:
            self._keep_floors(opened, deadline)
        return opened

    def _keep_floors(self, table: RedisTable, deadline: float) -> None:
        """Create the floors of all partitions; existing ones stay. Call it before anything is evicted.

        They must all exist: while a cluster moves a slot, it rejects a script if only some of its keys
        exist."""
        last = str(8 * self._floors + 8)
        calls = [(key, ("SETRANGE", key, last, b"\0")) for key in table.layout.floors_keys]
        metadata = table.layout.metadata_key
        self._client.call_all(calls, deadline=deadline)
        self._client.call(metadata, "HSET", metadata, _FLOORS, self._floors, deadline=deadline)
        table.floors = True

    def count(
        self, tables: Sequence[RedisTable], deadline: float, *, allow_partial: bool = False
    ) -> None:
        """Update ``entries`` of the tables; ``allow_partial``: only those on healthy servers."""
        partitions = [(table, i) for table in tables for i in range(table.layout.partitions)]
        calls = [(t.layout.rows_keys[i], ("HLEN", t.layout.rows_keys[i])) for t, i in partitions]
        counts = self._client.call_all(calls, deadline=deadline, allow_partial=allow_partial)
        for (table, i), count in zip(partitions, counts, strict=True):
            if not isinstance(count, Exception):
                table.entries[i] = int(count)

    # -- tables without metadata ----------------------------------------------------------------------

    def _refused_rows(self, table: RedisTable, deadline: float) -> str | None:
        """Return why some sampled rows do not fit the table; None if they do."""
        layout = table.layout
        calls: list[tuple[bytes, tuple[Any, ...]]] = [
            (k, ("HSCAN", k, "0", "COUNT", _SAMPLE_ROWS)) for k in layout.rows_keys
        ]
        beyond = TableLayout(layout.table, layout.layout, 2 * layout.partitions)
        calls += [(k, ("EXISTS", k)) for k in beyond.rows_keys[layout.partitions :]]
        replies = self._client.call_all(calls, deadline=deadline)
        keys, partitions, lengths = [], [], set()
        for partition, (_, fields) in enumerate(replies[: layout.partitions]):
            some = fields[: 2 * _SAMPLE_ROWS : 2]
            if {len(name) for name in some} - {layout.key_bytes}:
                wrong = next(len(name) for name in some if len(name) != layout.key_bytes)
                return _refusal(table, "bytes per key", wrong, layout.key_bytes)
            keys += layout.keys(some).tolist()
            partitions += [partition] * len(some)
            lengths |= {len(value) for value in fields[1 : 2 * _SAMPLE_ROWS : 2]}
        for at in np.flatnonzero(replies[layout.partitions :]).tolist():
            keys, partitions = [*keys, 0], [*partitions, layout.partitions + at]
        lengths -= {layout.values.value_bytes} | ({9} if layout.values.versioned else set())
        if lengths:
            return _refusal(table, "bytes per value", min(lengths), layout.values.value_bytes)
        return _partition_mismatch(table, np.array(keys, np.int64), np.array(partitions))

    # -- all tables -------------------------------------------------------------------------------

    def names(self, model: str | None = None) -> list[TableName]:
        """Return the existing tables of this layout, of one model or of all, by SCAN."""
        parsed = (parse_key(self._layout, key) for key in self.keys(model))
        tables = {each.table for each in parsed if each}
        return sorted(tables, key=lambda each: (each.model, each.version, each.name))

    def keys(self, model: str | None = None) -> Iterator[bytes]:
        """Yield the Redis keys of these tables; some keys may repeat."""
        for slot in self._client.primaries():
            cursor = "0"
            while True:
                options = "MATCH", scan_pattern(self._layout, model), "COUNT", _SCANNED
                reply = self._client.call_slot(slot, "SCAN", cursor, *options)
                cursor = reply[0].decode()
                yield from reply[1]
                if cursor == "0":
                    break

    def erase(self, model: str, version: int | None = None, name: str | None = None) -> int:
        """Unlink a model, or one version or table of it, whatever its number of partitions.

        Returns the number of Redis keys. The server frees the memory in the background."""
        chosen = [
            key
            for key in dict.fromkeys(self.keys(model))
            if (parsed := parse_key(self._layout, key))
            and (version is None or parsed.table.version == version)
            and (name is None or parsed.table.name == name)
        ]
        unlinked = self._client.call_all([(key, ("UNLINK", key)) for key in chosen])
        for table in self.opened():
            known = table.layout.table
            if known.model == model and name in (None, known.name):
                table.checked_at, table.refused = 0.0, None
                table.recorded = table.floors = False
                table.entries = [0] * len(table.entries)
        return sum(unlinked)

    def usage(self, table: EmbeddingTable) -> RedisTableUsage:
        """Count the entries and bytes now."""
        opened = self._table(table)
        deadline = self._client.deadline()
        self.count([opened], deadline)
        layout = opened.layout
        names = layout.rows_keys + layout.stamps_keys + layout.positions_keys + layout.floors_keys
        calls = [(key, ("MEMORY", "USAGE", key, "SAMPLES", "50")) for key in names]
        sizes = self._client.call_all(calls, deadline=deadline)
        return RedisTableUsage(sum(opened.entries), sum(size or 0 for size in sizes))


def _pairs(reply: Sequence[bytes]) -> dict[str, str]:
    text = [each.decode("utf-8", "replace") for each in reply]
    return dict(zip(text[::2], text[1::2], strict=True))


def _set_refusal(table: RedisTable, reason: str | None) -> None:
    if reason and reason != table.refused:
        log.error("%s", reason)
    table.refused = reason


def _mismatch(table: RedisTable, metadata: dict[str, str]) -> str | None:
    for name, expected in table.layout.metadata.items():
        if metadata.get(name, expected) != expected:
            return _refusal(table, name, metadata[name], expected)
    return None


def _refusal(table: RedisTable, what: str, stored: Any, expected: Any) -> str:
    layout = table.layout
    remedy = (
        "set tiers.redis.partitions to that" if what == "partitions" else "serve another version"
    )
    if layout.layout == "hps" and what != "partitions":
        remedy = "erase the table in Redis, or use another Redis"
    return (
        f"table {layout.table.id}: {what} in Redis: {stored}, here: {expected} "
        f"({layout.metadata_key.decode()}); {remedy}"
    )


def _partition_mismatch(table: RedisTable, keys: KeyArray, partitions: Any) -> str | None:
    """Return why ``partitions (n,)``, where ``keys (n,)`` were found, do not fit; None if they do.

    A partition number beyond the table's is a mismatch by itself."""
    count = table.layout.partitions
    beyond = partitions >= count
    known, at = partition_hash(keys[~beyond]), partitions[~beyond]
    if not beyond.any() and (known % np.uint64(count) == at).all():
        return None
    least = int(partitions.max()) + 1
    fits = (n for n in range(least, 4097) if n != count and (known % np.uint64(n) == at).all())
    return _refusal(table, "partitions", next(fits, "another number"), count)
