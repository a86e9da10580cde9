"""Maintenance of Redis: removes entries beyond the limit, expired rows and tombstones.

Each step scans a bounded number of entries, so that it never blocks the server for long.

Writes that add entries also evict the entries beyond the limit: at least as many as they add. To find the
least used ones, a sample of stamps is taken; entries with stamps up to a quantile of the sample are evicted
in the order of the hash, and the use counts of the others are halved. (Redis and HPS itself sort all stamps
of a partition instead.) The versions of evicted rows are kept, per bucket of keys, so that no older row
can take their place.

Rows beyond their time to live are not served, and expired tombstones do not count. One of the nodes that
share the Redis removes both in the background, in passes over the whole table; so do steps that evict."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hps.config.store_settings import RedisSettings
from hps.errors import TierError
from hps.periodic import PeriodicThread
from hps.tiers.redis.client import RedisClient
from hps.tiers.redis.connection import NAME, RedisCommand, read_replies
from hps.tiers.redis.layout import (
    SAMPLE_SCRIPT,
    SWEEP_SCRIPT,
    Policy,
    packed_script,
    stamp_value,
)
from hps.tiers.redis.tables import RedisTable, RedisTables
from hps.types import EmbeddingTable, make_version, oldest_tombstone

log = logging.getLogger(__name__)

_STEP = 500  # entries scanned per call: about a millisecond of the server's time
_SAMPLE = 1000
_EVERY_S, _AFTER_LOSS_S = 10.0, 0.5
_LONGEST_PASS_S = 3600.0
_KINDS: dict[Policy, bytes] = {"random": b"", "least_used": b"n", "oldest": b"t"}

CountRemoved = Callable[[EmbeddingTable, int], None]
"""``count(table, entries)`` counts expired entries that were removed."""


@dataclass(slots=True)
class _PartitionSweep:
    """Progress of the sweep over one partition.

    ``highest``: entries with stamps up to this one are evicted; None if not known yet. ``due``: steps due
    in the background pass, including fractions."""

    cursor: bytes = b"0"
    due: float = 0.0
    highest: int | None = None
    resolving: bool = False


class RedisMaintenance:
    """Evicts and expires entries, and calls ``also`` in the background.

    The background work runs regularly, and soon after a server was lost. ``on_removed`` receives the number
    of expired entries, tombstones too, that were removed from a table. Thread-safe; parallel sweeps are
    harmless."""

    def __init__(
        self,
        client: RedisClient,
        tables: RedisTables,
        settings: RedisSettings,
        also: Callable[[], None] = lambda: None,
        on_removed: CountRemoved = lambda _table, _entries: None,
    ) -> None:
        self._client = client
        self._tables = tables
        self._margin = settings.overflow_margin
        self._policy: Policy = settings.overflow_policy
        self._target = round((self._margin or 0) * settings.overflow_resolution_target)
        self._versioned = settings.layout == "native"
        self._ttl_s = settings.ttl_s
        self._table_ttl_s = settings.table_ttl_s
        self._sweeps: dict[tuple[RedisTable, int], _PartitionSweep] = {}
        self._thread = PeriodicThread(
            self._background, _AFTER_LOSS_S, f"hps-{NAME}-maintenance", idle_rounds=1
        )
        self._also, self._on_removed = also, on_removed
        self._last = time.monotonic()
        self._losses = self._losses_handled = 0
        self._lock = threading.Lock()

    @property
    def policy(self) -> Policy | None:
        """The eviction policy; None if no limit is set, so that no stamps are needed."""
        return self._policy if self._margin is not None else None

    def oldest_row(self, table: EmbeddingTable) -> int:
        """Return the version below which a row is expired."""
        ttl = self._ttl(table)
        if ttl is None or not self._versioned:
            return 0
        return make_version(int(max(0.0, time.time() - ttl) * 1000))

    # -- entries beyond the limit ------------------------------------------------------------------

    def evict_overflow(self, table: RedisTable, partition: int, rows: int, deadline: float) -> None:
        """Evict a partition's overflow after ``rows`` were written to it; only a part of a large overflow."""
        if self._margin is None:
            return
        sweep = self._sweep_of(table, partition)
        sweep.resolving |= table.entries[partition] > self._margin
        scanned = 0
        while sweep.resolving and scanned < 10 * rows + 8 * _STEP:
            need = table.entries[partition] - self._target
            if sweep.highest is None:
                sweep.highest = self._limit(table, partition, need, deadline)
            self._step(table, partition, sweep, need, deadline)
            scanned += _STEP
            sweep.resolving = table.entries[partition] > self._target
            if sweep.cursor == b"0" or not sweep.resolving:
                sweep.highest = None

    def _limit(self, table: RedisTable, partition: int, need: int, deadline: float) -> int:
        """Return the highest stamp to evict, so that one pass over the partition evicts about ``need``."""
        if self._policy == "random":
            return 0
        layout = table.layout
        keys = [layout.rows_keys[partition], layout.stamps_keys[partition]]
        command = RedisCommand(
            table.slots[partition], packed_script(SAMPLE_SCRIPT, keys, [b"%d" % min(_SAMPLE, 7000)])
        )
        self._client.run([command], read_replies, deadline)
        stamps = np.sort([stamp_value(self._policy, each) for each in command.reply])
        share = max(0.1, need / max(1, table.entries[partition]))
        last = min(len(stamps), math.ceil(share * len(stamps))) - 1
        return int(stamps[last]) if len(stamps) else 0

    def _step(
        self, table: RedisTable, partition: int, sweep: _PartitionSweep, need: int, deadline: float
    ) -> int:
        """Scan the next entries; return the number of removed ones."""
        layout = table.layout
        oldest_kept = self.oldest_row(layout.table), oldest_tombstone(layout.table, time.time())
        arguments = [
            sweep.cursor,
            b"%d" % _STEP,
            b"v" if layout.values.versioned else b"",
            *(each.to_bytes(8, "little") for each in oldest_kept),
            b"%d" % max(0, need),
            _KINDS[self._policy],
            b"%d" % (sweep.highest or 0),
        ]
        keys = [layout.rows_keys[partition], layout.stamps_keys[partition]]
        keys += [layout.floors_keys[partition]] if table.floors else []
        command = RedisCommand(table.slots[partition], packed_script(SWEEP_SCRIPT, keys, arguments))
        self._client.run([command], read_replies, deadline)
        sweep.cursor, removed, left = command.reply
        table.entries[partition] = int(left)
        return int(removed)

    def _sweep_of(self, table: RedisTable, partition: int) -> _PartitionSweep:
        return self._sweeps.setdefault((table, partition), _PartitionSweep())

    # -- expired entries ---------------------------------------------------------------------------

    def run_if_due(self) -> None:
        """Start the background work if it is due."""
        losses = self._client.losses
        every = _EVERY_S if losses == self._losses else _AFTER_LOSS_S
        if time.monotonic() < self._last + every:
            return
        with self._lock:
            if time.monotonic() < self._last + every:
                return
            self._last, self._losses = time.monotonic(), losses
        self._thread.start(0)

    @property
    def is_current(self) -> bool:
        """True if no connection or server was lost since the last background work."""
        return self._client.losses == self._losses_handled

    def _background(self) -> bool:
        losses = self._client.losses
        try:
            tables = [each for each in self._tables.opened() if each.checked_at]
            self._tables.check_tables(tables, self._client.deadline())
            self._also()
            self._losses_handled = losses
            for table in tables:
                self.expire(table, _EVERY_S)
        except TierError as error:
            self._losses = -1  # run again as soon as it responds
            log.debug("maintenance: %s", error)
        return False  # ends the thread

    def expire(self, table: RedisTable, interval_s: float = math.inf) -> int:
        """Remove expired entries, and return their number.

        Scans the fraction of a whole pass that is due in ``interval_s`` (default: all). Does nothing if
        another node has just done so."""
        layout = table.layout
        if table.refused or not layout.values.versioned:
            return 0
        if interval_s < math.inf:
            name = layout.metadata_key[:-1] + b"u"
            claim = ("SET", name, "1", "NX", "PX", int(interval_s * 900))
            if self._client.call(name, *claim) is None:
                return 0
        removed = 0
        for partition, entries in enumerate(table.entries):
            if self._client.is_down(table.slots[partition]):
                continue
            whole = interval_s == math.inf
            sweep = _PartitionSweep() if whole else self._sweep_of(table, partition)
            # A small partition is due one step per pass, not per call: there may be thousands of them.
            share = min(1.0, interval_s / self._pass_s(layout.table))
            sweep.due += max(1.0, entries / _STEP) * share if entries else 0.0
            while (whole and entries) or sweep.due >= 1.0:
                sweep.due -= 1.0
                removed += self._step(table, partition, sweep, 0, self._client.deadline())
                if sweep.cursor == b"0":
                    break
            sweep.due = min(sweep.due, 1.0)
        self._on_removed(layout.table, removed)
        return removed

    def _pass_s(self, table: EmbeddingTable) -> float:
        """Return the duration of a background pass: a quarter of the rows' time to live, an hour at most.

        The time to live of tombstones does not count. Reads and writes ignore an expired tombstone, which
        takes less memory than a row, but a pass reads every row: with a short `tombstone_ttl_s` the
        passes would keep the server busy. So it may take memory for one more pass."""
        return max(_EVERY_S, min(_LONGEST_PASS_S, (self._ttl(table) or math.inf) / 4))

    def _ttl(self, table: EmbeddingTable) -> float | None:
        """The shorter one of the table's own time to live and that of Redis' settings."""
        here = self._table_ttl_s.get(f"{table.model}/{table.name}", self._ttl_s)
        return min((ttl for ttl in (here, table.ttl_s) if ttl is not None), default=None)

    def close(self) -> None:
        self._thread.close()
