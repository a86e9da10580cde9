"""Ingestor: applies batches of an update source to the stores, then the caches, then commits.

A batch is in every store before a cache is refreshed, and in both before it is committed, so a crash at any
point repeats work and loses none. A failed store is retried until it accepts the rows: meanwhile nothing is
polled, the stream waits, and lookups continue with the rows they have. Replays are harmless because a store
keeps the newer row.

Where other processes feed the store (`hps.updates.followed_store`), a batch is held until they have written
it, so that here too the caches change after the store.

Each table's store also keeps the position up to which it contains the stream (`hps.tiers.positions`). It is
also recorded every few seconds for tables that batches do not touch; otherwise the stream of a quiet table
would be replayed from its last row."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hps.backoff import Backoff
from hps.errors import HpsError, Unavailable
from hps.observability.meters import UpdateMeter
from hps.tiers.positions import StreamPosition, TableChanges, no_changes
from hps.tiers.stored_rows import decode, to_finite_rows
from hps.tracing import recorder
from hps.types import EmbeddingTable, RowArray
from hps.updates.cache_refresh import refresh
from hps.updates.cache_writer import CacheWriter
from hps.updates.source import DeadLetter, TableUpdate, UpdateBatch, UpdateSource
from hps.updates.stream_positions import FedStore, StreamPositions
from hps.updates.topics import NamedTables, takes

log = logging.getLogger(__name__)

CACHES = "caches"
POLL_S = 0.2
RECORD_EVERY_S = 5.0
BACKOFF = Backoff(0.1, 5.0)
_LOG_EVERY_S = 5.0
# A held batch is checked again after a quarter of the time that it has been held, but not earlier than
# this.
_SHORTEST_HOLD_S = 0.01
_LATE_S = 1.0


class DeadLetters(Protocol):
    """Keeps messages that can never be applied."""

    def keep(self, letters: Sequence[DeadLetter]) -> Sequence[DeadLetter]:
        """Keep ``letters``; returns those not kept before. After an HpsError it is called again."""
        ...

    def report(self) -> None:
        """Log what was kept since the last log line, if due. Called every few seconds."""
        ...


class Ingestor:
    """Applies the batches of ``source`` to the stores of ``positions``, then to ``caches``.

    ``tables`` by their name in messages, `model/table`: an update changes the table of each served version
    whose rows have its dim. ``positions``: the stores to write, empty where others fill them, with their
    positions. ``caches``: None for a process without caches.

    `step` is called by one thread (`IngestThread`); `close` by any."""

    def __init__(
        self,
        source: UpdateSource,
        tables: NamedTables,
        positions: StreamPositions,
        caches: CacheWriter | None,
        dead_letters: DeadLetters,
        observe: UpdateMeter,
    ) -> None:
        self._source = source
        self._tables = tables
        self._positions = positions
        self._stores = positions.stores
        self._caches = caches
        self._dead_letters = dead_letters
        self._observe = observe
        self._held: UpdateBatch | None = None
        self._held_since = self._alive_at = 0.0
        self._stop = threading.Event()
        self._recorded_at = time.monotonic()
        self.problem: str | None = None
        """Reason why the stream waits; None if it does not."""
        self.newest_s: dict[EmbeddingTable, float] = {}
        """Creation time of the newest applied update by table, in Unix seconds."""

    @property
    def store_names(self) -> list[str]:
        return [each.name for each in self._stores]

    @property
    def refreshes(self) -> bool:
        """True if applied rows also refresh caches."""
        return self._caches is not None

    @property
    def is_waiting(self) -> bool:
        """True while a batch waits for a store that other processes feed."""
        return self._held is not None

    def step(self, timeout_s: float = POLL_S) -> int:
        """Poll once and apply the batch; returns its number of rows and deletions, 0 while one is held.

        Raises Unavailable if `close` interrupts it: the batch is not committed and is polled again."""
        batch = self._next(timeout_s)
        if batch is not None:
            started = time.perf_counter()
            with _batch_span(batch):
                self.apply(batch)
                self._until_done("commit", lambda: self._source.commit(batch))
            self._observe.took(time.perf_counter() - started)
        if time.monotonic() - self._recorded_at > RECORD_EVERY_S:
            self.record_positions()
            self._dead_letters.report()
            if loss := self._positions.loss():
                log.error("reading updates again: %s", loss)
                self._held = None
                self._source.restart()
        return 0 if batch is None else batch.rows

    def _next(self, timeout_s: float) -> UpdateBatch | None:
        """The next batch that may be applied now, or None."""
        batch = self._held or self._source.poll(timeout_s)
        if batch is None:
            return None
        now = time.monotonic()
        if self._held is None:
            self._held_since = self._alive_at = now
        missing = self._missing(batch)
        if not missing:
            self._held, self.problem = None, None
            return batch
        self._held, held_s = batch, now - self._held_since
        if held_s > _LATE_S:
            if self.problem is None:
                log.warning("updates wait: %s", missing)
            self.problem = missing
        if now - self._alive_at > _LATE_S:
            self._alive_at = now
            self._source.keep_alive()
        self._stop.wait(min(max(held_s / 4, _SHORTEST_HOLD_S), _LATE_S))
        return None

    def _missing(self, batch: UpdateBatch) -> str:
        """Reason why ``batch`` must not reach the caches yet; empty when it may."""
        found = (self._positions.missing(table, each) for table, each in self._targets(batch))
        return next(filter(None, found), "")

    def _targets(self, batch: UpdateBatch) -> Iterator[tuple[EmbeddingTable, TableUpdate]]:
        """The tables that each update of ``batch`` changes."""
        for update in batch.updates:
            for table in self._tables.get(update.table, ()):
                if takes(table, update):
                    yield table, update

    def apply(self, batch: UpdateBatch) -> None:
        """Keep dead letters, write stores, refresh caches, in this order."""
        if batch.dead:
            self._until_done("dead letters", lambda: self._keep(batch.dead))
        targets = list(self._targets(batch))
        last = {table: number for number, (table, _update) in enumerate(targets)}
        for number, (table, update) in enumerate(targets):
            ended = number == last[table]
            self._apply(
                table,
                update,
                self._positions.positions_to_record(table, batch.positions) if ended else (),
            )
        self._count_misfits(batch)
        self._positions.mark_applied(batch.positions, set(last))

    def _count_misfits(self, batch: UpdateBatch) -> None:
        """Count rows that do not fit the table of a served version, while they fit another one's."""
        for update in batch.updates:
            for table in self._tables.get(update.table, ()):
                if not takes(table, update):
                    rows = len(update.changes.keys) + len(update.changes.deleted)
                    self._observe.applied(table, "other_shape", rows)

    def _keep(self, letters: Sequence[DeadLetter]) -> None:
        for letter in self._dead_letters.keep(letters):
            self._observe.dead(letter.reason.name.lower())

    def record_positions(self) -> None:
        """Record the stream positions of tables that had no rows lately in the stores."""
        for table, positions in self._positions.unrecorded():
            for each in self._stores:
                self._write(each, table, no_changes(table), positions)
        self._recorded_at = time.monotonic()

    def close(self) -> None:
        """Make a waiting `step` give up. The source stays open."""
        self._stop.set()

    # -- one table ---------------------------------------------------------------------------------

    def _apply(
        self, table: EmbeddingTable, update: TableUpdate, positions: Sequence[StreamPosition]
    ) -> None:
        changes = self._usable(table, update)
        made_s = update.messages["event_ms"] / 1e3
        for each in self._stores:
            self._write(each, table, changes, positions)
            self._observe.visible(table, each.name, made_s)
        if self._caches is not None:
            refresh(self._caches, table, changes, versioned=self._positions.versioned)
            self._observe.visible(table, CACHES, made_s)
        self._observe.applied(table, "upserted", len(changes.keys))
        self._observe.applied(table, "deleted", len(changes.deleted))
        self._observe.trained(table, update.messages)
        self.newest_s[table] = max(self.newest_s.get(table, 0.0), float(made_s.max()))

    def _usable(self, table: EmbeddingTable, update: TableUpdate) -> TableChanges:
        """Convert to the table's keys and row format; drop rows that are expired or not finite.

        A row that is not finite would spoil every score."""
        changes, messages = update.changes, update.messages
        good = np.ones(len(changes.keys), bool)
        if messages["ttl_s"].any():
            until = messages["event_ms"] + messages["ttl_s"].astype(np.int64) * 1000
            over = (messages["ttl_s"] > 0) & (until <= time.time() * 1e3)
            good = ~np.repeat(over, messages["upserts"])
            self._observe.applied(table, "expired", int(np.count_nonzero(~good)))
        rows, finite = _stored(table, changes)
        if not finite.all():
            self._observe.applied(table, "not_finite", int(np.count_nonzero(good & ~finite)))
            good &= finite
        keys, vectors, versions = changes.keys, rows, changes.versions
        if not good.all():
            keys, vectors, versions = keys[good], vectors[good], versions[good]
        return TableChanges(
            table.narrow(keys),
            vectors,
            versions,
            table.narrow(changes.deleted),
            changes.deleted_versions,
        )

    def _write(
        self,
        store: FedStore,
        table: EmbeddingTable,
        changes: TableChanges,
        positions: Sequence[StreamPosition],
    ) -> None:
        self._until_done(store.name, lambda: store.store.apply(table, changes, positions))

    def _until_done(self, target: str, work: Callable[[], None]) -> None:
        """Retry ``work`` until it succeeds; the stream waits meanwhile. Raises Unavailable once closed."""
        logged_at = float("-inf")
        for failures in count(1):
            try:
                work()
            except HpsError as error:
                self.problem = f"{target}: {error}"
                if time.monotonic() - logged_at > _LOG_EVERY_S:
                    log.warning("updates wait for %s: %s", target, error)
                    logged_at = time.monotonic()
            else:
                if self.problem is not None:
                    log.info("updates resume: %s accepted them", target)
                    self.problem = None
                return
            if self._stop.wait(BACKOFF.pause_s(failures)):
                raise Unavailable(
                    f"closed while updates waited for {target}; they will be read again"
                )
            self._source.keep_alive()


def _batch_span(batch: UpdateBatch) -> AbstractContextManager[object]:
    """A span linked to the traces of the batch's messages, if tracing is on."""
    spans = recorder()
    if spans is None or not batch.traceparents:
        return nullcontext()
    span = spans.batch("ingest", batch.traceparents)
    span.note(rows=batch.rows, dead=len(batch.dead))
    return span.whole()


def _stored(table: EmbeddingTable, changes: TableChanges) -> tuple[RowArray, NDArray[np.bool_]]:
    """The rows ``(n, row_width)`` of ``changes``, and which of them ``(n,)`` are finite.

    Rows that come in the table's format are stored bit for bit."""
    if changes.row_format is None:
        return to_finite_rows(table, changes.vectors)
    vectors = decode(changes.vectors, changes.row_format, changes.row_dim)
    if changes.row_format != table.row_format:
        return to_finite_rows(table, vectors)
    return changes.vectors, np.asarray(np.isfinite(vectors).all(axis=1))
