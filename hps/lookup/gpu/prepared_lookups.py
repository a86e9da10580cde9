"""Prepared lookups on the device: every row is in device or host memory."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hps.backoff import CallBackoff
from hps.bounded_memo import memoize
from hps.lookup.base import Feature
from hps.lookup.gpu.miss_fill import DeviceBags, FilledFetch, LowerTiers, prepared_pooling
from hps.observability.meters import LookupMeter
from hps.tiers.wrappers import FetchObserver
from hps.types import JaggedKeys, LookupResult, Source

_INT64 = np.dtype(np.int64)
_ALIGN = 256
_TEMPLATES_KEPT = 64
_GPU = int(Source.GPU)

Signature = tuple[tuple[str, int, int], ...]


def request_signature(features: Mapping[str, JaggedKeys]) -> Signature | None:
    """Return the names, numbers of keys and batches of a request.

    None for requests with offsets, weights, keys that need conversion, or features without keys."""
    found = []
    for name, keys in features.items():
        plain = keys.offsets is None and keys.weights is None and keys.keys.dtype == _INT64
        if not plain or not len(keys.keys):
            return None
        found.append((name, len(keys.keys), keys.batch))
    return tuple(found)


@dataclass(slots=True)
class _DeviceTemplate:
    """A prepared pooling into one block, the fetch for misses, and each feature's position in the block."""

    pooled: Any
    block: Any
    places: list[tuple[str, int, int, Any, tuple[int, ...]]]
    bags: list[DeviceBags]
    fetched: FilledFetch | None = None


class PreparedDeviceLookups:
    """Prepared lookups of a `GpuCache` (``device``); ``observe`` is its meter. Thread-safe."""

    def __init__(
        self, device: Any, below: LowerTiers, observe: FetchObserver | None, meter: LookupMeter
    ) -> None:
        self._device = device
        self._below = below
        self._observe = observe
        self._meter = meter
        self._templates: dict[Any, queue.SimpleQueue[_DeviceTemplate]] = {}
        self._backoff = CallBackoff()
        self._backoff_below = CallBackoff()

    def lookup(
        self,
        key: Any,
        features: Sequence[Feature],
        keys: Sequence[JaggedKeys],
        deadline: float | None,
    ) -> LookupResult | None:
        """Return the vectors of ``features`` as new arrays, complete; None if a row is not in memory.

        ``key`` distinguishes requests that differ in more than their keys."""
        pooling, fetching = self._backoff.is_due(), self._backoff_below.is_due()
        if not (pooling or fetching):
            return None
        space = self._device.space
        templates = self._templates.get(key)
        if templates is None:
            templates = memoize(self._templates, key, queue.SimpleQueue(), _TEMPLATES_KEPT)
        stream = space.take_stream()
        result = None
        with space.device:
            try:
                template = templates.get_nowait()
            except queue.Empty:
                template = self._prepare(features, keys)
            try:
                if pooling:
                    result = self._pool(template, features, keys, stream)
                    self._backoff.record(worked=result is not None)
                if result is None and fetching:
                    result = self._fetch(template, features, keys, stream, deadline)
                    self._backoff_below.record(worked=result is not None)
            finally:
                stream.synchronize()  # the template's next user may have another stream
                templates.put(template)
                space.give_back(stream)
        return result

    def _pool(
        self,
        template: _DeviceTemplate,
        features: Sequence[Feature],
        keys: Sequence[JaggedKeys],
        stream: Any,
    ) -> LookupResult | None:
        """Pool from the device alone."""
        started = time.perf_counter()
        for feature, mine, there in zip(features, keys, template.pooled.keys, strict=True):
            there[:] = feature.shift(mine.keys)
        template.pooled.launch(stream)
        result = LookupResult(self._copied_vectors(template, stream))
        if template.pooled.missing():
            return None
        seconds = time.perf_counter() - started
        counts = [(f.table, len(k.keys)) for f, k in zip(features, keys, strict=True)]
        names = [feature.name for feature in features]
        self._meter.counted([(table, _GPU, n) for table, n in counts], seconds, names)
        if self._observe is not None:
            self._observe([(table, n, n) for table, n in counts], seconds)
        return result

    def _fetch(
        self,
        template: _DeviceTemplate,
        features: Sequence[Feature],
        keys: Sequence[JaggedKeys],
        stream: Any,
        deadline: float | None,
    ) -> LookupResult | None:
        """Pool after filling misses from host memory."""
        fetched = template.fetched
        if fetched is None:
            arguments = self._device, self._below, template.bags, self._observe, self._meter
            fetched = template.fetched = FilledFetch(*arguments)
        for feature, mine, there in zip(features, keys, fetched.keys, strict=True):
            there[:] = feature.shift(mine.keys)
        if not fetched.run(stream, deadline):
            return None
        vectors = self._copied_vectors(template, stream)
        return LookupResult(vectors, defaulted=fetched.finish())

    def _copied_vectors(self, template: _DeviceTemplate, stream: Any) -> dict[str, Any]:
        """Copy the block's vectors to new arrays; waits for the stream."""
        space = self._device.space
        fresh = space.empty((len(template.block),), np.uint8, stream)
        space.assign(fresh, template.block, stream)
        stream.synchronize()
        return {
            name: fresh[start:stop].view(dtype).reshape(shape)
            for name, start, stop, dtype, shape in template.places
        }

    def _prepare(self, features: Sequence[Feature], keys: Sequence[JaggedKeys]) -> _DeviceTemplate:
        shapes: list[tuple[int, ...]] = [
            (len(mine.keys) if f.pooling == "none" else mine.batch, f.table.dim)
            for f, mine in zip(features, keys, strict=True)
        ]
        sizes = [shape[0] * f.table.row_bytes for shape, f in zip(shapes, features, strict=True)]
        ends = np.cumsum([0, *(-(-size // _ALIGN) * _ALIGN for size in sizes)]).tolist()
        block = self._device.space.bytes(ends[-1])
        places, bags = [], []
        for feature, mine, shape, size, (start, _) in zip(
            features, keys, shapes, sizes, pairwise(ends), strict=True
        ):
            dtype, n = feature.table.dtype, len(mine.keys)
            out = block[start : start + size].view(dtype).reshape(shape)
            bags.append(DeviceBags(feature, n, n // shape[0], out))
            places.append((feature.name, start, start + size, dtype, shape))
        return _DeviceTemplate(prepared_pooling(self._device, bags), block, places, bags)
