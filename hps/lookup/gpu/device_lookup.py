"""The lookup whose vectors stay on the device: `LookupEngine` with device arrays.

Stages, miss policies and threads are the engine's; rows lie on the device, which pools them. Keys are not
deduplicated first: the device reads a repeated key faster than the host can detect it, and the bridge asks
once for each of the few keys that the cache misses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from hps.array_inputs import Features
from hps.bounded_memo import memoize
from hps.cuda.pool import RowBags
from hps.errors import BadRequest, DeadlineExceeded
from hps.lookup.base import Feature, is_past
from hps.lookup.checks import check_keys, check_sizes
from hps.lookup.engine import LookupEngine
from hps.lookup.gpu.miss_fill import HostCaches
from hps.lookup.gpu.prepared_lookups import (
    PreparedDeviceLookups,
    array_signature,
    request_signature,
)
from hps.lookup.lookup_job import LookupJob, TableKeys
from hps.observability.meters import Answers
from hps.tiers.base import Part
from hps.tiers.chain import TierChain
from hps.tiers.wrappers import MeteredTier
from hps.types import IndexArray, JaggedKeys, LookupRequest, LookupResult

_CHECKED_KEPT = 256


@dataclass(slots=True)
class DeviceLookupResult(LookupResult):
    """A lookup's answer before pooling.

    ``shapes`` are the vectors' shapes by feature; ``into(outs, stream)`` pools into device arrays of those
    shapes and waits for the stream.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    into: Callable[[Mapping[str, Any], Any], None] = lambda _outs, _stream: None


class _DeviceLookupJob(LookupJob):
    """A lookup in progress on a stream of the device."""

    __slots__ = ("block", "lookup", "table_keys")

    def __init__(
        self,
        lookup: DeviceLookup,
        request: LookupRequest,
        table_keys: list[TableKeys],
        block: Any,
        stream: Any,
    ) -> None:
        super().__init__(request, [share.part for share in table_keys], time.perf_counter())
        self.context.stream = stream
        self.lookup = lookup
        self.table_keys = table_keys
        self.block = block

    def distinct_keys(self, part: Part) -> int:
        return len(part.keys)

    def answer(self) -> tuple[LookupResult, Answers]:
        return self.lookup._answer(self)


class DeviceLookup(LookupEngine):
    """Serves one model from a device's ``cache`` and the tiers bridged to it. Thread-safe.

    ``cache`` is a `GpuCache` or has its interface; ``caches`` and ``stores`` take its arrays and promote
    what they find; ``host`` are those that answer without blocking. `submit` answers with a
    `DeviceLookupResult`.
    """

    def __init__(self, cache: Any, host: HostCaches, *args: Any) -> None:
        super().__init__(*args)
        self.cache = cache
        self.host = host
        self._checked: dict[Any, list[Feature]] = {}
        top = self._caches.tiers[0] if isinstance(self._caches, TierChain) else self._caches
        observe = top.observe if isinstance(top, MeteredTier) else None
        self._prepared_lookups = PreparedDeviceLookups(cache, host, observe, self._meter)

    def close(self) -> None:
        """Free what was prepared for repeated requests; later lookups of resident rows raise Unavailable."""
        self._prepared_lookups.close()

    def submit(self, request: LookupRequest) -> Future[LookupResult]:
        if request.out:
            raise BadRequest(
                "out cannot be used: vectors that stay on the device are new arrays there"
            )
        return self._slow_path(request)

    def pooled(self, request: LookupRequest) -> LookupResult:
        """Look up and pool into new device arrays, which are complete on return.

        Keys may be CuPy arrays on the device; they are copied to the host if a store must be asked, or if
        there are offsets, weights or a wish for sources."""
        resident = self.lookup_resident(request)
        if resident is not None:
            return resident
        result = self.submit(request).result()
        assert isinstance(result, DeviceLookupResult)
        stream = self.cache.space.take_stream()
        groups = self._groups(tuple(request.features), request.by_table)
        types = {each.name: table.dtype for table, features in groups for each in features}
        outs = {
            name: self.cache.space.empty(shape, types[name], stream)
            for name, shape in result.shapes.items()
        }
        result.into(outs, stream)
        self.cache.space.give_back(stream)
        result.vectors = {name: outs[name] for name in request.features}
        return result

    def lookup_resident(self, request: LookupRequest) -> LookupResult | None:
        """Answer a request whose rows are all in memory; None for any other. Raises BadRequest."""
        signature = None if request.want_source else request_signature(request.features)
        if signature is None or is_past(request.deadline):
            return None
        key = request.by_table, signature
        features = self._checked.get(key)
        if features is None:
            features = memoize(self._checked, key, self._check(request), _CHECKED_KEPT)
        if not features:
            return None
        keys = [request.features[feature.name] for feature in features]
        arrays = [mine.keys for mine in keys]
        result = self._prepared_lookups.lookup(key, features, arrays, request.deadline, keys)
        if result is not None and len(features) > 1:
            result.vectors = {name: result.vectors[name] for name in request.features}
        return result

    def lookup_arrays(self, features: Features, by_table: bool) -> LookupResult | None:
        """Answer a request of a form that `lookup_resident` has answered, given the caller's arrays of keys.

        None if a row is not in memory, and for other requests; raises nothing for them."""
        signature = array_signature(features, self.cache.space)
        key = by_table, signature
        checked = self._checked.get(key)
        if not checked:
            return None
        arrays = [features[feature.name] for feature in checked]
        result = self._prepared_lookups.lookup(key, checked, arrays, None)
        if result is not None and len(checked) > 1:
            result.vectors = {name: result.vectors[name] for name in features}
        return result

    def _check(self, request: LookupRequest) -> list[Feature]:
        """Check a request of a new form; return its features, none if the cache misses a table."""
        groups = self._groups(tuple(request.features), request.by_table)
        check_sizes(self.model, request)
        features = [feature for _, some in groups for feature in some]
        for feature in features:
            check_keys(feature, request.features[feature.name])
        held = all(self.cache.capacity(table) for table, _ in groups)
        return features if held else []

    def _slow_path(self, request: LookupRequest) -> Future[LookupResult]:
        request = _with_host_keys(request)
        groups = self._groups(tuple(request.features), request.by_table)
        total = check_sizes(self.model, request)
        checked = [
            [check_keys(each, request.features[each.name]) for each in features]
            for _, features in groups
        ]
        if is_past(request.deadline):
            raise DeadlineExceeded("deadline exceeded before the lookup started")
        stream = self.cache.space.take_stream()
        flat_keys = [
            (table, _flat(features, keys))
            for (table, features), keys in zip(groups, checked, strict=True)
        ]
        block = self.cache.space.parts(flat_keys, stream)
        table_keys = [
            TableKeys(part, None, features, keys)
            for part, (_, features), keys in zip(block.parts, groups, checked, strict=True)
        ]
        job = _DeviceLookupJob(self, request, table_keys, block, stream)
        return self._begin(job, total)

    def _promote_found(self, parts: list[Part], missing_positions: list[IndexArray]) -> None:
        """Do nothing: the bridge's inner tier has promoted its rows already."""

    def _answer(self, job: _DeviceLookupJob) -> tuple[LookupResult, Answers]:
        """Return the rows found, and the tables' source codes; `DeviceLookupResult.into` pools them later."""
        request, stream = job.request, job.context.stream
        versions, sources = job.block.reports(stream)
        self.cache.space.give_back(stream)
        result = DeviceLookupResult({}, degraded=tuple(dict.fromkeys(job.context.degraded)))
        bags, answers = [], []
        for share, seen, codes in zip(job.table_keys, versions, sources, strict=True):
            answers.append((share.part.table, codes.tobytes(), share.sizes))
            result.defaulted += len(codes) - int(np.count_nonzero(codes))
            start = 0
            for feature, keys in zip(share.features, share.keys, strict=True):
                own = slice(start, start + len(keys.keys))
                bags.append((feature, keys, share.part, own))
                shape = len(keys.keys) if feature.pooling == "none" else keys.batch
                result.shapes[feature.name] = (shape, share.part.table.dim)
                if request.want_source:
                    result.sources[feature.name] = codes[own]
                    result.versions[feature.name] = seen[own]
                start = own.stop
        result.into = partial(_pool, self.cache, bags)
        return result, answers


def _with_host_keys(request: LookupRequest) -> LookupRequest:
    """Return ``request`` with keys that are on a device copied to the host."""
    features: dict[str, Any] = dict(request.features)
    there = {name: k for name, k in features.items() if not isinstance(k.keys, np.ndarray)}
    if not there:
        return request
    features |= {name: replace(keys, keys=keys.keys.get()) for name, keys in there.items()}
    return replace(request, features=features)


def _flat(features: Sequence[Feature], keys: Sequence[JaggedKeys]) -> Any:
    """Concatenate the keys of one table's ``features``, converted to the table's keys."""
    shifted = [f.shift(k.keys) for f, k in zip(features, keys, strict=True)]
    return shifted[0] if len(shifted) == 1 else np.concatenate(shifted)


def _pool(
    device: Any,
    bags: Sequence[tuple[Feature, JaggedKeys, Part, slice]],
    outs: Mapping[str, Any],
    stream: Any,
) -> None:
    asks = []
    for feature, keys, part, own in bags:
        out = outs[feature.name]
        if not len(out):
            continue
        each = feature.pooling == "none"
        asks.append(
            RowBags(
                part.out[own],
                part.source[own],
                part.table.default,
                None if each else keys.offsets,
                None if each else keys.weights,
                out,
                1 if each else keys.hotness or 0,
                feature.pooling,
                part.table.row_format,
            )
        )
    if asks:
        device.pool_rows(asks, stream)
