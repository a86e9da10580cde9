"""A lookup in progress: its keys by table, their parts on the way through the tiers, and its answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hps.lookup.base import Feature
from hps.lookup.max_norm import scale_to_norm
from hps.lookup.pooling import gives_narrow_rows, is_pooled, pool
from hps.native import dedup
from hps.observability.meters import Answers
from hps.tiers.base import FetchContext, Part
from hps.tiers.stored_rows import to_vectors
from hps.tracing import timed_total
from hps.types import (
    EmbeddingTable,
    IndexArray,
    JaggedKeys,
    LookupRequest,
    LookupResult,
    Source,
    VectorArray,
)

_DEFAULT = int(Source.DEFAULT)


@dataclass(slots=True)
class TableKeys:
    """Distinct keys of one table in a request.

    ``inverse (n,)`` finds each key's row in ``part``; None if no key was repeated. ``keys[i]`` belongs to
    ``features[i]``.
    """

    part: Part
    inverse: IndexArray | None
    features: tuple[Feature, ...]
    keys: list[JaggedKeys]

    @property
    def gives_narrow_rows(self) -> bool:
        """True if all features may be answered by rows as they are stored."""
        pairs = zip(self.features, self.keys, strict=True)
        return all(gives_narrow_rows(feature, keys) for feature, keys in pairs)

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Each feature's name and number of keys."""
        return [(f.name, len(k.keys)) for f, k in zip(self.features, self.keys, strict=True)]


def make_table_keys(
    table: EmbeddingTable,
    features: tuple[Feature, ...],
    keys: list[JaggedKeys],
    out: Mapping[str, VectorArray],
) -> TableKeys:
    """Collect every distinct key of ``features``, in order of first appearance."""
    if len(features) == 1:
        flat = features[0].shift(keys[0].keys)
    else:
        flat = np.concatenate([f.shift(k.keys) for f, k in zip(features, keys, strict=True)])
    if len(flat) < 2:
        unique, inverse = flat, None
    else:
        unique, positions = dedup(flat)
        inverse = None if len(unique) == len(flat) else positions
    target = None
    alone = inverse is None and len(features) == 1
    direct = alone and table.stores_vectors
    if out and direct and not is_pooled(features[0].pooling, keys[0]):
        target = out.get(features[0].name)  # the tier writes rows to the caller's array
    return TableKeys(Part.make(table, unique, target), inverse, features, keys)


class LookupJob(ABC):
    """A lookup in progress. ``parts``: the keys to fetch; ``context``: the tiers' reports."""

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
    def distinct_keys(self, part: Part) -> int:
        """The number of distinct keys that the request has in the part's table."""

    @abstractmethod
    def answer(self) -> tuple[LookupResult, Answers] | None:
        """Fill in defaults and make the vectors; also return each table's source codes, one per key.

        None if rows were evicted in between and the request must start again."""


class FullLookupJob(LookupJob):
    """A lookup on the slow path: every key goes through the tiers."""

    __slots__ = ("table_keys",)

    def __init__(self, request: LookupRequest, table_keys: list[TableKeys]) -> None:
        super().__init__(
            request, [keys_of_table.part for keys_of_table in table_keys], time.perf_counter()
        )
        self.table_keys = table_keys

    def distinct_keys(self, part: Part) -> int:
        return len(part.keys)

    def answer(self) -> tuple[LookupResult, Answers]:
        request = self.request
        profiled = request.origin is not None and request.origin.is_profiled
        pooled_rows = timed_total(pool, "pooling") if profiled else pool
        result = LookupResult({}, degraded=self.degraded)
        result.stored_rows = self._can_answer_stored_rows()
        sources = []
        for keys_of_table in self.table_keys:
            part, inverse = keys_of_table.part, keys_of_table.inverse
            whole = inverse is not None or len(keys_of_table.features) == 1
            codes = part.source.tobytes()
            vectors_of_part, has_defaults = part.out, False
            if not (result.stored_rows and keys_of_table.gives_narrow_rows):
                vectors_of_part, has_defaults = with_defaults(part, codes)
            if inverse is not None:
                codes = part.source.take(inverse).tobytes()
            if has_defaults:
                result.defaulted += codes.count(_DEFAULT)
            sources.append((part.table, codes, keys_of_table.sizes))
            start = 0
            for feature, keys in zip(keys_of_table.features, keys_of_table.keys, strict=True):
                span = slice(start, start + len(keys.keys))
                stored = result.stored_rows and gives_narrow_rows(feature, keys)
                every, dtype = (part.out, None) if stored else (vectors_of_part, part.table.dtype)
                rows = every if whole else every[span]
                if feature.max_norm is not None:
                    rows = scale_to_norm(rows, feature.max_norm)
                numbers = None if inverse is None else inverse[span]
                target = request.out.get(feature.name) if request.out else None
                vectors = pooled_rows(rows, keys, feature.pooling, numbers, target, dtype=dtype)
                result.vectors[feature.name] = _put(target, vectors)
                if request.want_source:
                    _report_sources(result, feature.name, keys_of_table, span)
                start = span.stop
        if list(result.vectors) != list(request.features):
            result.vectors = {name: result.vectors[name] for name in request.features}
        return result, sources

    def _can_answer_stored_rows(self) -> bool:
        """True if rows of narrow formats are requested as stored, and none of them is the default."""
        if not self.request.stored_rows or self.request.out:
            return False
        parts = [part for part in self.parts if not part.table.row_format.is_plain]
        return all(_DEFAULT not in part.source.tobytes() for part in parts)


def with_defaults(part: Part, codes: bytes, *, dtype: Any = None) -> tuple[VectorArray, bool]:
    """Return the part's vectors ``(n, dim)``, and True if some are the table's default.

    ``codes``: the bytes of the part's sources. ``dtype``: of the vectors; by default that of the rows if
    these are vectors, else float32, in which they are pooled."""
    table = part.table
    if dtype is None:
        dtype = part.out.dtype if table.stores_vectors else np.float32
    vectors = to_vectors(table, part.out, dtype=dtype)
    if _DEFAULT not in codes:
        return vectors, False
    vectors[part.source == _DEFAULT] = table.default
    return vectors, True


def _put(out: VectorArray | None, vectors: VectorArray) -> VectorArray:
    """Copy ``vectors`` to the caller's array, if there is one."""
    if out is None or out is vectors:
        return vectors
    out[...] = vectors
    return out


def _report_sources(result: LookupResult, name: str, keys_of_table: TableKeys, keys: slice) -> None:
    """Report sources and versions per key for the feature whose keys are at ``keys`` of the table's."""
    if keys_of_table.inverse is None:
        positions: slice | Sequence[int] | IndexArray = keys
    else:
        positions = keys_of_table.inverse[keys]
    result.sources[name] = keys_of_table.part.source[positions]
    result.versions[name] = keys_of_table.part.versions[positions]
