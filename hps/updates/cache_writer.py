"""CacheWriter: the one thread of a node that changes its caches.

Two rules keep a cache from going stale (invariant 5). Whoever changes a store tells the writer
afterwards, through ``update`` or ``delete``. And a promotion is queued as keys, not rows: the writer
reads the rows from every store at the moment it inserts them. So whichever comes first, the newest
row is the one that stays; and so changes may overtake the promotions that wait, of which there can be
many seconds' worth after a cold start, and are seen at once.

A store that could not be asked for a key may hold a newer row of it, or its deletion, and then the key is not
promoted. But not when the node's own store could be: that one has every update before the caches receive
it, so its rows lag no more than lookups do that pass over the others. Otherwise a Redis that is down would
keep the CPU cache cold for as long. Where rows have no versions, the row of the own store counts as the
newest: another store may not have an update yet that the caches received before the row came.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from hps.errors import TierError
from hps.native import dedup
from hps.tiers.base import FetchContext, Part, Tier
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

log = logging.getLogger(__name__)

# Keys read and inserted at a time: a store's list interface holds the interpreter lock, and request
# threads must get their turn.
SLICE_KEYS = 1_024
_LOG_EVERY_S = 5.0

Count = Callable[[str, int], None]
"""``count(result, keys)``: inserted, gone, degraded, dropped or failed."""
Lacked = Callable[[EmbeddingTable, KeyArray], None]
"""``lacked(table, keys)``: rows that the last store held and no store above it knew of."""


@dataclass(slots=True)
class _Promotion:
    table: EmbeddingTable
    keys: KeyArray


@dataclass(slots=True)
class _CacheChange:
    """Work with a caller who may want to know when it is done."""

    work: Callable[[], None]
    done: Future[None]


class CacheWriter:
    """``caches`` is what it writes to; ``stores`` are the single stores below, each of which is asked
    at a promotion, fastest first. ``own``: the one of them that has every update before `update` or
    `delete` is called; ``own_first``: of rows of equal versions its is taken. At most ``queue_keys`` keys
    wait to be promoted; more are dropped and counted. ``lacked`` must not block.

    Keys may come from outside: those of tables with 32-bit keys are narrowed. All methods may be called
    from any thread.
    """

    def __init__(
        self,
        caches: Tier,
        stores: Sequence[Tier],
        queue_keys: int,
        count: Count = lambda _result, _keys: None,
        lacked: Lacked = lambda _table, _keys: None,
        *,
        own: Tier | None = None,
        own_first: bool = False,
    ) -> None:
        self._caches = caches
        self._stores = tuple(stores)
        self._own = own
        self._own_first = own_first
        self.queue_keys = queue_keys
        self._count = count
        self._lacked = lacked
        self._changes: deque[_CacheChange] = deque()
        # A change among the promotions is one that waits for those before it.
        self._promotions: deque[_Promotion | _CacheChange] = deque()
        self._waiting_keys = 0
        self._wake = threading.Condition()
        self._closed = False
        self._logged_at = -_LOG_EVERY_S
        self._thread = threading.Thread(target=self._run, name="hps-cache-writer", daemon=True)
        self._thread.start()

    @property
    def waiting_keys(self) -> int:
        """Keys whose promotion is not finished: those that wait, and those at hand."""
        return self._waiting_keys

    def promote(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Have the rows of ``keys (n,)`` copied into the caches some time soon. Never blocks; keys
        beyond the queue's bound are dropped. ``keys`` must not be changed afterwards."""
        with self._wake:
            room = 0 if self._closed else self.queue_keys - self._waiting_keys
            kept = table.narrow(keys[: max(0, room)])
            if len(kept):
                self._promotions.append(_Promotion(table, kept))
                self._waiting_keys += len(kept)
                self._wake.notify()
        if len(kept) < len(keys):
            self._count("dropped", len(keys) - len(kept))

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> Future[None]:
        """Put rows into the caches, resident or not. Only for rows the stores hold just like that."""
        work = partial(self._caches.insert, table, table.narrow(keys), vectors, versions)
        return self._queue(self._changes, work)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> Future[None]:
        """Refresh resident rows; to be called after every store has the new ones."""
        work = partial(self._caches.update, table, table.narrow(keys), vectors, versions)
        return self._queue(self._changes, work)

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> Future[None]:
        """Delete from the caches; to be called after every store has deleted."""
        work = partial(self._caches.delete, table, table.narrow(keys), versions)
        return self._queue(self._changes, work)

    def run(self, work: Callable[[], None]) -> Future[None]:
        """Have ``work`` done on the thread that alone writes to the caches, in its turn among the changes."""
        return self._queue(self._changes, work)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued before this call is done; False when time ran out or the
        writer is closed, or this process is a fork of its own, without its thread."""
        barrier = self._queue(self._promotions, lambda: None)
        try:
            barrier.result(timeout)
        except (TimeoutError, CancelledError):
            return False
        return True

    def close(self) -> None:
        """Finish the job at hand, drop the rest (caches are about to go), end the thread. Idempotent;
        futures of dropped changes are cancelled."""
        with self._wake:
            self._closed = True
            dropped = [*self._changes, *self._promotions]
            self._changes.clear()
            self._promotions.clear()
            self._waiting_keys = 0
            self._wake.notify()
        for job in dropped:
            if isinstance(job, _CacheChange):
                job.done.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _queue(
        self,
        queue: deque[_CacheChange] | deque[_Promotion | _CacheChange],
        work: Callable[[], None],
    ) -> Future[None]:
        change = _CacheChange(work, Future())
        with self._wake:
            # After a fork this process has no such thread: nobody would ever finish it.
            if self._closed or not self._thread.is_alive():
                change.done.cancel()
            else:
                queue.append(change)
                self._wake.notify()
        return change.done

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if isinstance(job, _CacheChange):
                _finish(job)
                continue
            waiting = sum(len(promotion.keys) for promotion in job)
            try:
                for done in self._promote_all(job):
                    self._done(done)
                    waiting -= done
            except Exception:
                # Whatever it was, others wait for this thread, some without an end.
                log.exception("the cache writer gave up %d promotions", waiting)
                self._done(waiting)

    def _promote_all(self, promotions: list[_Promotion]) -> Iterator[int]:
        """Promote, let changes overtake; how many keys of the queue are done with, each time."""
        refused = False
        for table, keys, queued in _slices(promotions):
            if self._closed:
                return
            if refused:
                self._count("failed", len(keys))
            else:
                refused = not self._promote_slice(table, keys)
            yield queued
            while change := self._next_change():
                _finish(change)

    def _next(self) -> _CacheChange | list[_Promotion] | None:
        """A change, or else all promotions that wait; None once closed."""
        with self._wake:
            while not (self._changes or self._promotions or self._closed):
                self._wake.wait()
            if self._closed:
                return None
            if self._changes:
                return self._changes.popleft()
            promotions = []
            while self._promotions and isinstance(job := self._promotions[0], _Promotion):
                promotions.append(job)
                self._promotions.popleft()
            if promotions:
                return promotions
            barrier = self._promotions.popleft()
            assert isinstance(barrier, _CacheChange)
            return barrier

    def _next_change(self) -> _CacheChange | None:
        with self._wake:
            return self._changes.popleft() if self._changes else None

    def _done(self, keys: int) -> None:
        with self._wake:
            if not self._closed:
                self._waiting_keys -= keys

    def _promote_slice(self, table: EmbeddingTable, keys: KeyArray) -> bool:
        """False when the caches refused the rows: they would refuse others, each after a while."""
        try:
            rows, skipped = self._newest(table, keys)
        except Exception:
            self._failed(table, keys)
            return True
        found = np.flatnonzero(rows.source)
        try:
            if len(found):
                self._caches.insert(table, keys[found], rows.out[found], rows.versions[found])
                self._count("inserted", len(found))
        except Exception as error:
            self._failed(table, keys)
            return not isinstance(error, TierError)
        if len(found) < len(keys):
            self._count("degraded" if skipped else "gone", len(keys) - len(found))
        return True

    def _failed(self, table: EmbeddingTable, keys: KeyArray) -> None:
        self._count("failed", len(keys))
        if time.monotonic() - self._logged_at > _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            log.exception("promotion of %d keys of table %s failed", len(keys), table.id)

    def _newest(self, table: EmbeddingTable, keys: KeyArray) -> tuple[Part, bool]:
        """Each key's row of the highest version over all stores, source 0 where that is a deletion, no store
        knows the key, or a store that was skipped for it may know better; and whether one was skipped."""
        newest, unsure = Part.make(table, keys), np.zeros(len(keys), bool)
        known = np.zeros(len(keys), bool)
        skipped, lacked = False, keys[:0]
        for store in self._stores:
            part, ctx = Part.make(table, keys), FetchContext()
            store.fetch([part], ctx)
            if ctx.degraded:
                skipped = True
                if self._own is None or store is self._own:
                    unsure[part.missing] = True
            answered = np.ones(len(keys), bool)
            answered[part.missing] = False
            newer = answered & (~known | (part.versions > newest.versions))
            if self._own_first and store is self._own:
                newer |= answered & (part.versions == newest.versions)
            newest.out[newer] = part.out[newer]
            newest.versions[newer] = part.versions[newer]
            newest.source[newer] = part.source[newer]
            lacked = keys[~known & (part.source != 0)]
            known |= answered
        if len(self._stores) > 1 and not skipped and len(lacked):
            self._lacked(table, lacked)
        newest.source[unsure] = 0
        return newest, skipped


def _slices(promotions: list[_Promotion]) -> Iterator[tuple[EmbeddingTable, KeyArray, int]]:
    """The keys by table, each once, ``SLICE_KEYS`` at a time; and how many of those in the queue are done
    with it, repeated ones included."""
    chosen: dict[EmbeddingTable, list[KeyArray]] = {}
    for job in promotions:
        chosen.setdefault(job.table, []).append(job.keys)
    for table, queued in chosen.items():
        every = np.concatenate(queued)
        keys = dedup(every)[0]
        repeated = len(every) - len(keys)
        for start in range(0, len(keys), SLICE_KEYS):
            part = keys[start : start + SLICE_KEYS]
            yield table, part, len(part) + repeated
            repeated = 0


def _finish(change: _CacheChange) -> None:
    if not change.done.set_running_or_notify_cancel():
        return
    try:
        change.work()
    except BaseException as error:
        change.done.set_exception(error)
    else:
        change.done.set_result(None)
