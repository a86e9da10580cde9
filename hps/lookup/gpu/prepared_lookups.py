"""Prepared lookups on the device: every row is in device or host memory."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hps.backoff import CallBackoff
from hps.bounded_memo import memoize
from hps.errors import Unavailable
from hps.lookup.base import Feature
from hps.lookup.gpu.miss_fill import (
    DeviceBags,
    FilledFetch,
    HostCaches,
    block_offsets,
    prepared_pooling,
)
from hps.lookup.gpu.vector_lookups import PreparedVectors, VectorLookups
from hps.lookup.pooling import is_pooled
from hps.observability.meters import LookupMeter
from hps.tiers.wrappers import FetchObserver
from hps.types import JaggedKeys, LookupResult, Source

_INT64, _FLAT = np.dtype(np.int64), (8,)
_PREPARED_KEPT = 64
_GPU = int(Source.GPU)

Signature = tuple[tuple[str, int, int, bool], ...]


def request_signature(features: Mapping[str, JaggedKeys]) -> Signature | None:
    """Return the names, numbers of keys and batches of a request, and whether keys are on the host.

    None for requests with offsets, weights, keys that need conversion or have strides, or features without
    keys."""
    found = []
    for name, keys in features.items():
        flat = keys.keys
        plain = keys.offsets is None and keys.weights is None and flat.dtype == _INT64
        n = len(flat)
        if not plain or not n or not (flat.strides == _FLAT or flat.flags.c_contiguous):
            return None
        found.append((name, n, keys.batch, type(flat) is np.ndarray))
    return tuple(found)


def array_signature(features: Mapping[str, Any], space: Any) -> Signature | None:
    """Return `request_signature` for a caller's contiguous arrays ``(n,) int64`` on the host or on the device
    of ``space``, as keys of n samples; None if there are others."""
    found = []
    for name, keys in features.items():
        on_host = type(keys) is np.ndarray
        if not on_host and not space.holds(keys):
            return None
        n = len(keys)
        if keys.dtype != _INT64 or keys.strides != _FLAT or not n:
            return None
        found.append((name, n, n, on_host))
    return tuple(found)


@dataclass(slots=True)
class _PreparedPooled:
    """A prepared pooling into one block, the fetch for misses, and each feature's position in the block."""

    pooled: Any
    block: Any
    size: int
    places: list[tuple[str, int, tuple[int, int], Any]]
    bags: list[DeviceBags]
    ordered: Any
    """An event, see `DeviceSpace.after_current`."""
    shifts: bool
    """Whether any feature's keys differ from its table's."""
    fetched: FilledFetch | None = None


_Prepared = _PreparedPooled | PreparedVectors


class PreparedDeviceLookups:
    """Prepared lookups of a `GpuCache` (``device``); ``observe`` is its meter. Thread-safe."""

    def __init__(
        self, device: Any, host: HostCaches, observe: FetchObserver | None, meter: LookupMeter
    ) -> None:
        self._device, self._space, self._host = device, device.space, host
        self._observe, self._meter = observe, meter
        self._vectors = VectorLookups(device, host, observe, meter)
        self._prepared: dict[Any, queue.SimpleQueue[_Prepared]] = {}
        self._backoff = CallBackoff()
        self._fetch_backoff = CallBackoff()
        self._closed = False
        self._current_stream_lock = threading.Lock()

    def close(self) -> None:
        """Free what was prepared; later lookups raise Unavailable."""
        self._closed = True
        self._prepared.clear()

    def lookup(
        self,
        key: Any,
        features: Sequence[Feature],
        arrays: Sequence[Any],
        deadline: float | None,
        keys: Sequence[JaggedKeys] | None = None,
    ) -> LookupResult | None:
        """Return the vectors of ``features`` as new arrays, complete; None if a row is not in memory.

        ``arrays``: their keys; ``keys``: the same with their bags, None for a key per sample. ``key``
        distinguishes requests that differ in more than their keys. Keys on the device are read after the work
        on the thread's current stream."""
        if self._closed:
            raise Unavailable("the GPU cache is closed")
        idle = self._prepared.get(key)
        if idle is None:
            idle = memoize(self._prepared, key, queue.SimpleQueue(), _PREPARED_KEPT)
        space = self._space
        with space.device.entered():
            try:
                prepared = idle.get_nowait()
            except queue.Empty:
                prepared = self._prepare(features, keys or [JaggedKeys(k, len(k)) for k in arrays])
            if isinstance(prepared, PreparedVectors) and self._current_stream_lock.acquire(
                blocking=False
            ):
                # Without an event between two streams: two calls of the driver fewer. One lookup at a time,
                # since those that share a stream wait for each other.
                lent, stream = None, space.current_stream()
            else:
                lent = stream = space.take_stream()
            waits = True
            try:
                if prepared.shifts:
                    arrays = [f.shift(mine) for f, mine in zip(features, arrays, strict=True)]
                if isinstance(prepared, PreparedVectors):
                    result = self._look_up_vectors(prepared, features, arrays, stream, deadline)
                    waits = False
                    return result
                return self._look_up_pooled(prepared, features, arrays, stream, deadline)
            finally:
                if waits:
                    stream.synchronize()  # its next user may have another stream
                idle.put(prepared)
                if lent is None:
                    self._current_stream_lock.release()
                else:
                    space.give_back(lent)

    def _look_up_vectors(
        self,
        prepared: PreparedVectors,
        features: Sequence[Feature],
        arrays: Sequence[Any],
        stream: Any,
        deadline: float | None,
    ) -> LookupResult | None:
        if not self._fetch_backoff.is_due():
            return None
        result = self._vectors.lookup(prepared, features, arrays, stream, deadline)
        self._fetch_backoff.record(worked=result is not None)
        return result

    def _look_up_pooled(
        self,
        prepared: _PreparedPooled,
        features: Sequence[Feature],
        arrays: Sequence[Any],
        stream: Any,
        deadline: float | None,
    ) -> LookupResult | None:
        result = None
        self._space.after_current(stream, prepared.ordered)
        if self._backoff.is_due():
            result = self._pool(prepared, features, arrays, stream)
            self._backoff.record(worked=result is not None)
        if result is None and self._fetch_backoff.is_due():
            result = self._fetch(prepared, arrays, stream, deadline)
            self._fetch_backoff.record(worked=result is not None)
        return result

    def _pool(
        self,
        prepared: _PreparedPooled,
        features: Sequence[Feature],
        arrays: Sequence[Any],
        stream: Any,
    ) -> LookupResult | None:
        """Pool from the device alone."""
        started = time.perf_counter()
        on_device = {}
        for i, (mine, buffer) in enumerate(zip(arrays, prepared.pooled.keys, strict=True)):
            if type(mine) is np.ndarray:
                buffer[:] = mine
            else:
                on_device[i] = self._space.array_address(mine)
        prepared.pooled.launch(stream, on_device)
        result = LookupResult(self._copied_vectors(prepared, stream))
        if prepared.pooled.missing():
            return None
        seconds = time.perf_counter() - started
        counts = [(f.table, len(mine)) for f, mine in zip(features, arrays, strict=True)]
        names = [feature.name for feature in features]
        self._meter.counted([(table, _GPU, n) for table, n in counts], seconds, names)
        if self._observe is not None:
            self._observe([(table, n, n) for table, n in counts], seconds)
        return result

    def _fetch(
        self,
        prepared: _PreparedPooled,
        arrays: Sequence[Any],
        stream: Any,
        deadline: float | None,
    ) -> LookupResult | None:
        """Pool after filling misses from host memory."""
        fetched = prepared.fetched
        if fetched is None:
            arguments = self._device, self._host, prepared.bags, self._observe, self._meter
            fetched = prepared.fetched = FilledFetch(*arguments)
        if not fetched.run(stream, deadline, arrays=arrays):
            return None
        vectors = self._copied_vectors(prepared, stream)
        return LookupResult(vectors, defaulted=fetched.finish())

    def _copied_vectors(self, prepared: _PreparedPooled, stream: Any) -> dict[str, Any]:
        """Copy the block's vectors to new arrays; waits for the stream."""
        space = self._space
        fresh = space.allocate(prepared.size)
        to, source = space.address(fresh), space.address(prepared.block)
        space.copy(to, source, prepared.size, stream)
        stream.synchronize()
        return {
            name: space.array(fresh, at, shape, dtype) for name, at, shape, dtype in prepared.places
        }

    def _prepare(self, features: Sequence[Feature], keys: Sequence[JaggedKeys]) -> _Prepared:
        on_device = [type(mine.keys) is not np.ndarray for mine in keys]
        pairs = list(zip(features, keys, strict=True))
        if not any(
            is_pooled(feature.pooling, mine) or not feature.table.stores_vectors
            for feature, mine in pairs
        ):
            return self._vectors.prepare(features, keys, on_device)
        shapes = [
            (len(mine.keys) if f.pooling == "none" else mine.batch, f.table.dim)
            for f, mine in pairs
        ]
        offsets, size = block_offsets(
            [n * dim * f.table.dtype.itemsize for (n, dim), f in zip(shapes, features, strict=True)]
        )
        block = self._space.allocate(size)
        places, bags = [], []
        for (feature, mine), shape, at, there in zip(
            pairs, shapes, offsets, on_device, strict=True
        ):
            dtype, n = feature.table.dtype, len(mine.keys)
            out = self._space.array(block, at, shape, dtype)
            bags.append(DeviceBags(feature, n, n // shape[0], out, there))
            places.append((feature.name, at, shape, dtype))
        pooled, ordered = prepared_pooling(self._device, bags), self._space.event()
        shifts = any(feature.shifts for feature in features)
        return _PreparedPooled(pooled, block, size, places, bags, ordered, shifts)
