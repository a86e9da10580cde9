"""Miss fill: pool prepared requests on the device although its cache misses some rows.

Launch the fetch of the rows in the cache; wait; copy the missing rows from host memory, all tables in
one launch; pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.backoff import CallBackoff
from hps.cuda.prepared import FixedRows
from hps.lookup.base import Feature
from hps.observability.meters import LookupMeter
from hps.tiers.base import Ask, FetchContext, Part, Tier
from hps.tiers.fused_lookup import FusedLookup
from hps.tiers.wrappers import FetchObserver, Promote
from hps.types import Source, oldest_tombstone

_CODES = max(Source) + 1
_GPU, _DEFAULT = int(Source.GPU), int(Source.DEFAULT)


class HostCaches:
    """The caches in host memory, which fill a device's misses without blocking. Thread-safe.

    ``memory`` finds all rows or none, in one call; ``bridge`` says for each key whether it was found.
    If ``memory`` found all, ``promote`` is called with their keys; ``bridge`` contains a `PromotingTier`."""

    def __init__(
        self,
        memory: FusedLookup | None = None,
        bridge: Tier | None = None,
        promote: Promote = lambda _table, _keys: None,
    ) -> None:
        self.memory = memory
        self.bridge = bridge
        self._promote = promote
        self._backoff = CallBackoff()

    def is_due(self) -> bool:
        """True if a `gather` is worth trying; False for a while after memory missed a row."""
        return self._backoff.is_due()

    def gather(self, asks: list[Ask]) -> bool:
        """Write the rows into ``asks``, and promote them; True if ``memory`` had every row.

        A deleted key has no row: then nothing is promoted, and the bridge reports the deletion."""
        assert self.memory is not None
        found = self.memory.gather(asks)
        self._backoff.record(worked=found)
        if found:
            for table, keys, _ in asks:
                self._promote(table, keys)
        return found


@dataclass(frozen=True, slots=True)
class DeviceBags:
    """Bags of one feature on the device: ``n`` keys, ``hotness`` per bag.

    They are pooled to ``out (n / hotness, dim)``."""

    feature: Feature
    n: int
    hotness: int
    out: Any


def prepared_pooling(cache: Any, asks: Sequence[DeviceBags]) -> Any:
    """Prepare a pooling in one launch, of rows that are all in ``cache``."""
    return cache.prepare(
        [
            (ask.feature.table, ask.n, ask.hotness, ask.feature.pooling == "mean", ask.out)
            for ask in asks
        ]
    )


class FilledFetch:
    """A prepared fetch and pooling that fills misses from host memory. One thread at a time.

    ``cache`` is a `GpuCache`, ``observe`` its meter. The caller fills ``keys``, each ``(n,) int64`` in
    pinned memory, calls `run`, and calls `finish` once the stream is done.
    """

    def __init__(
        self,
        cache: Any,
        host: HostCaches,
        asks: Sequence[DeviceBags],
        observe: FetchObserver | None,
        meter: LookupMeter,
    ) -> None:
        self._space = cache.space
        self._host = host
        self._features = [ask.feature for ask in asks]
        self._observe = observe
        self._meter = meter
        tables = [feature.table for feature in self._features]
        sizes = [ask.n for ask in asks]
        self._fetch = fetch = cache.prepare_fetch(list(zip(tables, sizes, strict=True)))
        self.keys: list[NDArray[np.int64]] = fetch.keys
        self._pooling = cache.prepare_rows(
            [
                FixedRows(
                    fetch.rows[i],
                    fetch.sources[i],
                    self._space.upload(ask.feature.table.default),
                    ask.hotness,
                    ask.feature.pooling == "mean",
                    ask.out,
                )
                for i, ask in enumerate(asks)
            ]
        )
        self._refill: Any = None
        if host.memory is not None:
            self._refill = cache.prepare_refill(fetch, tables, host.memory.info.source)
        self._sizes = np.array(sizes)
        self._codes = self._space.pinned(sum(sizes))
        # Added to the source codes, so that one histogram counts each feature's codes separately.
        self._bins = np.repeat(np.arange(len(sizes)) * _CODES, sizes)
        self._started = 0.0

    def run(
        self, stream: Any, deadline: float | None, used: NDArray[np.int64] | None = None
    ) -> bool:
        """Launch all on ``stream``; False, with nothing pooled, if a row is not in memory.

        ``used (features,)``: how many of each feature's keys count; the others fill the batch."""
        self._started, now = time.perf_counter(), time.time()
        fetch = self._fetch
        fetch.launch(stream, [oldest_tombstone(f.table, now) for f in self._features])
        stream.synchronize()
        misses = fetch.misses()
        seconds = time.perf_counter() - self._started
        if any(map(len, misses)) and not (
            self._gather(misses, stream) or self._bring(misses, stream, deadline)
        ):
            return False
        self._pooling.launch(stream)
        self._space.copy_to_host(self._codes, fetch.sources_block, stream)
        if self._observe is not None:
            sizes = (self._sizes if used is None else used).tolist()
            counts = zip(self._features, sizes, misses, strict=True)
            self._observe(
                [(f.table, n, n - int(np.searchsorted(left, n))) for f, n, left in counts], seconds
            )
        return True

    def finish(self, used: NDArray[np.int64] | None = None) -> int:
        """Report the sources of the rows; return the number of defaulted keys: deleted ones.

        ``used`` as for `run`."""
        # Most rows came from the device: counting only the others takes a third of the time.
        others = np.flatnonzero(self._codes != _GPU)
        sizes = self._sizes
        if used is not None:
            sizes = used
            features = self._bins[others] // _CODES
            starts = np.cumsum(self._sizes) - self._sizes
            others = others[others - starts[features] < used[features]]
        counts = np.bincount(
            self._codes[others] + self._bins[others], minlength=_CODES * len(self._features)
        ).reshape(-1, _CODES)
        defaulted = int(counts[:, _DEFAULT].sum())
        counts[:, _GPU] = sizes - counts.sum(axis=1)
        found = np.argwhere(counts).tolist()
        answers = [(self._features[i].table, code, int(counts[i, code])) for i, code in found]
        names = [self._features[i].name for i, _ in found]
        self._meter.counted(answers, time.perf_counter() - self._started, names)
        return defaulted

    def _gather(self, misses: Sequence[NDArray[np.int64]], stream: Any) -> bool:
        """Copy the missing rows to the device in one launch, if host memory has all of them."""
        if self._refill is None or not self._host.is_due():
            return False
        targets = self._refill.allocate(misses)
        asks = [
            (feature.table, keys[left], target)
            for feature, keys, left, target in zip(
                self._features, self.keys, misses, targets, strict=True
            )
            if len(left)
        ]
        if not self._host.gather(asks):
            return False
        self._refill.launch(stream)
        return True

    def _bring(
        self, misses: Sequence[NDArray[np.int64]], stream: Any, deadline: float | None
    ) -> bool:
        """Fetch the missing rows through the bridge; False if some are still missing."""
        if self._host.bridge is None:
            return False
        fetch = self._fetch
        parts = [
            Part(f.table, fetch.keys[i], fetch.rows[i], fetch.versions[i], fetch.sources[i], left)
            for i, (f, left) in enumerate(zip(self._features, misses, strict=True))
            if len(left)
        ]
        self._host.bridge.fetch(parts, FetchContext(deadline, stream))
        return not any(len(part.missing) for part in parts)
