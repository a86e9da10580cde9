"""The whole prediction on one device: keys in, scores out, and no vector comes down in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.dense.lanes import DeviceLanes, LaneBinding, NetworkLane
from hps.lookup.backoff import Backoff
from hps.lookup.base import Feature
from hps.lookup.checks import check_keys, check_sizes
from hps.lookup.gpu.device_lookup import DeviceLookup, DeviceLookupResult
from hps.lookup.gpu.miss_fill import DeviceBags, FilledFetch, LowerTiers, prepared_pooling
from hps.lookup.gpu.prepared_lookups import request_signature
from hps.observability.meters import LookupMeter, TierMeter
from hps.tracing import call_timed, current_context
from hps.types import JaggedKeys, LookupRequest, LookupResult, PredictRequest, Source

_KEPT = 32
Arrays = dict[str, NDArray[Any]]


@dataclass(slots=True)
class _DevicePathTemplate:
    """What predictions with the same numbers of keys have in common on a lane: the features' keys and where
    their vectors go, the network, what must then be widened or repeated; `pooled` and `fetched` once they
    were needed."""

    bags: list[DeviceBags]
    form: LaneBinding
    assigned: list[tuple[Any, Any]]
    observe: Callable[[float], None]
    finished: Callable[[float], None]
    pooled: Any = None
    fetched: FilledFetch | None = None


class DevicePath:
    """One model on one device. Any number of threads may call it."""

    def __init__(
        self,
        lookup: DeviceLookup,
        cache: Any,
        below: LowerTiers,
        lanes: DeviceLanes,
        feeds: Sequence[tuple[Feature, str]],
        observe: TierMeter,
        meter: LookupMeter,
    ) -> None:
        """``feeds``: each feature and the network's input that takes its vectors."""
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
        self._patience = Backoff()

    def quick(
        self, request: PredictRequest, inputs: Arrays, batch: int, names: tuple[str, ...]
    ) -> tuple[Arrays, LookupResult] | None:
        """The outputs of a request whose every row is in memory, and what there is to say of the lookup.
        None: a store must be asked, or the request wants what only the ordinary way gives."""
        if not self._held or request.want_source or not batch:
            return None
        if request.deadline is not None and time.monotonic() > request.deadline:
            return None
        signature = request_signature(request.features)
        if signature is None:
            return None
        key = (batch, names, signature)
        with self._lanes.lease() as lane, self._space.device:
            alike: _DevicePathTemplate | None = lane.kept.get(key)
            if alike is None:
                alike = self._prepare(lane, key, request, batch, names)
            if self._patience.is_due():
                outputs = self._pool(lane, alike, request.features, inputs)
                if outputs is not None:
                    return outputs, LookupResult({})
            return self._fetch(lane, alike, request, inputs)

    def run(
        self,
        rows: LookupResult,
        inputs: Arrays,
        batch: int,
        names: tuple[str, ...],
        deadline: float | None = None,
    ) -> Arrays:
        """The outputs from ``rows``, the lookup's result; what has begun here is not broken off."""
        assert isinstance(rows, DeviceLookupResult)
        with self._lanes.lease() as lane:
            form = lane.form(batch, names)
            outs, assigned = self._outs(lane, form, rows.shapes)
            rows.into(outs, lane.stream)
            self._assign(lane, assigned)
            form.start(inputs)
            return form.finish()

    # -- the quick ways ----------------------------------------------------------------------------

    def _pool(
        self,
        lane: NetworkLane,
        alike: _DevicePathTemplate,
        features: Mapping[str, JaggedKeys],
        inputs: Arrays,
    ) -> Arrays | None:
        """One launch for the vectors, and one wait; None when a row is missing."""
        started = time.perf_counter()
        pooled = alike.pooled
        if pooled is None:
            pooled = alike.pooled = prepared_pooling(self._cache, alike.bags)
        part = current_context()
        call_timed(part, "rows", self._begin, lane, alike, features, pooled)
        # Whether a row was missing is known only later. Until then the network is under way.
        outputs = call_timed(part, "network", _run, alike.form, inputs)
        missing = pooled.missing()
        self._patience.tell(worked=not missing)
        if missing:
            return None
        seconds = time.perf_counter() - started
        alike.observe(seconds)
        alike.finished(seconds)
        return outputs

    def _fetch(
        self, lane: NetworkLane, alike: _DevicePathTemplate, request: PredictRequest, inputs: Arrays
    ) -> tuple[Arrays, LookupResult] | None:
        """Fetch the rows, those that are missing from ``below``, and pool them; None when that lacks some."""
        fetched = alike.fetched
        if fetched is None:
            given = self._cache, self._below, alike.bags, self._observe, self._meter
            fetched = alike.fetched = FilledFetch(*given)
        part = current_context()
        _fill(alike.bags, request.features, fetched.keys)
        if not call_timed(part, "rows", fetched.run, lane.stream, request.deadline):
            return None
        self._assign(lane, alike.assigned)
        outputs = call_timed(part, "network", _run, alike.form, inputs)
        return outputs, LookupResult({}, defaulted=fetched.finish())

    def _begin(
        self,
        lane: NetworkLane,
        alike: _DevicePathTemplate,
        features: Mapping[str, JaggedKeys],
        pooled: Any,
    ) -> None:
        """Have the vectors made."""
        _fill(alike.bags, features, pooled.keys)
        pooled.launch(lane.stream)
        self._assign(lane, alike.assigned)

    def _assign(self, lane: NetworkLane, assigned: Sequence[tuple[Any, Any]]) -> None:
        for to, source in assigned:
            self._space.assign(to, source, lane.stream)

    # -- preparing them ----------------------------------------------------------------------------

    def _prepare(
        self,
        lane: NetworkLane,
        key: tuple[Any, ...],
        request: PredictRequest,
        batch: int,
        names: tuple[str, ...],
    ) -> _DevicePathTemplate:
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
        codes = [
            (table, bytes([Source.GPU]) * n, [(feature.name, n)])
            for (feature, _), (table, n, _) in zip(self._feeds, counts, strict=True)
        ]
        alike = _DevicePathTemplate(
            [
                DeviceBags(feature, n, n // shapes[feature.name][0], outs[feature.name])
                for (feature, _), (_, n, _) in zip(self._feeds, counts, strict=True)
            ],
            form,
            assigned,
            self._observe.prepare(counts),
            self._meter.finished_alike(codes),
        )
        if len(lane.kept) >= _KEPT:
            lane.kept.clear()
        lane.kept[key] = alike
        return alike

    def _outs(
        self, lane: NetworkLane, form: LaneBinding, shapes: Mapping[str, tuple[int, ...]]
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


def _run(form: LaneBinding, inputs: Arrays) -> Arrays:
    form.start(inputs)
    return form.finish()


def _fill(
    bags: Sequence[DeviceBags],
    features: Mapping[str, JaggedKeys],
    there: Sequence[NDArray[np.int64]],
) -> None:
    """The tables' keys for ``features`` into pinned memory."""
    for each, keys in zip(bags, there, strict=True):
        keys[:] = each.feature.shift(features[each.feature.name].keys)
