"""CacheWriter: the thread of a node that changes its caches.

Two rules keep a cache from going stale (invariant 5). After a store has changed, its writer calls
``update`` or ``delete`` here. And a promotion is queued as keys, not rows: the writer reads the rows
from every store at the moment it inserts them. In either order the newest row stays. So changes may
overtake queued promotions, of which there can be many seconds' worth after a cold start, and lookups
see them immediately.

A store that is skipped for a key may hold a newer row of it, or its deletion; the key is then not
promoted. The exception is a key that the node's own store answers: that store has every update before
the caches receive it, so its rows are no older than those of lookups that skip the other stores.
Otherwise an unavailable Redis would keep the CPU cache cold for as long. Where rows have no versions,
the own store's row counts as the newest: another store may miss an update that the caches have already
received.

Another thread writes one cache: the own store gives the CPU cache changes of mapped tables before their
`update` comes here (`CpuCache.map_table`). Until then the version rule decides between both."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hps.errors import TierError
from hps.native import dedup
from hps.threads import run_into
from hps.tiers.base import FetchContext, Part, Tier
from hps.types import EmbeddingTable, IndexArray, KeyArray, VectorArray, VersionArray
from hps.updates.admission import Admission, Count

log = logging.getLogger(__name__)
T = TypeVar("T")

# Keys read and inserted at a time: a store's list interface holds the interpreter lock, and request threads
# must get their turn.
SLICE_KEYS = 1_024
_LOG_EVERY_S = 5.0

MissingAbove = Callable[[EmbeddingTable, KeyArray], None]
"""``on_missing_above(table, keys)`` is called with keys that only the last store has."""


@dataclass(slots=True)
class _Promotion:
    table: EmbeddingTable
    keys: KeyArray


@dataclass(slots=True)
class _CacheChange:
    """A queued change, with the future that its caller may wait for."""

    work: Callable[[], Any]
    done: Future[Any]


@dataclass(frozen=True, slots=True)
class PromotionSources:
    """The ``stores`` that promotions into the caches read, fastest first; each is asked for every key.

    ``own``: the one that has every update before the caches receive it, if any; ``own_first``: of rows
    with equal versions, its row is taken."""

    stores: Sequence[Tier]
    own: Tier | None = None
    own_first: bool = False


class CacheWriter:
    """Writes ``caches``; promotes rows from ``sources``, the single stores below.

    At most ``queue_keys`` keys are queued for promotion; more are dropped and counted.
    ``on_missing_above`` must not block. ``admission`` chooses the keys to promote. Tables for which
    ``is_served`` is false are not promoted: the stores do not have them any more.

    Keys of tables with 32-bit keys are narrowed here. Any thread may call any method."""

    def __init__(
        self,
        caches: Tier,
        sources: PromotionSources,
        queue_keys: int,
        count: Count = lambda _result, _keys: None,
        on_missing_above: MissingAbove = lambda _table, _keys: None,
        is_served: Callable[[EmbeddingTable], bool] = lambda _table: True,
        admission: Admission | None = None,
    ) -> None:
        self._caches = caches
        self._admission = admission
        self._is_served = is_served
        self._sources = sources
        self.queue_keys = queue_keys
        self._count = count
        self._on_missing_above = on_missing_above
        self._changes: deque[_CacheChange] = deque()
        # A change in this queue waits for the promotions before it.
        self._promotions: deque[_Promotion | _CacheChange] = deque()
        self._waiting_keys = 0
        self._wake = threading.Condition()
        self._closed = False
        self._logged_at = -_LOG_EVERY_S
        self._thread = threading.Thread(target=self._run, name="hps-cache-writer", daemon=True)
        self._thread.start()

    @property
    def waiting_keys(self) -> int:
        """Keys whose promotion is queued or running."""
        return self._waiting_keys

    def promote(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Queue ``keys (n,)`` for a copy of their rows into the caches. Never blocks.

        Keys beyond the queue's bound are dropped. The caller must not change ``keys`` afterwards."""
        with self._wake:
            free = 0 if self._closed else self.queue_keys - self._waiting_keys
            kept = table.narrow(keys[: max(0, free)])
            if len(kept):
                self._promotions.append(_Promotion(table, kept))
                self._waiting_keys += len(kept)
                self._wake.notify()
        if len(kept) < len(keys):
            self._count("dropped", len(keys) - len(kept))

    def promote_at_once(
        self, table: EmbeddingTable, keys: KeyArray, cache: Tier | None = None
    ) -> Future[None]:
        """Copy the rows of ``keys (n,)``, each key once, into the caches, read and inserted in one piece.

        ``cache``: only into this one of them. For a node that does not serve yet, or rows of mapped files:
        request threads might wait for the interpreter lock."""

        def work() -> None:
            self._promote_slice(table, keys, self._caches if cache is None else cache)

        return self._queue(self._changes, work)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> Future[None]:
        """Put rows into the caches, resident or not. Only for rows that the stores hold unchanged."""
        work = partial(self._caches.insert, table, table.narrow(keys), vectors, versions)
        return self._queue(self._changes, work)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> Future[None]:
        """Refresh resident rows. Callers must first have written the rows to every store."""
        work = partial(self._caches.update, table, table.narrow(keys), vectors, versions)
        return self._queue(self._changes, work)

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> Future[None]:
        """Delete from the caches. Callers must first have deleted from every store."""
        work = partial(self._caches.delete, table, table.narrow(keys), versions)
        return self._queue(self._changes, work)

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work`` for the writer's thread, in order with the other changes."""
        return self._queue(self._changes, work)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued before this call is done.

        False after ``timeout`` seconds, when the writer is closed, and in a forked process, which has
        no writer thread."""
        barrier = self._queue(self._promotions, lambda: None)
        try:
            barrier.result(timeout)
        except (TimeoutError, CancelledError):
            return False
        return True

    def close(self) -> None:
        """Finish the current job, drop the others, end the thread. Idempotent.

        Futures of dropped changes are cancelled; the caches are freed next."""
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
        work: Callable[[], T],
    ) -> Future[T]:
        change = _CacheChange(work, Future())
        with self._wake:
            # A forked process has no such thread: the change would never finish.
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
                run_into(job.done, job.work)
                continue
            waiting = sum(len(promotion.keys) for promotion in job)
            try:
                for done in self._promote_all(job):
                    self._done(done)
                    waiting -= done
            except Exception:
                # The thread must survive any error: other threads wait for it, some without a timeout.
                log.exception("the cache writer failed; dropped %d promotions", waiting)
                self._done(waiting)

    def _promote_all(self, promotions: list[_Promotion]) -> Iterator[int]:
        """Promote slice by slice and let changes overtake; yields the number of queued keys finished."""
        refused = False
        for table, every, queued, times in _slices(promotions):
            if self._closed:
                return
            keys = self._admitted(table, every, times)
            if refused:
                self._count("failed", len(keys))
            elif len(keys):
                refused = not self._promote_slice(table, keys, self._caches)
            yield queued
            while change := self._next_change():
                run_into(change.done, change.work)

    def _admitted(self, table: EmbeddingTable, keys: KeyArray, times: IndexArray) -> KeyArray:
        if self._admission is None:
            return keys
        return self._admission.filter(table, keys, times, self._count)

    def _next(self) -> _CacheChange | list[_Promotion] | None:
        """The next change, or else all queued promotions; None once closed."""
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

    def _promote_slice(self, table: EmbeddingTable, keys: KeyArray, caches: Tier) -> bool:
        """Promote one slice; False when the caches rejected it.

        They would reject more, each after a delay.
        """
        if not self._is_served(table):
            return True
        try:
            rows, skipped = self._newest(table, keys)
        except Exception:
            self._failed(table, keys)
            return True
        inserted = int(np.count_nonzero(rows.source))
        found: slice | IndexArray = slice(None)  # copies nothing
        if inserted < len(keys):
            found = np.flatnonzero(rows.source)
        try:
            if inserted:
                caches.insert(table, keys[found], rows.out[found], rows.versions[found])
                self._count("inserted", inserted)
        except Exception as error:
            self._failed(table, keys)
            return not isinstance(error, TierError)
        if inserted < len(keys):
            self._count("degraded" if skipped else "gone", len(keys) - inserted)
        return True

    def _failed(self, table: EmbeddingTable, keys: KeyArray) -> None:
        self._count("failed", len(keys))
        if time.monotonic() - self._logged_at > _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            log.exception("promotion of %d keys of table %s failed", len(keys), table.id)

    def _newest(self, table: EmbeddingTable, keys: KeyArray) -> tuple[Part, bool]:
        """Read each key's newest row over all stores; also return whether a store was skipped.

        Source 0: a deletion, a key that no store has, or a skipped store that may hold a newer row."""
        newest: Part | None = None
        unsure, known = np.zeros(len(keys), bool), np.zeros(len(keys), bool)
        skipped, missing_above = False, keys[:0]
        for store in self._sources.stores:
            part, ctx = Part.make(table, keys), FetchContext()
            store.fetch([part], ctx)
            if ctx.degraded:
                skipped = True
                if self._sources.own is None or store is self._sources.own:
                    unsure[part.missing] = True
            answered = np.ones(len(keys), bool)
            answered[part.missing] = False
            if newest is None:
                newest, known = part, answered
                continue  # most nodes have one store: nothing is copied
            newer = answered & (~known | (part.versions > newest.versions))
            if self._sources.own_first and store is self._sources.own:
                newer |= answered & (part.versions == newest.versions)
            newest.out[newer] = part.out[newer]
            newest.versions[newer] = part.versions[newer]
            newest.source[newer] = part.source[newer]
            missing_above = keys[~known & (part.source != 0)]
            known |= answered
        if len(self._sources.stores) > 1 and not skipped and len(missing_above):
            self._on_missing_above(table, missing_above)
        if newest is None:
            newest = Part.make(table, keys)
        newest.source[unsure] = 0
        return newest, skipped


def _slices(
    promotions: list[_Promotion],
) -> Iterator[tuple[EmbeddingTable, KeyArray, int, IndexArray]]:
    """Split the keys by table, each key once, into slices of ``SLICE_KEYS``.

    With each slice come the number of queued keys that it finishes, repeated keys included, and how often
    each of its keys was queued."""
    chosen: dict[EmbeddingTable, list[KeyArray]] = {}
    for job in promotions:
        chosen.setdefault(job.table, []).append(job.keys)
    for table, queued in chosen.items():
        every = np.concatenate(queued)
        keys, numbers = dedup(every)
        times = np.bincount(numbers, minlength=len(keys))
        repeated = len(every) - len(keys)
        for start in range(0, len(keys), SLICE_KEYS):
            part = keys[start : start + SLICE_KEYS]
            yield table, part, len(part) + repeated, times[start : start + SLICE_KEYS]
            repeated = 0
