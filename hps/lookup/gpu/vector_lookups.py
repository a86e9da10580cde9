"""Lookups of rows that are not pooled, from the device's cache straight into new arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.lookup.base import Feature
from hps.lookup.gpu.miss_fill import (
    NO_VERSIONS,
    HostCaches,
    answered,
    block_offsets,
    bridged,
    fetch_over_bridge,
)
from hps.observability.meters import LookupMeter
from hps.tiers.base import Part
from hps.tiers.wrappers import FetchObserver
from hps.types import JaggedKeys, LookupResult, Source

_GPU, _DEFAULT = int(Source.GPU), int(Source.DEFAULT)


@dataclass(slots=True)
class PreparedVectors:
    """A prepared fetch into one block, and each feature's place in it.

    ``ordered``: an event, see `DeviceSpace.after_current`. ``shifts``: whether any feature's keys differ from
    its table's.
    ``finished`` and ``observe`` count a lookup that the device answered alone, given its seconds."""

    fetch: Any
    ordered: Any
    size: int
    places: list[tuple[str, int, tuple[int, int], Any]]
    sizes: NDArray[np.int64]
    finished: Callable[[float], None]
    observe: Callable[[float], None]
    shifts: bool


class VectorLookups:
    """Looks up rows of a `GpuCache` (``device``); ``observe`` is its meter. Thread-safe."""

    def __init__(
        self, device: Any, host: HostCaches, observe: FetchObserver | None, meter: LookupMeter
    ) -> None:
        self._device, self._space, self._host = device, device.space, host
        self._observe, self._meter = observe, meter

    def prepare(
        self, features: Sequence[Feature], keys: Sequence[JaggedKeys], on_device: Sequence[bool]
    ) -> PreparedVectors:
        """Prepare lookups with as many keys of each feature."""
        sizes = [len(mine.keys) for mine in keys]
        tables = [feature.table for feature in features]
        offsets, size = block_offsets(
            [n * table.row_bytes for n, table in zip(sizes, tables, strict=True)]
        )
        requests = list(zip(tables, sizes, strict=True))
        fetch = self._device.prepare_vectors(requests, offsets, on_device)
        places = [
            (feature.name, at, (n, feature.table.dim), feature.table.dtype)
            for feature, at, n in zip(features, offsets, sizes, strict=True)
        ]
        source = bytes([_GPU])
        answers = [
            (table, source * n, [(feature.name, n)])
            for feature, (table, n) in zip(features, requests, strict=True)
        ]
        found = [(table, n, n) for table, n in requests]
        return PreparedVectors(
            fetch,
            self._space.event(),
            size,
            places,
            np.array(sizes),
            self._meter.finished_alike(answers),
            _observer(self._observe, found),
            any(feature.shifts for feature in features),
        )

    def lookup(
        self,
        prepared: PreparedVectors,
        features: Sequence[Feature],
        arrays: Sequence[Any],
        stream: Any,
        deadline: float | None,
    ) -> LookupResult | None:
        """Return the rows of each feature's keys in ``arrays``, complete; None if one is not in memory.

        Waits for ``stream``. Arrays on the device are read after the work on the thread's current stream."""
        started, space = time.perf_counter(), self._space
        block = space.allocate(prepared.size)
        space.after_current(stream, prepared.ordered)
        prepared.fetch.launch(stream, space.address(block), arrays, self._host.pool)
        rows = {  # while the device fetches
            name: space.array(block, at, shape, dtype) for name, at, shape, dtype in prepared.places
        }
        report = self._device.fill_misses(prepared.fetch, stream, self._host.gather)
        if report is None:
            seconds = time.perf_counter() - started
            prepared.finished(seconds)
            prepared.observe(seconds)
            return LookupResult(rows)
        fetched = time.perf_counter() - started
        answers = answered(prepared.sizes, report.counts, self._host.code)
        if report.left is not None:
            codes = self._bring(features, arrays, rows, report.left, stream, deadline)
            if codes is None:
                stream.synchronize()
                return None
            for i, own in enumerate(codes):
                answers += bridged(i, own)
        stream.synchronize()
        if self._observe is not None:
            counts = zip(features, prepared.sizes.tolist(), report.counts.tolist(), strict=True)
            self._observe([(f.table, n, n - missed) for f, n, (missed, _) in counts], fetched)
        self._meter.counted(
            [(features[i].table, code, n) for i, code, n in answers],
            time.perf_counter() - started,
            [features[i].name for i, _, _ in answers],
        )
        return LookupResult(rows, defaulted=sum(n for _, code, n in answers if code == _DEFAULT))

    def _bring(
        self,
        features: Sequence[Feature],
        arrays: Sequence[Any],
        rows: dict[str, Any],
        left: Sequence[NDArray[np.int64]],
        stream: Any,
        deadline: float | None,
    ) -> list[NDArray[np.uint8]] | None:
        """Fetch the remaining rows through the bridge, with defaults for deleted keys.

        Returns each feature's source codes; None if some keys are still missing."""
        space, parts = self._space, []
        for feature, keys, own in zip(features, arrays, left, strict=True):
            source = space.empty(len(keys), np.uint8, stream)
            space.clear(source, stream)
            parts.append(Part(feature.table, keys, rows[feature.name], NO_VERSIONS, source, own))
        codes = fetch_over_bridge(self._host.bridge, space, parts, stream, deadline)
        if codes is None:
            return None
        for part, found, positions in zip(parts, codes, left, strict=True):
            deleted = positions[found == _DEFAULT]
            if len(deleted):
                space.fill_rows(part.out, deleted, part.table.default, stream)
        return codes


def _observer(
    observe: FetchObserver | None, found: list[tuple[Any, int, int]]
) -> Callable[[float], None]:
    """Return a function that reports a fetch that found all keys, given its seconds."""
    if observe is None:
        return lambda _seconds: None
    # An observer may offer `prepare`, to look up its counters once instead of at each fetch.
    prepare = getattr(observe, "prepare", None)
    prepared: Callable[[float], None] = prepare(found) if prepare else partial(observe, found)
    return prepared
