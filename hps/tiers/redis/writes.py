"""Writes of rows into Redis: per partition, in slices that take the server about a millisecond."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hps.tiers.base import newest_of_each
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.redis.client import RedisClient
from hps.tiers.redis.connection import RedisCommand, read_replies
from hps.tiers.redis.layout import WRITE_SLICE, TableLayout, WriteScriptArguments, entry_stamp
from hps.tiers.redis.maintenance import RedisMaintenance
from hps.tiers.redis.positions import position_field
from hps.tiers.redis.tables import RedisTable, RedisTables
from hps.types import (
    EmbeddingTable,
    IndexArray,
    KeyArray,
    VectorArray,
    VersionArray,
    oldest_tombstone,
)

# Rows per block: bounds the memory, and each block gets the whole timeout.
_BLOCK = 32_768

Only = Literal["resident", "absent"]
_FLAGS: dict[Only, bytes] = {"resident": b"r", "absent": b"a"}

Slice = tuple[int, KeyArray, NDArray[np.void]]
"""Partition, keys (n,) and records (n,)."""


class RedisWriter:
    """Writes rows and positions. Thread-safe. If it raises TierError, some rows may have been written."""

    def __init__(
        self, client: RedisClient, tables: RedisTables, maintenance: RedisMaintenance
    ) -> None:
        self._client = client
        self._tables = tables
        self._maintenance = maintenance

    def write(
        self,
        table: EmbeddingTable,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
        *,
        only: Only | None = None,
        allow_partial: bool = False,
    ) -> None:
        """Upsert the rows, or delete them if ``vectors`` is None, unless a stored version is newer.

        ``only``: write only to keys that are resident, or only to absent ones. ``allow_partial``: do not
        wait for unhealthy servers of a cluster; when the call raises, the healthy ones have their rows."""
        if not len(keys):
            return
        opened = self._tables.writable(table, self._client.deadline())
        at = _decisive(opened.layout, keys, versions)
        for start in range(0, len(at), _BLOCK):
            some = at[start : start + _BLOCK]
            slices = _slices(opened.layout, keys[some], vectors, versions, some)
            self._run(opened, slices, only=only, allow_partial=allow_partial)
        self._maintenance.run_if_due()

    def remove(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Remove rows and tombstones without a trace."""
        if not len(keys):
            return
        opened = self._tables.usable(table, self._client.deadline())
        layout, commands = opened.layout, []
        for share in layout.shares(keys):
            for start in range(0, len(share.at), WRITE_SLICE):
                some = keys[share.at[start : start + WRITE_SLICE]]
                for names in (layout.rows_keys, layout.stamps_keys):
                    request = layout.remove(names[share.partition], some)
                    commands.append(RedisCommand(opened.slots[share.partition], request))
        self._client.run(commands, read_replies, self._client.deadline())

    def apply(
        self,
        table: EmbeddingTable,
        changes: TableChanges,
        positions: Sequence[StreamPosition],
        share: float = 1.0,
    ) -> None:
        """See `RedisTier.apply`.

        A partition stores the positions together with its last rows, after all other rows are acknowledged.
        """
        opened = self._tables.writable(table, self._client.deadline())
        layout, inserted = opened.layout, len(changes.keys)
        keys = np.concatenate([changes.keys, changes.deleted])
        versions = np.concatenate([changes.versions, changes.deleted_versions])
        at = newest_of_each(table.narrow(keys), versions)
        at = np.arange(len(keys)) if at is None else at

        def sliced(some: IndexArray) -> Iterator[Slice]:
            rows, dead = some[some < inserted], some[some >= inserted]
            yield from _slices(layout, keys[rows], changes.vectors, versions, rows)
            if layout.values.versioned:
                yield from _slices(layout, keys[dead], None, versions, dead)
            else:
                self.remove(table, keys[dead])

        if share < 1:
            in_share = layout.in_share(keys[at], share)
            self._run_in_blocks(opened, list(sliced(at[~in_share])), only="resident")
            at = at[in_share]
        early, last = _split_last(layout, sliced(at))
        self._run_in_blocks(opened, early)
        self._run(opened, last, positions=positions)
        self._maintenance.run_if_due()

    def _run_in_blocks(
        self, opened: RedisTable, slices: Sequence[Slice], only: Only | None = None
    ) -> None:
        for start in range(0, len(slices), _BLOCK // WRITE_SLICE):
            self._run(opened, slices[start : start + _BLOCK // WRITE_SLICE], only=only)

    def _run(
        self,
        opened: RedisTable,
        slices: Iterable[Slice],
        *,
        only: Only | None = None,
        positions: Sequence[StreamPosition] = (),
        allow_partial: bool = False,
    ) -> None:
        head = self._head(opened, only, positions)
        commands = [
            RedisCommand(
                opened.slots[p], opened.layout.write(p, head, keys, records), (p, len(keys))
            )
            for p, keys, records in slices
        ]
        deadline = self._client.deadline()
        self._client.run(commands, read_replies, deadline, allow_partial=allow_partial)
        written: dict[int, int] = {}
        failed = None
        for command in commands:
            partition, rows = command.context
            if isinstance(command.reply, Exception):
                failed = command
                continue
            opened.entries[partition] = command.reply
            written[partition] = written.get(partition, 0) + rows
        for partition, rows in written.items():
            self._maintenance.evict_overflow(opened, partition, rows, deadline)
        if failed is not None:
            raise self._client.failure(failed)

    def _head(
        self, opened: RedisTable, only: Only | None, positions: Sequence[StreamPosition]
    ) -> WriteScriptArguments:
        flags = (b"v" if opened.layout.values.versioned else b"") + (_FLAGS[only] if only else b"")
        oldest_kept = oldest_tombstone(opened.layout.table, time.time()).to_bytes(8, "little")
        encoded = [
            (position_field(p.topic, p.partition), b"%d" % p.offset, b"%d" % p.continues_from)
            for p in positions
        ]
        return WriteScriptArguments(
            flags, oldest_kept, entry_stamp(self._maintenance.policy), encoded, opened.floors
        )


def _decisive(layout: TableLayout, keys: KeyArray, versions: VersionArray) -> IndexArray:
    """Return the positions of the writes that take effect: one per key."""
    # Without stored versions, the last write of a key wins, whatever its version.
    ranks = versions if layout.values.versioned else np.zeros(len(keys), np.uint64)
    at = newest_of_each(layout.table.narrow(keys), ranks)
    return np.arange(len(keys)) if at is None else at


def _split_last(
    layout: TableLayout, slices: Iterable[Slice]
) -> tuple[list[Slice], Iterable[Slice]]:
    """Split the last slice of each partition from the others; it is empty for partitions without any."""
    early: list[Slice] = []
    last: dict[int, Slice] = {
        i: (i, np.empty(0, np.int64), np.empty(0, layout.values.record))
        for i in range(layout.partitions)
    }
    for each in slices:
        if len(last[each[0]][1]):
            early.append(last[each[0]])
        last[each[0]] = each
    return early, last.values()


def _slices(
    layout: TableLayout,
    keys: KeyArray,
    vectors: VectorArray | None,
    versions: VersionArray,
    at: IndexArray,
) -> Iterator[Slice]:
    """Yield slices by partition. ``at (n,)``: positions in ``vectors`` and ``versions`` of ``keys (n,)``."""
    for share in layout.shares(keys):
        for start in range(0, len(share.at), WRITE_SLICE):
            some = share.at[start : start + WRITE_SLICE]
            if vectors is None:
                records = layout.values.tombstones(versions[at[some]])
            else:
                records = layout.values.records(vectors[at[some]], versions[at[some]])
            yield share.partition, keys[some], records
