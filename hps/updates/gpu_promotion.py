"""Copies of promoted rows from the CPU cache into the GPU caches; callers choose the keys."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from functools import partial

import numpy as np

from hps.native import dedup
from hps.periodic import SWEEP_IDLE_ROUNDS, PeriodicThread
from hps.tiers.base import FetchContext, Part, Tier
from hps.types import EmbeddingTable, KeyArray
from hps.updates.admission import Admission, Count
from hps.updates.cache_writer import CacheWriter

_SHORTEST_PAUSE_S = 0.02
# Between two copies, requests get the processor. Keys that are dropped meanwhile are promoted when they are
# requested again.
_PAUSES_PER_COPY = 4.0
_CHUNK_ROWS = 16_384


class GpuPromotion:
    """Copies rows of ``source`` into ``target``, both caches of ``writer``, on the writer's thread.

    No store is asked: every change reaches ``source`` and then ``target`` on that thread, so a row read
    there is as new as ``target`` may have it.

    At most ``queue_keys`` keys are queued; more are dropped and reported to ``count``. Keys are
    collected and then copied table by table, so that one cache write pays for many keys; the pause
    between two copies is four times as long as a copy took. ``admission`` chooses among queued keys; it is
    called on the writer's thread. Any thread may call any method."""

    def __init__(
        self,
        writer: CacheWriter,
        source: Tier,
        target: Tier,
        queue_keys: int,
        count: Count = lambda _result, _keys: None,
        admission: Admission | None = None,
    ) -> None:
        self._writer = writer
        self._source = source
        self._target = target
        self._queue_keys = queue_keys
        self._count = count
        self._admission = admission
        self._lock = threading.Lock()
        self._keys: dict[EmbeddingTable, list[KeyArray]] = {}
        self._waiting = 0
        self._is_closed = False
        self._pause_s = _SHORTEST_PAUSE_S
        self._thread = PeriodicThread(
            self._copy_queued,
            lambda: self._pause_s,
            "hps-gpu-promote",
            idle_rounds=SWEEP_IDLE_ROUNDS,
        )

    def promote(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Queue the rows of ``keys (n,)`` for a copy. Never blocks."""
        with self._lock:
            fits = not self._is_closed and self._waiting + len(keys) <= self._queue_keys
            if fits:
                self._keys.setdefault(table, []).append(keys)
                self._waiting += len(keys)
        if fits:
            self._thread.start()
        else:
            self._count("dropped", len(keys))

    def promote_now(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Copy the rows of ``keys (n,)`` and wait. The first keys are copied last, to rank highest."""
        for stop in range(len(keys), 0, -_CHUNK_ROWS):
            chosen = np.array(keys[max(0, stop - _CHUNK_ROWS) : stop], np.int64)
            self._writer.run(partial(self._copy, table, dedup(chosen)[0])).result()

    def flush(self) -> None:
        """Copy all queued rows and wait."""
        with self._lock:
            keys, self._keys, self._waiting = self._keys, {}, 0
        try:
            for table, gathered in keys.items():
                queued = np.concatenate(gathered)
                self._writer.run(partial(self._copy_admitted, table, queued)).result()
        except CancelledError:
            self.close()  # the writer is closed

    def close(self) -> None:
        """Drop queued keys and end the thread. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._thread.close(timeout_s=None)

    def _copy_queued(self) -> bool:
        """False if no key is queued."""
        if not self._waiting:
            return False
        started = time.monotonic()
        try:
            self.flush()
        finally:
            took_s = time.monotonic() - started
            self._pause_s = max(_SHORTEST_PAUSE_S, _PAUSES_PER_COPY * took_s)
        return True

    def _copy_admitted(self, table: EmbeddingTable, queued: KeyArray) -> None:
        keys, numbers = dedup(queued)
        if self._admission is not None:
            times = np.bincount(numbers, minlength=len(keys))
            keys = self._admission.filter(table, keys, times, self._count)
        self._copy(table, keys)

    def _copy(self, table: EmbeddingTable, keys: KeyArray) -> None:
        part = Part.make(table, keys)
        self._source.fetch([part], FetchContext())
        found = np.flatnonzero(part.source)
        if len(found):
            self._target.insert(table, part.keys[found], part.out[found], part.versions[found])
            self._count("inserted", len(found))
