"""A request on its way through the tiers: what is asked for, and how the answer is made of it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from hps.lookup.pooling import pool
from hps.lookup.table_keys import TableKeys
from hps.observability.meters import Answers
from hps.tiers.base import FetchContext, Part
from hps.tracing import timed_total
from hps.types import (
    IndexArray,
    LookupRequest,
    LookupResult,
    Source,
    VectorArray,
)

_DEFAULT = int(Source.DEFAULT)


class LookupJob(ABC):
    """``parts``: what the tiers are asked for. ``context``: what they met."""

    __slots__ = ("context", "parts", "request", "started")

    def __init__(self, request: LookupRequest, parts: list[Part], started: float) -> None:
        self.request = request
        self.parts = parts
        self.context = FetchContext(request.deadline, origin=request.origin)
        self.started = started

    @property
    def degraded(self) -> tuple[str, ...]:
        """The tiers that were skipped."""
        return tuple(dict.fromkeys(self.context.degraded))

    @abstractmethod
    def asked(self, part: Part) -> int:
        """How many distinct keys of the part's table the request has."""

    @abstractmethod
    def answer(self) -> tuple[LookupResult, Answers] | None:
        """Defaults where no tier had a row, then the vectors; also each table's source codes, one per
        key. None when rows got lost on the way and the request must be begun again."""


class FullLookupJob(LookupJob):
    """The ordinary way: every key of the request goes through the tiers."""

    __slots__ = ("shares",)

    def __init__(self, request: LookupRequest, shares: list[TableKeys]) -> None:
        super().__init__(request, [share.part for share in shares], time.perf_counter())
        self.shares = shares

    def asked(self, part: Part) -> int:
        return len(part.keys)

    def answer(self) -> tuple[LookupResult, Answers]:
        request = self.request
        profiled = request.origin is not None and request.origin.is_profiled
        pooled_rows = timed_total(pool, "pooling") if profiled else pool
        result = LookupResult({}, degraded=self.degraded)
        sources = []
        for share in self.shares:
            part, inverse = share.part, share.inverse
            whole = inverse is not None or len(share.features) == 1
            codes = part.source.tobytes()
            has_defaults = fill_defaults(part, codes)
            if inverse is not None:
                codes = part.source.take(inverse).tobytes()
            if has_defaults:
                result.defaulted += codes.count(_DEFAULT)
            sources.append((part.table, codes, share.sizes))
            start = 0
            for feature, keys in zip(share.features, share.keys, strict=True):
                own = slice(start, start + len(keys.keys))
                rows = part.out if whole else part.out[own]
                numbers = None if inverse is None else inverse[own]
                target = request.out.get(feature.name) if request.out else None
                vectors = pooled_rows(rows, keys, feature.pooling, numbers, target)
                result.vectors[feature.name] = _put(target, vectors)
                if request.want_source:
                    _report(result, feature.name, share, own)
                start = own.stop
        if list(result.vectors) != list(request.features):
            result.vectors = {name: result.vectors[name] for name in request.features}
        return result, sources


def fill_defaults(part: Part, codes: bytes) -> bool:
    """Give the part's keys without a row the table's default; whether there were any.
    ``codes``: the bytes of its sources."""
    if _DEFAULT not in codes:
        return False
    part.out[part.source == _DEFAULT] = part.table.default
    return True


def _put(out: VectorArray | None, vectors: VectorArray) -> VectorArray:
    """``vectors`` in the caller's array, if there is one."""
    if out is None or out is vectors:
        return vectors
    out[...] = vectors
    return out


def _report(result: LookupResult, name: str, share: TableKeys, keys: slice) -> None:
    """Per-key sources and versions of the feature that owns ``keys`` of the share."""
    if share.inverse is None:
        positions: slice | Sequence[int] | IndexArray = keys
    else:
        positions = share.inverse[keys]
    result.sources[name] = share.part.source[positions]
    result.versions[name] = share.part.versions[positions]
