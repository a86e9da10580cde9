"""Device path: predictions on one GPU, keys in, scores out; no vector is copied to the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.backoff import CallBackoff
from hps.bounded_memo import memoize
from hps.dense.lanes import DeviceLanes, LaneBinding, NetworkLane
from hps.lookup.base import Feature
from hps.lookup.checks import check_keys, check_sizes
from hps.lookup.gpu.device_lookup import DeviceLookup, DeviceLookupResult
from hps.lookup.gpu.miss_fill import DeviceBags, FilledFetch, prepared_pooling
from hps.lookup.gpu.prepared_lookups import request_signature
from hps.native import copy_keys
from hps.observability.meters import LookupMeter, TierMeter
from hps.tracing import call_timed, current_context
from hps.types import JaggedKeys, LookupRequest, LookupResult, PredictRequest, Source

_KEPT = 32
Arrays = dict[str, NDArray[Any]]


@dataclass(slots=True)
class _DevicePathTemplate:
    """The fixed part of predictions with the same numbers of keys on a lane.

    The features' keys, the destinations of their vectors, the network, and the vectors to widen or repeat
    afterwards; `pooled` and `fetched` are made on first use."""

    bags: list[DeviceBags]
    binding: LaneBinding
    assigned: list[tuple[Any, Any]]
    observe: Callable[[float], None]
    finished: Callable[[float], None]
    pooled: Any = None
    fetched: FilledFetch | None = None


class DevicePath:
    """Predictions of one model on one device. Thread-safe."""

    def __init__(
        self,
        lookup: DeviceLookup,
        lanes: DeviceLanes,
        feeds: Sequence[tuple[Feature, str]],
        observe: TierMeter,
        meter: LookupMeter,
    ) -> None:
        """``feeds``: each feature and the network's input that takes its vectors."""
        self.lookup = lookup
        self._cache = cache = lookup.cache
        self._space = cache.space
        self._host = lookup.host
        self._lanes = lanes
        self._feeds = tuple(feeds)
        self._observe = observe
        self._meter = meter
        self._held = all(cache.capacity(feature.table) for feature, _ in feeds)
        # Skips pooling straight from the cache for a while after a row was missing: that work was wasted.
        self._backoff = CallBackoff()

    def quick(
        self, request: PredictRequest, inputs: Arrays, batch: int, names: tuple[str, ...]
    ) -> tuple[Arrays, LookupResult] | None:
        """Return the outputs if every row is in memory, with the lookup's report.

        None if a store is needed, or if the request needs the slow path."""
        if not self._held or request.want_source or not batch:
            return None
        if request.deadline is not None and time.monotonic() > request.deadline:
            return None
        signature = request_signature(request.features)
        if signature is None:
            return None
        key = (batch, names, signature)
        with self._lanes.lease() as lane, self._space.device:
            template: _DevicePathTemplate | None = lane.kept.get(key)
            if template is None:
                template = self._prepare(lane, key, request, batch, names)
            if self._backoff.is_due():
                outputs = self._pool(lane, template, request.features, inputs)
                if outputs is not None:
                    return outputs, LookupResult({})
            return self._fetch(lane, template, request, inputs)

    def run(
        self,
        rows: LookupResult,
        inputs: Arrays,
        batch: int,
        names: tuple[str, ...],
        deadline: float | None = None,
    ) -> Arrays:
        """Compute the outputs from ``rows``, the lookup's result; a started run ignores the deadline."""
        assert isinstance(rows, DeviceLookupResult)
        with self._lanes.lease() as lane:
            binding = lane.binding_for(batch, names)
            outs, assigned = self._outs(lane, binding, rows.shapes)
            rows.into(outs, lane.stream)
            self._assign(lane, assigned)
            binding.start(inputs)
            return binding.finish()

    def close(self) -> None:
        """Free the lanes once their runs have ended; later predictions raise Unavailable."""
        self._lanes.close()

    # -- device paths ------------------------------------------------------------------------------

    def _pool(
        self,
        lane: NetworkLane,
        template: _DevicePathTemplate,
        features: Mapping[str, JaggedKeys],
        inputs: Arrays,
    ) -> Arrays | None:
        """Pool from the cache alone and run the network, with one wait; None if a row is missing."""
        started = time.perf_counter()
        pooled = template.pooled
        if pooled is None:
            pooled = template.pooled = prepared_pooling(self._cache, template.bags)
        part = current_context()
        call_timed(part, "rows", self._begin, lane, template, features, pooled)
        # A missing row is detected only after the network has run: checking first would cost another wait.
        outputs = call_timed(part, "network", _run, template.binding, inputs)
        missing = pooled.missing()
        self._backoff.record(worked=not missing)
        if missing:
            return None
        seconds = time.perf_counter() - started
        template.observe(seconds)
        template.finished(seconds)
        return outputs

    def _fetch(
        self,
        lane: NetworkLane,
        template: _DevicePathTemplate,
        request: PredictRequest,
        inputs: Arrays,
    ) -> tuple[Arrays, LookupResult] | None:
        """Fetch the rows, missing ones from ``host``, and pool them; None if some are missing there too."""
        fetched = template.fetched
        if fetched is None:
            arguments = self._cache, self._host, template.bags, self._observe, self._meter
            fetched = template.fetched = FilledFetch(*arguments)
        part = current_context()
        keys = _table_keys(template.bags, request.features)
        if not call_timed(part, "rows", fetched.run, lane.stream, request.deadline, None, keys):
            return None
        self._assign(lane, template.assigned)
        outputs = call_timed(part, "network", _run, template.binding, inputs)
        return outputs, LookupResult({}, defaulted=fetched.finish())

    def _begin(
        self,
        lane: NetworkLane,
        template: _DevicePathTemplate,
        features: Mapping[str, JaggedKeys],
        pooled: Any,
    ) -> None:
        """Launch the pooling."""
        copy_keys(_table_keys(template.bags, features), pooled.flat, self._host.pool)
        pooled.launch(lane.stream)
        self._assign(lane, template.assigned)

    def _assign(self, lane: NetworkLane, assigned: Sequence[tuple[Any, Any]]) -> None:
        for target, source in assigned:
            self._space.assign(target, source, lane.stream)

    # -- preparation -------------------------------------------------------------------------------

    def _prepare(
        self,
        lane: NetworkLane,
        key: tuple[Any, ...],
        request: PredictRequest,
        batch: int,
        names: tuple[str, ...],
    ) -> _DevicePathTemplate:
        """Check a request of a new form and prepare for others like it. Raises BadRequest."""
        check_sizes(self.lookup.model, LookupRequest(request.features, request.deadline))
        counts, shapes = [], {}
        for feature, _ in self._feeds:
            keys = check_keys(feature, request.features[feature.name])
            n = len(keys.keys)
            bags = n if feature.pooling == "none" else keys.batch
            shapes[feature.name] = (bags, feature.table.dim)
            counts.append((feature.table, n, n))
        binding = lane.binding_for(batch, names)  # first: it may clear `lane.kept`
        outs, assigned = self._outs(lane, binding, shapes)
        codes = [
            (table, bytes([Source.GPU]) * n, [(feature.name, n)])
            for (feature, _), (table, n, _) in zip(self._feeds, counts, strict=True)
        ]
        template = _DevicePathTemplate(
            [
                DeviceBags(feature, n, n // shapes[feature.name][0], outs[feature.name])
                for (feature, _), (_, n, _) in zip(self._feeds, counts, strict=True)
            ],
            binding,
            assigned,
            self._observe.prepare(counts),
            self._meter.finished_alike(codes),
        )
        memoize(lane.kept, key, template, _KEPT)
        return template

    def _outs(
        self, lane: NetworkLane, binding: LaneBinding, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
        """Return each feature's destination on the device, and the assignments to make after pooling.

        The destination is the network's own input or, for vectors to widen or repeat, a new array that
        is then assigned to that input."""
        outs, assigned = {}, []
        for feature, tensor in self._feeds:
            feed, shape, dtype = binding.feeds[tensor], shapes[feature.name], feature.table.dtype
            flat = feed.reshape(-1, feature.table.dim)
            if flat.shape == shape and flat.dtype == dtype:
                outs[feature.name] = flat
                continue
            array = outs[feature.name] = self._space.empty(shape, dtype, lane.stream)
            assigned.append((feed, array.reshape(-1, *feed.shape[1:])))
        return outs, assigned


def _run(binding: LaneBinding, inputs: Arrays) -> Arrays:
    binding.start(inputs)
    return binding.finish()


def _table_keys(
    bags: Sequence[DeviceBags], features: Mapping[str, JaggedKeys]
) -> list[NDArray[np.int64]]:
    """Return the keys of ``features``, converted to the tables' keys."""
    return [each.feature.shift(features[each.feature.name].keys) for each in bags]
