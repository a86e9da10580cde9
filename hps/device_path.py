"""The whole prediction on one device: keys in, scores out, and no vector comes down in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.prepared import FixedRows
from hps.dense.lanes import DeviceLanes, Form, Lane, address
from hps.lookup.at_once import Patience, signature_of
from hps.lookup.base import Feature
from hps.lookup.checks import check_keys, check_sizes
from hps.lookup.on_device import DeviceLookup, DeviceResult
from hps.meters import LookupMeter, TierMeter
from hps.tiers.base import FetchContext, Part, Tier
from hps.types import (
    EmbeddingTable,
    JaggedKeys,
    LookupRequest,
    LookupResult,
    PredictRequest,
    Source,
    oldest_tombstone,
)

_KEPT = 32
Arrays = dict[str, NDArray[Any]]


@dataclass(slots=True)
class _Alike:
    """What predictions with the same numbers of keys have in common on a lane: the features, the network,
    where each feature's vectors go and what must then be widened or repeated; `pooled` and `fetched` once
    they were needed."""

    features: list[Feature]
    counts: list[tuple[EmbeddingTable, int, int]]
    form: Form
    outs: dict[str, Any]
    assigned: list[tuple[Any, Any]]
    observe: Callable[[float], None]
    finished: Callable[[float], None]
    hotness: list[int]
    pooled: Any = None
    fetched: _Fetched | None = None


@dataclass(slots=True)
class _Fetched:
    """A prepared fetch, the pooling of its rows, where its sources come down to, and each table's first."""

    fetch: Any
    rows: Any
    codes: NDArray[np.uint8]
    starts: NDArray[np.int64]


class DevicePath:
    """One model on one device. Any number of threads may call it."""

    def __init__(
        self,
        lookup: DeviceLookup,
        cache: Any,
        below: Tier | None,
        lanes: DeviceLanes,
        feeds: Sequence[tuple[Feature, str]],
        observe: TierMeter,
        meter: LookupMeter,
    ) -> None:
        """``feeds``: each feature and the network's input that takes its vectors; ``below``: what may be
        asked for rows that ``cache`` lacks, without waiting."""
        self.lookup = lookup
        self._cache = cache
        self._space = cache.space
        self._below = below
        self._lanes = lanes
        self._feeds = tuple(feeds)
        self._observe = observe
        self._meter = meter
        self._held = all(cache.capacity(feature.table) for feature, _ in feeds)
        # Pooling straight from the cache is in vain when a row is missing.
        self._patience = Patience()

    def quick(
        self, request: PredictRequest, inputs: Arrays, batch: int, names: tuple[str, ...]
    ) -> tuple[Arrays, LookupResult] | None:
        """The outputs of a request whose every row is in memory, and what there is to say of the lookup.
        None: a store must be asked, or the request wants what only the ordinary way gives."""
        if not self._held or request.want_source or not batch:
            return None
        if request.deadline is not None and time.monotonic() > request.deadline:
            return None
        signature = signature_of(request.features)
        if signature is None:
            return None
        key = (batch, names, signature)
        with self._lanes.lease() as lane, self._space.device:
            alike: _Alike | None = lane.kept.get(key)
            if alike is None:
                alike = self._prepare(lane, key, request, batch, names)
            if self._patience.is_due():
                outputs = self._pool(lane, alike, request.features, inputs)
                if outputs is not None:
                    return outputs, LookupResult({})
            return self._fetch(lane, alike, request, inputs)

    def run(self, rows: LookupResult, inputs: Arrays, batch: int, names: tuple[str, ...]) -> Arrays:
        """The outputs from ``rows``, the lookup's result."""
        assert isinstance(rows, DeviceResult)
        with self._lanes.lease() as lane:
            form = lane.form(batch, names)
            outs, assigned = self._outs(lane, form, rows.shapes)
            rows.into(outs, lane.stream)
            self._assign(lane, assigned)
            form.start(inputs)
            return form.finish()

    # -- the quick ways ----------------------------------------------------------------------------

    def _pool(
        self, lane: Lane, alike: _Alike, features: Mapping[str, JaggedKeys], inputs: Arrays
    ) -> Arrays | None:
        """One launch for the vectors, and one wait; None when a row is missing."""
        started = time.perf_counter()
        pooled = alike.pooled
        if pooled is None:
            pooled = alike.pooled = self._cache.prepare(
                [
                    (f.table, n, hotness, f.pooling == "mean", alike.outs[f.name])
                    for f, (_, n, _), hotness in zip(
                        alike.features, alike.counts, alike.hotness, strict=True
                    )
                ]
            )
        for feature, there in zip(alike.features, pooled.keys, strict=True):
            there[:] = feature.shift(features[feature.name].keys)
        pooled.launch(lane.stream)
        self._assign(lane, alike.assigned)
        # Whether a row was missing is known only later. Until then the network is under way.
        alike.form.start(inputs)
        outputs = alike.form.finish()
        missing = pooled.missing()
        self._patience.tell(worked=not missing)
        if missing:
            return None
        seconds = time.perf_counter() - started
        alike.observe(seconds)
        alike.finished(seconds)
        return outputs

    def _fetch(
        self, lane: Lane, alike: _Alike, request: PredictRequest, inputs: Arrays
    ) -> tuple[Arrays, LookupResult] | None:
        """Fetch the rows, those that are missing from ``below``, and pool them; None when that lacks some."""
        started = time.perf_counter()
        fetched = alike.fetched
        if fetched is None:
            fetched = alike.fetched = self._prepare_fetch(alike)
        fetch, now = fetched.fetch, time.time()
        for feature, there in zip(alike.features, fetch.keys, strict=True):
            there[:] = feature.shift(request.features[feature.name].keys)
        fetch.launch(lane.stream, [oldest_tombstone(f.table, now) for f in alike.features])
        lane.stream.synchronize()
        misses = fetch.misses()
        seconds = time.perf_counter() - started
        if not self._complete(lane, alike, fetch, misses, request.deadline):
            return None
        fetched.rows.launch(lane.stream)
        self._assign(lane, alike.assigned)
        alike.form.start(inputs)
        codes, block = fetched.codes, fetch.sources_block
        self._space.copy(address(codes), address(block), len(codes), lane.stream)
        outputs = alike.form.finish()
        self._observe(
            [(t, n, n - len(left)) for (t, n, _), left in zip(alike.counts, misses, strict=True)],
            seconds,
        )
        return outputs, self._count(alike, fetched, time.perf_counter() - started)

    def _complete(
        self,
        lane: Lane,
        alike: _Alike,
        fetch: Any,
        misses: Sequence[NDArray[np.int64]],
        deadline: float | None,
    ) -> bool:
        parts = [
            Part(f.table, fetch.keys[i], fetch.rows[i], fetch.versions[i], fetch.sources[i], left)
            for i, (f, left) in enumerate(zip(alike.features, misses, strict=True))
            if len(left)
        ]
        if not parts:
            return True
        if self._below is None:
            return False
        self._below.fetch(parts, FetchContext(deadline, lane.stream))
        return not any(len(part.missing) for part in parts)

    def _count(self, alike: _Alike, fetched: _Fetched, seconds: float) -> LookupResult:
        """Tell where the rows came from; what was answered with a default was deleted."""
        answers = []
        for code in np.flatnonzero(np.bincount(fetched.codes)).tolist():
            per_table = np.add.reduceat(fetched.codes == code, fetched.starts, dtype=np.int64)
            answers += [
                (feature.table, code, n)
                for feature, n in zip(alike.features, per_table.tolist(), strict=True)
                if n
            ]
        self._meter.counted(answers, seconds)
        defaulted = len(fetched.codes) - int(np.count_nonzero(fetched.codes))
        return LookupResult({}, defaulted=defaulted)

    def _assign(self, lane: Lane, assigned: Sequence[tuple[Any, Any]]) -> None:
        for to, source in assigned:
            self._space.assign(to, source, lane.stream)

    # -- preparing them ----------------------------------------------------------------------------

    def _prepare(
        self,
        lane: Lane,
        key: tuple[Any, ...],
        request: PredictRequest,
        batch: int,
        names: tuple[str, ...],
    ) -> _Alike:
        """Check a request of a kind that was not seen before. Raises BadRequest."""
        check_sizes(self.lookup.model, LookupRequest(request.features, request.deadline))
        counts, shapes = [], {}
        for feature, _ in self._feeds:
            keys = check_keys(feature, request.features[feature.name])
            n = len(keys.keys)
            bags = n if feature.pooling == "none" else keys.batch
            shapes[feature.name] = (bags, feature.table.dim)
            counts.append((feature.table, n, n))
        form = lane.form(batch, names)  # first: it may clear what the lane keeps
        outs, assigned = self._outs(lane, form, shapes)
        codes = [(table, bytes([Source.GPU]) * n) for table, n, _ in counts]
        alike = _Alike(
            [feature for feature, _ in self._feeds],
            counts,
            form,
            outs,
            assigned,
            self._observe.alike(counts),
            self._meter.finished_alike(codes),
            [n // shapes[f.name][0] for (f, _), (_, n, _) in zip(self._feeds, counts, strict=True)],
        )
        if len(lane.kept) >= _KEPT:
            lane.kept.clear()
        lane.kept[key] = alike
        return alike

    def _prepare_fetch(self, alike: _Alike) -> _Fetched:
        fetch = self._cache.prepare_fetch([(table, n) for table, n, _ in alike.counts])
        asks = [
            FixedRows(
                fetch.rows[i],
                fetch.sources[i],
                self._space.upload(feature.table.default),
                alike.hotness[i],
                feature.pooling == "mean",
                alike.outs[feature.name],
            )
            for i, feature in enumerate(alike.features)
        ]
        sizes = [n for _, n, _ in alike.counts]
        starts = np.cumsum([0, *sizes[:-1]])
        codes = self._space.pinned(sum(sizes))
        return _Fetched(fetch, self._cache.prepare_rows(asks), codes, starts)

    def _outs(
        self, lane: Lane, form: Form, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
        """Where each feature's vectors go: the network's own input, or, if they must be widened or repeated,
        an array of their own and then, by assignment, that input."""
        outs, assigned = {}, []
        for feature, tensor in self._feeds:
            feed, shape, dtype = form.feeds[tensor], shapes[feature.name], feature.table.dtype
            flat = feed.reshape(-1, feature.table.dim)
            if flat.shape == shape and flat.dtype == dtype:
                outs[feature.name] = flat
                continue
            own = outs[feature.name] = self._space.empty(shape, dtype, lane.stream)
            assigned.append((feed, own.reshape(-1, *feed.shape[1:])))
        return outs, assigned
