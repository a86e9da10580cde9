"""Miss fill: complete a prepared fetch on the device with rows from host memory.

Launch the fetch of the rows in the cache; wait; gather the missing rows from the CPU cache, in the order in
which the device listed them, while the device takes those gathered before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.miss_fill import MissBatch, no_rows
from hps.cuda.prepared import FixedRows
from hps.lookup.base import Feature
from hps.native import WorkerPool
from hps.observability.meters import LookupMeter
from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.fused_lookup import FusedLookup
from hps.tiers.wrappers import FetchObserver, Promote
from hps.types import EmbeddingTable, Source

_ALIGN = 256
_ALL_PROMOTED, _PROMOTED = 2048, 512
"""Of a batch with more misses than the first number, some of the second one are promoted: a sample is as
good, and does not delay the request."""


_NO_CODES = np.empty(0, np.uint8)
NO_VERSIONS: Any = None
"""`Part.versions` on a device, if they are not needed."""


class HostCaches:
    """The caches in host memory, which fill a device's misses without blocking. Thread-safe.

    ``memory`` finds rows in one call, with the threads of ``pool``; ``bridge`` says for each remaining key
    whether it was found. ``promote`` is called with keys whose rows ``memory`` had; ``bridge`` contains a
    `PromotingTier`."""

    def __init__(
        self,
        memory: FusedLookup | None = None,
        bridge: Tier | None = None,
        promote: Promote = lambda _table, _keys: None,
        pool: WorkerPool | None = None,
    ) -> None:
        self.memory = memory
        self.bridge = bridge
        self.pool = pool
        self.promote = promote
        self.code = int(Source.DEFAULT if memory is None else memory.info.source)
        """Source code of the rows of ``memory``."""

    def gather(self, batch: MissBatch) -> int:
        """Fill the rows that ``memory`` has, and promote some; return the number of keys without a row.

        A deleted key has no row: the bridge reports the deletion."""
        if self.memory is None:
            return no_rows(batch)
        left = self.memory.gather_misses(batch, self.pool)
        if left < len(batch.positions):
            self._promote_some(batch)
        return left

    def native_tables(self, tables: Sequence[EmbeddingTable]) -> list[Any]:
        """Return the `CacheTable` of each of ``tables`` in ``memory``; None for others."""
        memory = self.memory
        return [None] * len(tables) if memory is None else list(memory.native_tables(tables))

    def _promote_some(self, batch: MissBatch) -> None:
        n = batch.total
        sample = slice(None, None, 1 if n <= _ALL_PROMOTED else n // _PROMOTED)
        positions, found = batch.positions[sample], batch.sources[sample] == self.code
        keys = batch.keys[sample] if batch.listed else batch.keys[positions]
        if len(batch.tables) == 1:
            self.promote(batch.tables[0], keys[found])
            return
        parts = np.searchsorted(batch.bases, positions[found], side="right") - 1
        order = np.argsort(parts, kind="stable")
        counts = np.bincount(parts, minlength=len(batch.tables))
        cuts = np.split(keys[found][order], np.cumsum(counts)[:-1])
        for table, own in zip(batch.tables, cuts, strict=True):
            if len(own):
                self.promote(table, own)


@dataclass(frozen=True, slots=True)
class DeviceBags:
    """Bags of one feature on the device: ``n`` keys, ``hotness`` per bag.

    They are pooled to ``out (n / hotness, dim)``. ``on_device``: the keys are there, too."""

    feature: Feature
    n: int
    hotness: int
    out: Any
    on_device: bool = False


def prepared_pooling(cache: Any, asks: Sequence[DeviceBags]) -> Any:
    """Prepare a pooling in one launch, of rows that are all in ``cache``."""
    return cache.prepare(
        [(ask.feature.table, ask.n, ask.hotness, ask.feature.pooling, ask.out) for ask in asks]
    )


def block_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the positions of arrays of ``sizes`` bytes in one block, and the block's bytes."""
    ends = np.cumsum([-(-size // _ALIGN) * _ALIGN for size in sizes]).tolist()
    return [0, *ends[:-1]], ends[-1]


class FilledFetch:
    """A prepared fetch and pooling that fills misses from host memory. One thread at a time.

    ``cache`` is a `GpuCache`, ``observe`` its meter. The caller fills ``keys``, each ``(n,) int64`` in
    pinned memory, or passes arrays to `run`, and calls `finish` once the stream is done.
    """

    def __init__(
        self,
        cache: Any,
        host: HostCaches,
        asks: Sequence[DeviceBags],
        observe: FetchObserver | None,
        meter: LookupMeter,
    ) -> None:
        self._cache, self._space, self._host = cache, cache.space, host
        self._features = [ask.feature for ask in asks]
        self._observe, self._meter = observe, meter
        self._sizes = np.array([ask.n for ask in asks])
        tables = [feature.table for feature in self._features]
        offsets, size = block_offsets(
            [ask.n * table.row_bytes for ask, table in zip(asks, tables, strict=True)]
        )
        self._block, total = self._space.allocate(size), int(self._sizes.sum())
        self._sources = self._space.bytes(total)
        starts = (np.cumsum(self._sizes) - self._sizes).tolist()
        self._rows = [
            self._space.array(self._block, at, (ask.n, table.row_width), table.row_dtype)
            for ask, table, at in zip(asks, tables, offsets, strict=True)
        ]
        self._own_sources = [
            self._sources[start : start + ask.n] for ask, start in zip(asks, starts, strict=True)
        ]
        self._fetch = cache.prepare_vectors(
            [(table, ask.n) for ask, table in zip(asks, tables, strict=True)],
            offsets,
            [ask.on_device for ask in asks],
            self._sources,
        )
        self.keys: list[NDArray[np.int64]] = self._fetch.keys
        self._arrays: Sequence[Any] = self.keys
        self._pooling = cache.prepare_rows(self._fixed_rows(asks))
        self._no_misses = np.zeros((len(asks), 2), np.int64)
        self._used, self._started, self._seconds = self._sizes, 0.0, 0.0
        self._answers: list[tuple[int, int, int]] = []

    def _fixed_rows(self, asks: Sequence[DeviceBags]) -> list[FixedRows]:
        return [
            FixedRows(
                self._rows[i],
                self._own_sources[i],
                self._space.upload(ask.feature.table.default),
                ask.hotness,
                ask.feature.pooling,
                ask.out,
                ask.feature.table.row_format,
            )
            for i, ask in enumerate(asks)
        ]

    def run(
        self,
        stream: Any,
        deadline: float | None,
        used: NDArray[np.int64] | None = None,
        arrays: Sequence[Any] | None = None,
    ) -> bool:
        """Launch all on ``stream``; False, with nothing pooled, if a row is not in memory.

        ``used (features,)``: how many of each feature's keys count; the others fill the batch."""
        counts, left = self._start(stream, used, arrays)
        if left is not None and not self._bring(left, stream, deadline):
            return False
        self._pool(stream, counts)
        return True

    def _start(
        self, stream: Any, used: NDArray[np.int64] | None, arrays: Sequence[Any] | None
    ) -> tuple[NDArray[np.int64], Sequence[NDArray[np.int64]] | None]:
        """Fetch, and fill misses that one gather finds; return `MissReport.counts` and its rest."""
        self._started = time.perf_counter()
        self._arrays = self.keys if arrays is None else arrays
        self._used = self._sizes if used is None else used
        self._space.clear(self._sources, stream)
        at, pool = self._space.address(self._block), self._host.pool
        self._fetch.launch(stream, at, arrays, pool, used)
        report = self._cache.fill_misses(self._fetch, stream, self._host.gather)
        self._seconds = time.perf_counter() - self._started
        counts = self._no_misses if report is None else report.counts
        self._answers = answered(self._used, counts, self._host.code)
        return counts, None if report is None else report.left

    def _pool(self, stream: Any, counts: NDArray[np.int64]) -> None:
        self._pooling.launch(stream)
        if self._observe is not None:
            each = zip(self._features, self._used.tolist(), counts.tolist(), strict=True)
            self._observe([(f.table, n, n - missed) for f, n, (missed, _) in each], self._seconds)

    def finish(self) -> int:
        """Report the sources of the rows; return the number of defaulted keys: deleted ones."""
        answers = [(self._features[i].table, code, n) for i, code, n in self._answers]
        names = [self._features[i].name for i, _, _ in self._answers]
        self._meter.counted(answers, time.perf_counter() - self._started, names)
        return sum(n for _, code, n in self._answers if code == Source.DEFAULT)

    def _bring(
        self, left: Sequence[NDArray[np.int64]], stream: Any, deadline: float | None
    ) -> bool:
        """Fetch the remaining rows through the bridge; False if some are still missing."""
        parts = self._parts(left)
        codes = fetch_over_bridge(self._host.bridge, self._space, parts, stream, deadline)
        for i, own in enumerate(codes or ()):
            self._answers += bridged(i, own)
        return codes is not None

    def _parts(self, left: Sequence[NDArray[np.int64]]) -> list[Part]:
        return [
            Part(feature.table, keys, rows, NO_VERSIONS, source, own)
            for feature, keys, rows, source, own in zip(
                self._features, self._arrays, self._rows, self._own_sources, left, strict=True
            )
        ]


def fetch_over_bridge(
    bridge: Tier | None,
    space: Any,
    parts: Sequence[Part],
    stream: Any,
    deadline: float | None,
) -> list[NDArray[np.uint8]] | None:
    """Fetch the misses of ``parts``; return each part's source codes at them, None if some stay missing."""
    searched = [part.missing for part in parts]
    if bridge is None:
        return None
    bridge.fetch([part for part in parts if len(part.missing)], FetchContext(deadline, stream))
    if any(len(part.missing) for part in parts):
        return None
    return [
        space.to_host(part.source, stream)[positions] if len(positions) else _NO_CODES
        for part, positions in zip(parts, searched, strict=True)
    ]


def answered(
    sizes: NDArray[np.int64], counts: NDArray[np.int64], code: int
) -> list[tuple[int, int, int]]:
    """Return ``(feature, source code, keys)`` for rows of the device and of host memory, ``code``.

    ``counts (features, 2)``: see `MissReport`."""
    missed, found = counts[:, 0], counts[:, 1]
    answers = [(i, int(Source.GPU), n) for i, n in enumerate((sizes - missed).tolist()) if n]
    return answers + [(i, code, n) for i, n in enumerate(found.tolist()) if n]


def bridged(feature: int, codes: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """Return the same for the source ``codes`` of one feature's keys."""
    counts = np.bincount(codes)
    return [(feature, code, int(counts[code])) for code in np.flatnonzero(counts).tolist()]
