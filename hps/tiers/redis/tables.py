"""Tables in a Redis: checks against this configuration, sizes, names, erasure.

Each table has a small hash of facts: layout, partitions, dim, dtype. The table's first writer writes it and
all users compare it; reading writes nothing. A table filled by HPS has no facts yet; a few of its rows are
checked instead. A table that does not fit is rejected with both values, and checked again every few
seconds."""

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
    DESCRIBE,
    TableLayout,
    packed_script,
    parse_key,
    scan_pattern,
)
from hps.types import EmbeddingTable, KeyArray

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 5.0
_SAMPLE_ROWS = 8  # rows checked per partition, if there are no facts
_SCANNED = 1000
_FIRST_FACT = "layout"
_FLOORS = "floors"
_MOST_FLOORS = 1 << 20  # 8 MiB per partition


class RedisTable:
    """A table in use.

    ``refused``: the reason why its rows do not fit the table; None if they do. ``recorded``: its facts
    existed at the last check. ``floors``: versions of evicted rows are kept. ``lost``: loaded rows are
    missing."""

    __slots__ = (
        "checked_at", "entries", "facts_slot", "floors", "layout", "lost", "recorded", "refused", "slots",
    )  # fmt: skip

    def __init__(self, layout: TableLayout, client: RedisClient) -> None:
        self.layout = layout
        self.slots = [client.slot(key) for key in layout.rows_keys]
        self.facts_slot = client.slot(layout.facts_key)
        self.entries: list[int] = [0] * layout.partitions
        """Entries per partition at the last count, with tombstones."""
        self.refused: str | None = None
        self.recorded = False
        self.floors = False
        self.lost = False
        self.checked_at = 0.0


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
        facts is unhealthy."""
        wanted = [self._table(table) for table in tables]
        now = time.monotonic()
        new = [
            each
            for each in dict.fromkeys(wanted)
            if not each.checked_at or (each.refused and now > each.checked_at + _LOOK_AGAIN_S)
        ]
        if new:
            self.check_tables(new, deadline)
        return wanted

    def usable(self, table: EmbeddingTable, deadline: float) -> RedisTable:
        """Return the table, checked. Raises TierMisfit if it is refused."""
        (found,) = self.ready([table], deadline)
        if not found.checked_at:
            self._client.call(
                found.layout.facts_key, "EXISTS", found.layout.facts_key
            )  # raises the reason
            self.check_tables([found], deadline)
        if found.refused:
            raise TierMisfit(NAME, found.refused)
        return found

    def entries(self, table: EmbeddingTable) -> int:
        """Return the number of entries at the last count."""
        return sum(self._table(table).entries)

    def _table(self, table: EmbeddingTable) -> RedisTable:
        found = self._open.get(table)
        if found is None:
            layout = TableLayout(table, self._layout, self._partitions)
            with self._lock:
                found = self._open.setdefault(table, RedisTable(layout, self._client))
        return found

    def check_tables(self, tables: Sequence[RedisTable], deadline: float) -> None:
        """Compare the tables' facts, or some of their rows if there are no facts; count their entries.

        Tables on an unhealthy server of a cluster stay unchanged."""
        unsure = [not t.checked_at or t.refused or not any(t.entries) for t in tables]
        calls = [(t.layout.facts_key, ("HGETALL", t.layout.facts_key)) for t in tables]
        found = self._client.call_all(calls, deadline=deadline, partly=True)
        self.count(tables, deadline, partly=True)
        for table, reply, look in zip(tables, found, unsure, strict=True):
            if isinstance(reply, Exception):
                continue
            facts = _pairs(reply)
            table.recorded = _FIRST_FACT in facts
            table.floors = _FLOORS in facts
            if table.recorded:
                _judge(table, _mismatch(table, facts))
            elif look:
                _judge(table, self._refused_rows(table, deadline))
            table.checked_at = time.monotonic()

    def writable(self, table: EmbeddingTable, deadline: float) -> RedisTable:
        """Return the table like `usable`, with its facts recorded; call it before writing rows."""
        found = self.usable(table, deadline)
        if not found.recorded:
            facts = [part.encode() for pair in found.layout.facts.items() for part in pair]
            request = packed_script(DESCRIBE, [found.layout.facts_key], facts)
            command = RedisCommand(found.facts_slot, request)
            self._client.run([command], read_replies, deadline)
            found.recorded = True
            _judge(found, _mismatch(found, _pairs(command.reply)))
            if found.refused:  # another process recorded its facts first
                raise TierMisfit(NAME, found.refused)
        if self._floors and not found.floors and found.layout.values.versioned:
            self._keep_floors(found, deadline)
        return found

    def _keep_floors(self, table: RedisTable, deadline: float) -> None:
        """Create the floors of all partitions; existing ones stay. Call it before anything is evicted.

        They must all exist: while a cluster moves a slot, it rejects a script if only some of its keys
        exist."""
        last = str(8 * self._floors + 8)
        calls = [(key, ("SETRANGE", key, last, b"\0")) for key in table.layout.floors_keys]
        facts = table.layout.facts_key
        self._client.call_all(calls, deadline=deadline)
        self._client.call(facts, "HSET", facts, _FLOORS, self._floors, deadline=deadline)
        table.floors = True

    def count(self, tables: Sequence[RedisTable], deadline: float, *, partly: bool = False) -> None:
        """Update ``entries`` of the tables; ``partly``: only those on healthy servers."""
        places = [(table, i) for table in tables for i in range(table.layout.partitions)]
        calls = [(t.layout.rows_keys[i], ("HLEN", t.layout.rows_keys[i])) for t, i in places]
        counts = self._client.call_all(calls, deadline=deadline, partly=partly)
        for (table, i), count in zip(places, counts, strict=True):
            if not isinstance(count, Exception):
                table.entries[i] = int(count)

    # -- tables without facts ----------------------------------------------------------------------

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
                found = next(len(name) for name in some if len(name) != layout.key_bytes)
                return _refusal(table, "bytes per key", found, layout.key_bytes)
            keys += layout.keys(some).tolist()
            partitions += [partition] * len(some)
            lengths |= {len(value) for value in fields[1 : 2 * _SAMPLE_ROWS : 2]}
        for at in np.flatnonzero(replies[layout.partitions :]).tolist():
            keys, partitions = [*keys, 0], [*partitions, layout.partitions + at]
        wrong = lengths - {layout.values.value_bytes} - ({9} if layout.values.versioned else set())
        if wrong:
            return _refusal(table, "bytes per value", min(wrong), layout.values.value_bytes)
        return _partition_mismatch(table, np.array(keys, np.int64), np.array(partitions))

    # -- all tables -------------------------------------------------------------------------------

    def names(self, model: str | None = None) -> list[TableName]:
        """Return the existing tables of this layout, of one model or of all, by SCAN."""
        found = {
            parsed.table for key in self.keys(model) if (parsed := parse_key(self._layout, key))
        }
        return sorted(found, key=lambda each: (each.model, each.version, each.name))

    def keys(self, model: str | None = None) -> Iterator[bytes]:
        """Yield the Redis keys of these tables; some keys may repeat."""
        for slot in self._client.primaries():
            cursor = "0"
            while True:
                reply = self._client.call_slot(
                    slot,
                    "SCAN",
                    cursor,
                    "MATCH",
                    scan_pattern(self._layout, model),
                    "COUNT",
                    _SCANNED,
                )
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
            and (version is None or parsed.table.version == version or self._layout == "hps")
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
        names = [
            *layout.rows_keys,
            *layout.stamps_keys,
            *layout.positions_keys,
            *layout.floors_keys,
        ]
        calls = [(key, ("MEMORY", "USAGE", key, "SAMPLES", "50")) for key in names]
        sizes = self._client.call_all(calls, deadline=deadline)
        return RedisTableUsage(sum(opened.entries), sum(size or 0 for size in sizes))


def _pairs(reply: Sequence[bytes]) -> dict[str, str]:
    text = [each.decode("utf-8", "replace") for each in reply]
    return dict(zip(text[::2], text[1::2], strict=True))


def _judge(table: RedisTable, reason: str | None) -> None:
    if reason and reason != table.refused:
        log.error("%s", reason)
    table.refused = reason


def _mismatch(table: RedisTable, facts: dict[str, str]) -> str | None:
    for name, expected in table.layout.facts.items():
        if facts.get(name, expected) != expected:
            return _refusal(table, name, facts[name], expected)
    return None


def _refusal(table: RedisTable, what: str, found: Any, expected: Any) -> str:
    layout = table.layout
    remedy = (
        "set tiers.redis.partitions to that" if what == "partitions" else "serve another version"
    )
    if layout.layout == "hps" and what != "partitions":
        remedy = "erase the table in Redis, or use another Redis"
    return (
        f"table {layout.table.id}: {what} in Redis: {found}, here: {expected} "
        f"({layout.facts_key.decode()}); {remedy}"
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
