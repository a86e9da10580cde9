"""RedisTier: rows that all nodes share, in a Redis or Valkey server, Sentinel service or cluster.

Reads are HMGETs of packed keys, all sent before the first reply is read, and decoded straight into the
caller's array. Writes are scripts that apply the version rule on the server, so several nodes may write.
A write of several thousand rows is split; each slice is atomic.

By the contract it is a cache: it may overflow, rows may expire, and a restart or a failover may lose
some. It is placed among the stores, because it waits for a network.

Thread-safe. Connects at the first use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from hps.config.store_settings import RedisSettings
from hps.errors import TierError, Unavailable
from hps.threads import BoundedThreadPool
from hps.tiers.base import FetchContext, Part, TableName, TierInfo
from hps.tiers.checks import check_keys, check_part, check_rows
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.redis.client import RedisClient
from hps.tiers.redis.connection import NAME, RedisCommand, read_replies
from hps.tiers.redis.layout import SCRIPTS, WRITE_SLICE, entry_stamp
from hps.tiers.redis.load import RedisLoads, RedisLoadSource
from hps.tiers.redis.maintenance import CountRemoved, RedisMaintenance
from hps.tiers.redis.positions import RedisStreamPositions
from hps.tiers.redis.rows import CommandKeys, PartRead, receive_rows
from hps.tiers.redis.tables import RedisTable, RedisTables, RedisTableUsage
from hps.tiers.redis.writes import Only, RedisWriter
from hps.tiers.row_values import Layout, StoredRows, WrongLength
from hps.types import (
    EmbeddingTable,
    IndexArray,
    KeyArray,
    Source,
    VectorArray,
    VersionArray,
    oldest_tombstone,
)

# The most fetches whose use of rows waits to be recorded; the use by further fetches is not recorded.
_TOUCHES = 256


class RedisTier:
    """Rows in Redis, as a `Tier` and an `hps.tiers.positions.PositionedStore`.

    ``layout: hps`` reads and writes HPS's own layout: no versions, no tombstones, last write wins.
    ``on_removed`` receives the number of expired entries, tombstones too, that were removed from a table.
    The constructor only raises ConfigError, for unreadable certificates and secrets; it does not connect."""

    info = TierInfo(NAME, Source.REDIS, blocking=True, shared=True, cache=True)

    def __init__(
        self, settings: RedisSettings, on_removed: CountRemoved = lambda _table, _entries: None
    ) -> None:
        self._client = RedisClient(settings, SCRIPTS)
        self._tables = RedisTables(self._client, settings)
        self._loads = RedisLoads(self.insert, self._client)
        self._maintenance = RedisMaintenance(
            self._client, self._tables, settings, self._loads.check_losses, on_removed
        )
        self._writes = RedisWriter(self._client, self._tables, self._maintenance)
        positions = RedisStreamPositions(self._client, self._tables)
        self.applied, self.identify = positions.applied, positions.identify
        self.restart, self.positions = positions.restart, positions.positions
        self._touches = BoundedThreadPool(1, _TOUCHES, name=f"{NAME}-touch")
        self.layout: Layout = settings.layout

    # -- reading ----------------------------------------------------------------------------------

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        """See `Tier`. Keys of refused tables, and keys on an unhealthy server of a cluster, stay missing.

        ``ctx.degraded`` then names the tier, and also if rows are missing from a table that lost some."""
        for part in parts:
            check_part(part)
        wanted = [part for part in parts if len(part.missing)]
        deadline = min(self._client.deadline(), ctx.deadline or math.inf)
        opened = self._tables.ready((part.table for part in wanted), deadline)
        reads: list[tuple[PartRead, RedisTable]] = []
        commands: list[RedisCommand] = []
        now = time.time()
        for part, table in zip(wanted, opened, strict=True):
            if table.refused or not table.checked_at:
                _degrade(ctx)
                continue
            oldest = self._maintenance.oldest_row(part.table), oldest_tombstone(part.table, now)
            read = PartRead(part, table.layout, *oldest)
            reads.append((read, table))
            commands += _commands(read, table)
        if commands:
            self._client.run(commands, receive_rows, deadline, allow_partial=True)
        for command in commands:
            if isinstance(command.reply, Exception):
                command.context.mark_missing()
                _degrade(ctx)
        for read, table in reads:
            if read.wrong_length:
                _degrade(ctx)
            positions = read.part.missing
            read.finish()
            if len(read.part.missing) and self._loads.may_have_lost(
                table, sure=self._maintenance.is_current
            ):
                _degrade(ctx)
            self._note_use(table, read.part, positions)
        self._maintenance.run_if_due()

    def _note_use(self, table: RedisTable, part: Part, positions: IndexArray) -> None:
        stamp = entry_stamp(self._maintenance.policy)
        if not stamp:
            return
        keys = part.keys[positions[part.source[positions] != 0]]
        with suppress(Unavailable):
            self._touches.submit(lambda: self._touch(table, keys, stamp))

    def _touch(self, table: RedisTable, keys: KeyArray, stamp: bytes) -> None:
        commands = [
            RedisCommand(
                table.slots[share.partition],
                table.layout.touch(share.partition, stamp, keys[share.at[i : i + WRITE_SLICE]]),
            )
            for share in table.layout.shares(keys)
            for i in range(0, len(share.at), WRITE_SLICE)
        ]
        if commands:
            self._client.run(commands, read_replies, self._client.deadline())

    # -- writing ----------------------------------------------------------------------------------

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        check_rows(table, keys, vectors, versions)
        self._writes.write(table, keys, vectors, versions)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        check_rows(table, keys, vectors, versions)
        self._writes.write(table, keys, vectors, versions, only="resident")

    def promote(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        """Insert rows that a lower tier had, except expired ones.

        In the ``hps`` layout, rows whose key exists are skipped too: the existing row may be newer, and
        has no version to compare."""
        check_rows(table, keys, vectors, versions)
        at = np.flatnonzero(versions >= self._maintenance.oldest_row(table))
        only: Only | None = "absent" if self.layout == "hps" else None
        self._writes.write(
            table, keys[at], vectors[at], versions[at], only=only, allow_partial=True
        )

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        """Delete; in the ``hps`` layout without a tombstone."""
        check_keys(table, keys, versions)
        if self.layout == "hps":
            self._writes.remove(table, keys)
        else:
            self._writes.write(table, keys, None, versions)

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Remove rows and tombstones without a trace."""
        check_keys(table, keys)
        self._writes.remove(table, keys)

    def apply(
        self,
        table: EmbeddingTable,
        changes: TableChanges,
        positions: Sequence[StreamPosition],
        *,
        share: float = 1.0,
    ) -> None:
        """See `hps.tiers.positions.PositionedStore`.

        Keys outside the ``share``, which `preload` leaves out too, are changed only if they exist."""
        check_rows(table, changes.keys, changes.vectors, changes.versions)
        check_keys(table, changes.deleted, changes.deleted_versions)
        self._writes.apply(table, changes, positions, share)

    def versions(self, table: EmbeddingTable, keys: KeyArray, at_least: int = 0) -> VersionArray:
        """See `hps.tiers.positions.PositionedStore`. Reads every key, since other processes write too."""
        deadline = self._client.deadline()
        opened, part = self._tables.usable(table, deadline), Part.make(table, keys)
        read = PartRead(part, opened.layout, 0, oldest_tombstone(table, time.time()))
        if len(keys):
            self._client.run(list(_commands(read, opened)), receive_rows, deadline)
        return part.versions

    def preload(
        self,
        table: EmbeddingTable,
        source: RedisLoadSource,
        progress: Callable[[int], None] = lambda _rows: None,
    ) -> int:
        """Insert a share of a table's rows, or continue a killed call; see `RedisLoads.load`.

        If Redis later loses rows of a complete load, fetches that miss rows are degraded, and the rows are
        loaded again if the source can be read again."""
        opened = self._tables.usable(table, self._client.deadline())
        return self._loads.load(opened, source, progress)

    # -- tables -----------------------------------------------------------------------------------

    def check(self, table: EmbeddingTable) -> None:
        """Raise TierError if the stored rows do not fit the table, or the server does not respond.

        Compares layout, partitions, dim and dtype."""
        self._tables.usable(table, self._client.deadline())

    def rows(self, table: EmbeddingTable) -> int:
        """Return the entries at the last count, with tombstones.

        Never waits: the count is refreshed in the background."""
        self._maintenance.run_if_due()
        return self._tables.entries(table)

    def usage(self, table: EmbeddingTable) -> RedisTableUsage:
        """Count entries and bytes now."""
        return self._tables.usage(table)

    def find_tables(self, model: str | None = None) -> list[TableName]:
        """Return the tables of this layout in Redis, of one model or of all."""
        return self._tables.names(model)

    def erase(self, model: str, version: int | None = None, table: str | None = None) -> int:
        """Remove a model, or one version or table of it; return the number of Redis keys removed.

        In the ``hps`` layout a model has no versions."""
        return self._tables.erase(model, version, table)

    def scan(
        self, table: EmbeddingTable, count: int = 1000
    ) -> Iterator[tuple[KeyArray, VectorArray, VersionArray]]:
        """Yield all rows, unordered, about ``count`` at a time: keys (n,), vectors (n, dim), versions (n,).

        Without tombstones. A row that exists during the whole scan is yielded at least once, maybe more
        often."""
        oldest = self._maintenance.oldest_row(table)
        for keys, stored in self._entries(table, count):
            fresh = np.flatnonzero(stored.versions >= oldest)
            if len(fresh):
                yield keys[stored.at[fresh]], stored.vectors[fresh], stored.versions[fresh]

    def tombstones(
        self, table: EmbeddingTable, count: int = 1000
    ) -> Iterator[tuple[KeyArray, VersionArray]]:
        """Yield the unexpired tombstones like `scan`: keys (n,), versions (n,)."""
        oldest = oldest_tombstone(table, time.time())
        for keys, stored in self._entries(table, count):
            live = np.flatnonzero(stored.tombstone_versions >= oldest)
            if len(live):
                yield keys[stored.tombstone_at[live]], stored.tombstone_versions[live]

    def _entries(self, table: EmbeddingTable, count: int) -> Iterator[tuple[KeyArray, StoredRows]]:
        layout = self._tables.usable(table, self._client.deadline()).layout
        for name in layout.rows_keys:
            cursor = None
            while cursor != b"0":
                cursor, flat = self._client.call(
                    name, "HSCAN", name, cursor or b"0", "COUNT", count
                )
                try:
                    yield layout.keys(flat[::2]), layout.values.decode(flat[1::2])
                except WrongLength as error:
                    raise TierError(
                        NAME,
                        f"table {table.id}: a row in {name.decode()} has {error.actual} bytes, expected "
                        f"{error.expected}; it was written with another dim, dtype or layout",
                    ) from None

    def get(self, table: EmbeddingTable, keys: KeyArray) -> Part:
        """Fetch rows of one table; ``source`` is 0 for keys without one."""
        part = Part.make(table, keys)
        self.fetch([part], FetchContext())
        return part

    def expire(self, table: EmbeddingTable) -> int:
        """Remove all expired rows and tombstones now, and return their number."""
        return self._maintenance.expire(self._tables.usable(table, self._client.deadline()))

    def close(self) -> None:
        """Close the connections and stop the background threads. Idempotent."""
        self._touches.close(1.0)
        self._loads.close()
        self._maintenance.close()
        self._client.close()


def _degrade(ctx: FetchContext) -> None:
    if NAME not in ctx.degraded:
        ctx.degraded.append(NAME)


def _commands(read: PartRead, table: RedisTable) -> Iterator[RedisCommand]:
    """Yield the part's missing keys as one HMGET per partition and slice."""
    missing = read.part.missing
    for partition, at, request in table.layout.reads(read.part.keys[missing]):
        yield RedisCommand(table.slots[partition], request, CommandKeys(read, missing[at]))
