"""The lookup whose vectors stay on the device: `LookupEngine` with the device's arrays.

The same stages, miss policies and threads; what differs is where rows lie and who pools them. Keys are
not made unique first: a repeated key costs the device less than recognising it costs the host, and the
bridge asks for each of the few that are missing there once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hps.cuda.pool import RowBags
from hps.errors import BadRequest, DeadlineExceeded
from hps.lookup.base import Feature
from hps.lookup.checks import check_keys, check_sizes
from hps.lookup.engine import INLINE_KEYS, LookupEngine
from hps.lookup.gpu.miss_fill import LowerTiers
from hps.lookup.gpu.prepared_lookups import PreparedDeviceLookups, request_signature
from hps.lookup.lookup_job import LookupJob
from hps.lookup.table_keys import TableKeys
from hps.observability.meters import Answers
from hps.threads import chain_future
from hps.tiers.base import Part
from hps.tiers.chain import TierChain
from hps.tiers.wrappers import MeteredTier
from hps.types import IndexArray, JaggedKeys, LookupRequest, LookupResult

_CHECKED_KEPT = 256


@dataclass(slots=True)
class DeviceLookupResult(LookupResult):
    """A lookup's answer before its rows are pooled. ``shapes`` are the vectors', by feature; ``into(outs,
    stream)`` pools them into device arrays of those shapes and waits for the stream."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    into: Callable[[Mapping[str, Any], Any], None] = lambda _outs, _stream: None


class _DeviceLookupJob(LookupJob):
    """A request on its way, on a stream of the device."""

    __slots__ = ("block", "lookup", "shares")

    def __init__(
        self,
        lookup: DeviceLookup,
        request: LookupRequest,
        shares: list[TableKeys],
        block: Any,
        stream: Any,
    ) -> None:
        super().__init__(request, [share.part for share in shares], time.perf_counter())
        self.context.stream = stream
        self.lookup = lookup
        self.shares = shares
        self.block = block

    def asked(self, part: Part) -> int:
        return len(part.keys)

    def answer(self) -> tuple[LookupResult, Answers]:
        return self.lookup._answer(self)


class DeviceLookup(LookupEngine):
    """Serves one model from ``device``'s cache and the tiers bridged to it. ``device`` is a `GpuCache`, or
    what behaves like one; ``caches`` and ``stores`` take its arrays and hand on what they find; ``below``
    is what may be asked without waiting.

    `submit` answers with a `DeviceLookupResult`. Any number of threads may call it.
    """

    def __init__(self, device: Any, below: LowerTiers, *args: Any) -> None:
        super().__init__(*args)
        self._device = device
        self._checked: dict[Any, list[Feature]] = {}
        top = self._caches.tiers[0] if isinstance(self._caches, TierChain) else self._caches
        observe = top.observe if isinstance(top, MeteredTier) else None
        self._short_way = PreparedDeviceLookups(device, below, observe, self._meter)

    def submit(self, request: LookupRequest) -> Future[LookupResult]:
        if request.out:
            raise BadRequest(
                "out names arrays on the host; vectors that stay on the device are new"
            )
        return self._ordinary(request)

    def pooled(self, request: LookupRequest) -> LookupResult:
        """The vectors as arrays on the device, new ones, complete."""
        at_once = self.at_once(request)
        if at_once is not None:
            return at_once
        result = self.submit(request).result()
        assert isinstance(result, DeviceLookupResult)
        stream = self._device.space.take_stream()
        groups = self._plan(tuple(request.features), request.by_table)
        types = {each.name: table.dtype for table, features in groups for each in features}
        outs = {
            name: self._device.space.empty(shape, types[name], stream)
            for name, shape in result.shapes.items()
        }
        result.into(outs, stream)
        self._device.space.give_back(stream)
        result.vectors = {name: outs[name] for name in request.features}
        return result

    def at_once(self, request: LookupRequest) -> LookupResult | None:
        """The vectors, where every row is in memory and nothing else is wanted. Raises BadRequest."""
        signature = None if request.want_source else request_signature(request.features)
        if signature is None or _is_past(request.deadline):
            return None
        key = request.by_table, signature
        asked = self._checked.get(key)
        if asked is None:
            asked = self._check(request)
            if len(self._checked) >= _CHECKED_KEPT:
                self._checked.clear()
            self._checked[key] = asked
        if not asked:
            return None
        keys = [request.features[feature.name] for feature in asked]
        result = self._short_way.lookup(key, asked, keys, request.deadline)
        if result is not None:
            result.vectors = {name: result.vectors[name] for name in request.features}
        return result

    def _check(self, request: LookupRequest) -> list[Feature]:
        """The features of a request of a kind that was not seen before; none if the cache lacks a table."""
        groups = self._plan(tuple(request.features), request.by_table)
        check_sizes(self.model, request)
        features = [feature for _, some in groups for feature in some]
        for feature in features:
            check_keys(feature, request.features[feature.name])
        held = all(self._device.capacity(table) for table, _ in groups)
        return features if held else []

    def _ordinary(self, request: LookupRequest) -> Future[LookupResult]:
        groups = self._plan(tuple(request.features), request.by_table)
        total = check_sizes(self.model, request)
        checked = [
            [check_keys(each, request.features[each.name]) for each in features]
            for _, features in groups
        ]
        if _is_past(request.deadline):
            raise DeadlineExceeded("the request's deadline had passed when it came")
        stream = self._device.space.take_stream()
        asked = [
            (table, _flat(features, keys))
            for (table, features), keys in zip(groups, checked, strict=True)
        ]
        block = self._device.space.parts(asked, stream)
        shares = [
            TableKeys(part, None, features, keys)
            for part, (_, features), keys in zip(block.parts, groups, checked, strict=True)
        ]
        job = _DeviceLookupJob(self, request, shares, block, stream)
        if total > INLINE_KEYS:
            fetched = self._lanes.memory.submit(partial(self._ask_caches, job), request.deadline)
            return chain_future(fetched, partial(self._go_on, job))
        return self._go_on(job, self._ask_caches(job))

    def _hand_on(self, parts: list[Part], asked: list[IndexArray]) -> None:
        """The bridge's inner tier has told of what it found, where that was at hand."""

    def _answer(self, job: _DeviceLookupJob) -> tuple[LookupResult, Answers]:
        """What was found, and how to pool it once there is a place for the vectors."""
        request, stream = job.request, job.context.stream
        versions, sources = job.block.reports(stream)
        self._device.space.give_back(stream)
        result = DeviceLookupResult({}, degraded=tuple(dict.fromkeys(job.context.degraded)))
        bags, answers = [], []
        for share, seen, codes in zip(job.shares, versions, sources, strict=True):
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
        result.into = partial(_pool, self._device, bags)
        return result, answers


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline


def _flat(features: Sequence[Feature], keys: Sequence[JaggedKeys]) -> Any:
    """The table's keys for its features' keys, one after the other."""
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
                feature.pooling == "mean",
            )
        )
    if asks:
        device.pool_rows(asks, stream)


__all__ = ["DeviceLookup", "DeviceLookupResult"]
