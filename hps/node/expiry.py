"""Expiry of rows: those older than their table's `ttl_s` leave the node's caches and its own store.

Stores check the age of a row when they read it, so their passes only free space. Caches do not, as every
lookup would pay for it: a row is served until the next pass, on the thread that writes the caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from hps.errors import TierError
from hps.node.stores import NodeStores
from hps.observability.meters import count_expired
from hps.observability.metrics import Metrics
from hps.periodic import PeriodicThread
from hps.tiers.cpu.cache import CpuCache
from hps.types import EmbeddingTable, oldest_row
from hps.updates.cache_writer import CacheWriter

if TYPE_CHECKING:
    from hps.tiers.gpu.replicas import GpuReplicas

_CACHE_PASSES, _STORE_PASSES = 10, 4
"""Passes while a row lives."""
_SHORTEST_S, _LONGEST_CACHE_S, _LONGEST_STORE_S = 0.2, 60.0, 3600.0
_PAUSES_PER_STEP = 9.0
"""A step of a pass over a store holds the interpreter lock: it pauses so many times as long as it took."""


class DueTables:
    """Tables whose rows expire, by when their next pass is due. For one thread.

    ``interval_s``: of a table's passes."""

    def __init__(
        self,
        tables: Callable[[], Sequence[EmbeddingTable]],
        interval_s: Callable[[EmbeddingTable], float],
    ) -> None:
        self._tables, self._interval_s = tables, interval_s
        self._due: dict[EmbeddingTable, float] = {}

    def pause_s(self) -> float:
        """Seconds until the next pass."""
        soonest = min(self._due.values(), default=0.0)
        return max(_SHORTEST_S, soonest - time.monotonic())

    def run(self, work: Callable[[EmbeddingTable], None]) -> bool:
        """Call ``work`` with each table that is due; False if no rows expire."""
        tables = [table for table in self._tables() if table.ttl_s is not None]
        self._due = {table: self._due.get(table, 0.0) for table in tables}
        for table in tables:
            now = time.monotonic()
            if now >= self._due[table]:
                self._due[table] = now + self._interval_s(table)
                work(table)
        return bool(tables)


class NodeExpiry:
    """Runs the passes on two threads, one for the caches and one for the store, until closed.

    The threads run while a table has a `ttl_s`; `start` starts them again. ``clock`` returns Unix seconds.
    Any thread may call any method."""

    def __init__(
        self,
        stores: NodeStores,
        caches: tuple[CpuCache | None, GpuReplicas | None],
        writer: CacheWriter,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stores, self._writer, self._clock = stores, writer, clock
        self._cpu, self._gpus = caches
        self._count = partial(count_expired, metrics)
        self._hidden: set[EmbeddingTable] = set()
        in_caches = DueTables(
            lambda: stores.tables, partial(_interval_s, _CACHE_PASSES, _LONGEST_CACHE_S)
        )
        in_store = DueTables(
            lambda: stores.tables, partial(_interval_s, _STORE_PASSES, _LONGEST_STORE_S)
        )
        self._cache_thread, self._store_thread = (
            PeriodicThread(partial(due.run, work), due.pause_s, name, idle_rounds=1)
            for due, work, name in (
                (in_caches, self._pass_caches, "hps-expire-caches"),
                (in_store, self._pass_store, "hps-expire-store"),
            )
        )

    def start(self) -> None:
        """Start the passes, if the rows of a table expire and they do not run yet."""
        if all(table.ttl_s is None for table in self._stores.tables):
            return
        self._cache_thread.start(_SHORTEST_S)
        self._store_thread.start(_SHORTEST_S)

    def close(self) -> None:
        """Stop the passes. Idempotent."""
        with ExitStack() as both:
            both.callback(self._cache_thread.close, None)
            both.callback(self._store_thread.close, None)

    def _pass_caches(self, table: EmbeddingTable) -> None:
        """Remove a table's expired rows from each cache, the one that feeds the others first."""
        self._hide_file(table)
        oldest = oldest_row(table, self._clock())
        with suppress(CancelledError):  # the writer is closed
            begin = 0
            while self._cpu is not None:
                expire = partial(self._cpu.expire, table, oldest, begin)
                rows, begin = self._writer.run(expire).result()
                self._count(self._cpu.info.name, table, rows)
                if not begin:
                    break
            if self._gpus is not None:
                rows = self._writer.run(partial(self._gpus.expire, table, oldest)).result()
                self._count(self._gpus.info.name, table, rows)

    def _hide_file(self, table: EmbeddingTable) -> None:
        """Hide the rows of a table's mapped file, also from caches that read it, once these have expired."""
        with suppress(TierError):  # the store reports it
            mapped = self._stores.mapped_file(table)
            if mapped is not None and mapped.expired_rows and table not in self._hidden:
                self._hidden = {*self._hidden, table} & {*self._stores.tables}
                self._count("mapped", table, mapped.expired_rows)

    def _pass_store(self, table: EmbeddingTable) -> None:
        """Remove a table's expired rows from the store that this node writes, step by step."""
        store = self._stores.written
        start: bytes | None = None
        while store is not None and table in self._stores.tables:
            began = time.monotonic()
            step = store.expire(table, start)
            self._count(store.info.name, table, step.removed)
            start = step.following
            pause_s = _PAUSES_PER_STEP * (time.monotonic() - began)
            if start is None or self._store_thread.wait(pause_s):
                break


def _interval_s(passes: int, longest_s: float, table: EmbeddingTable) -> float:
    assert table.ttl_s is not None
    return min(longest_s, max(_SHORTEST_S, table.ttl_s / passes))
