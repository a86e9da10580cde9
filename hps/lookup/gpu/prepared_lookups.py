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
from hps.errors import Unavailable
from hps.lookup.base import Feature
from hps.lookup.gpu.miss_fill import DeviceBags, FilledFetch, HostCaches, prepared_pooling
from hps.observability.meters import LookupMeter
from hps.tiers.wrappers import FetchObserver
from hps.types import JaggedKeys, LookupResult, Source

_INT64 = np.dtype(np.int64)
_ALIGN = 256
_PREPARED_KEPT = 64
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
class _PreparedDeviceLookup:
    """A prepared pooling into one block, the fetch for misses, and each feature's position in the block."""

    pooled: Any
    block: Any
    slices: list[tuple[str, int, int, Any, tuple[int, ...]]]
    bags: list[DeviceBags]
    fetched: FilledFetch | None = None


class PreparedDeviceLookups:
    """Prepared lookups of a `GpuCache` (``device``); ``observe`` is its meter. Thread-safe."""

    def __init__(
        self, device: Any, host: HostCaches, observe: FetchObserver | None, meter: LookupMeter
    ) -> None:
        self._device = device
        self._host = host
        self._observe = observe
        self._meter = meter
        self._prepared: dict[Any, queue.SimpleQueue[_PreparedDeviceLookup]] = {}
        self._backoff = CallBackoff()
        self._fetch_backoff = CallBackoff()
        self._closed = False

    def close(self) -> None:
        """Free what was prepared; later lookups raise Unavailable."""
        self._closed = True
        self._prepared.clear()

    def lookup(
        self,
        key: Any,
        features: Sequence[Feature],
        keys: Sequence[JaggedKeys],
        deadline: float | None,
    ) -> LookupResult | None:
        """Return the vectors of ``features`` as new arrays, complete; None if a row is not in memory.

        ``key`` distinguishes requests that differ in more than their keys."""
        if self._closed:
            raise Unavailable("the GPU cache is closed")
        pooling, fetching = self._backoff.is_due(), self._fetch_backoff.is_due()
        if not (pooling or fetching):
            return None
        space = self._device.space
        idle = self._prepared.get(key)
        if idle is None:
            idle = memoize(self._prepared, key, queue.SimpleQueue(), _PREPARED_KEPT)
        stream = space.take_stream()
        result = None
        with space.device:
            try:
                prepared = idle.get_nowait()
            except queue.Empty:
                prepared = self._prepare(features, keys)
            try:
                if pooling:
                    result = self._pool(prepared, features, keys, stream)
                    self._backoff.record(worked=result is not None)
                if result is None and fetching:
                    result = self._fetch(prepared, features, keys, stream, deadline)
                    self._fetch_backoff.record(worked=result is not None)
            finally:
                stream.synchronize()  # its next user may have another stream
                idle.put(prepared)
                space.give_back(stream)
        return result

    def _pool(
        self,
        prepared: _PreparedDeviceLookup,
        features: Sequence[Feature],
        keys: Sequence[JaggedKeys],
        stream: Any,
    ) -> LookupResult | None:
        """Pool from the device alone."""
        started = time.perf_counter()
        for feature, mine, buffer in zip(features, keys, prepared.pooled.keys, strict=True):
            buffer[:] = feature.shift(mine.keys)
        prepared.pooled.launch(stream)
        result = LookupResult(self._copied_vectors(prepared, stream))
        if prepared.pooled.missing():
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
        prepared: _PreparedDeviceLookup,
        features: Sequence[Feature],
        keys: Sequence[JaggedKeys],
        stream: Any,
        deadline: float | None,
    ) -> LookupResult | None:
        """Pool after filling misses from host memory."""
        fetched = prepared.fetched
        if fetched is None:
            arguments = self._device, self._host, prepared.bags, self._observe, self._meter
            fetched = prepared.fetched = FilledFetch(*arguments)
        for feature, mine, buffer in zip(features, keys, fetched.keys, strict=True):
            buffer[:] = feature.shift(mine.keys)
        if not fetched.run(stream, deadline):
            return None
        vectors = self._copied_vectors(prepared, stream)
        return LookupResult(vectors, defaulted=fetched.finish())

    def _copied_vectors(self, prepared: _PreparedDeviceLookup, stream: Any) -> dict[str, Any]:
        """Copy the block's vectors to new arrays; waits for the stream."""
        space = self._device.space
        fresh = space.empty((len(prepared.block),), np.uint8, stream)
        space.assign(fresh, prepared.block, stream)
        stream.synchronize()
        return {
            name: fresh[start:stop].view(dtype).reshape(shape)
            for name, start, stop, dtype, shape in prepared.slices
        }

    def _prepare(
        self, features: Sequence[Feature], keys: Sequence[JaggedKeys]
    ) -> _PreparedDeviceLookup:
        shapes: list[tuple[int, ...]] = [
            (len(mine.keys) if f.pooling == "none" else mine.batch, f.table.dim)
            for f, mine in zip(features, keys, strict=True)
        ]
        sizes = [shape[0] * f.table.row_bytes for shape, f in zip(shapes, features, strict=True)]
        ends = np.cumsum([0, *(-(-size // _ALIGN) * _ALIGN for size in sizes)]).tolist()
        block = self._device.space.bytes(ends[-1])
        slices, bags = [], []
        for feature, mine, shape, size, (start, _) in zip(
            features, keys, shapes, sizes, pairwise(ends), strict=True
        ):
            dtype, n = feature.table.dtype, len(mine.keys)
            out = block[start : start + size].view(dtype).reshape(shape)
            bags.append(DeviceBags(feature, n, n // shape[0], out))
            slices.append((feature.name, start, start + size, dtype, shape))
        return _PreparedDeviceLookup(prepared_pooling(self._device, bags), block, slices, bags)
