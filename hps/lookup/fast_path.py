"""The fast path: one pass per table answers a request whose rows are all in memory.

Most requests are of this kind. The dedup and the per-key reports of the slow path would cost more than
the rows: reading a repeated key again is cheaper than detecting it. Bags are pooled while their rows
are read. Bags with rows that are not in memory are returned as a `PartialHit`, and only those rows are
fetched from other tiers. A request that the fast path cannot answer takes the slow path from the start,
without side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hps.bounded_memo import memoize
from hps.lookup.base import Feature, LookupModel
from hps.lookup.checks import check_keys, check_sizes
from hps.lookup.feature_groups import Group
from hps.lookup.partial_hits import PartialHit, TablePartialHit
from hps.lookup.pooling import divisors, is_pooled, offsets_of, weights_of
from hps.observability.meters import LookupMeter
from hps.tiers.base import Ask, Bags, is_poolable
from hps.tiers.fused_lookup import FusedLookup, GatherFunction, prepare_gather
from hps.types import (
    EmbeddingTable,
    IndexArray,
    JaggedKeys,
    KeyArray,
    LookupRequest,
    LookupResult,
    VectorArray,
)

_INT64 = np.dtype(np.int64)
_MAX_PREPARED = 256

Plan = Callable[[tuple[str, ...], bool], tuple[Group, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _FeatureSlice:
    """One feature's keys in a request and among its table's keys.

    ``position``: the feature's, in the request; ``start``: of its keys among the table's; ``n``: their
    number."""

    feature: Feature
    position: int
    start: int
    n: int

    def keys(self, keys: Sequence[KeyArray]) -> KeyArray:
        """Return the table's keys ``(n,)`` for the request's ``keys``."""
        return self.feature.shift(keys[self.position])


@dataclass(frozen=True, slots=True, eq=False)
class _PooledFeature(_FeatureSlice):
    """One feature whose rows are pooled while they are read; see `Bags`."""

    shape: tuple[int, int]
    offsets: IndexArray | None
    weights: NDArray[np.float32] | None
    divisors: NDArray[np.float32] | None

    def bags(self, keys: Sequence[KeyArray]) -> Bags:
        table = self.feature.table
        out = np.empty(self.shape, table.dtype)
        return Bags(table, self.keys(keys), out, self.offsets, self.weights, self.divisors)


def _pooled(feature: Feature, keys: JaggedKeys, position: int, start: int) -> _PooledFeature:
    return _PooledFeature(
        feature,
        position,
        start,
        len(keys.keys),
        (keys.batch, feature.table.dim),
        offsets_of(keys),
        weights_of(keys),
        divisors(keys, feature.pooling),
    )


def _concatenated(slices: Sequence[_FeatureSlice], keys: Sequence[KeyArray]) -> KeyArray:
    """Return the table's keys ``(n,)`` for all these features of the request."""
    shifted = [each.keys(keys) for each in slices]
    return shifted[0] if len(shifted) == 1 else np.concatenate(shifted)


class _UnpooledFeatures:
    """The features of one table whose vectors are its rows.

    ``as_sent``: there is one feature, whose keys need no conversion. ``single_name``: the name of the only
    feature.
    """

    __slots__ = ("as_sent", "dtype", "position", "shape", "single_name", "slices", "table")

    def __init__(
        self, table: EmbeddingTable, slices: Sequence[_FeatureSlice], *, stored: bool
    ) -> None:
        """``stored``: rows of a narrow format are returned as they are stored."""
        first = slices[0].feature
        self.table = table
        self.slices = slices
        narrow = stored and not table.row_format.is_plain
        self.shape = sum(each.n for each in slices), table.row_width if narrow else table.dim
        self.dtype = table.row_dtype if narrow else table.dtype
        self.position = slices[0].position
        is_single = len(slices) == 1
        self.as_sent = is_single and first.key_offset == 0 and table.key_bits == 64
        self.single_name = first.name if is_single else None

    def keys(self, keys: Sequence[KeyArray]) -> KeyArray:
        """Return the table's keys ``(n,)``."""
        return _concatenated(self.slices, keys)

    def split(self, rows: VectorArray, vectors: dict[str, VectorArray]) -> None:
        """Fill ``vectors`` from the ``rows (n, dim)`` of all features."""
        start = 0
        for each in self.slices:
            vectors[each.feature.name] = rows[start : start + each.n]
            start += each.n


class PreparedLookup:
    """A lookup that was checked once for all requests of one form; called with keys.

    Requests of one form have the same features and sizes. Thread-safe. ``inline``: it is fast enough to
    run on the caller's thread."""

    __slots__ = (
        "_answers",
        "_finished",
        "_gather",
        "_groups",
        "_names",
        "_pooled",
        "_rows",
        "_stored",
        "_tier",
        "inline",
    )

    def __init__(
        self,
        tier: FusedLookup,
        meter: LookupMeter,
        groups: Sequence[tuple[EmbeddingTable, list[_FeatureSlice]]],
        names: tuple[str, ...],
        *,
        inline: bool,
        stored: bool,
    ) -> None:
        """``names``: the features in the request's order. ``stored``: see `_UnpooledFeatures`."""
        self.inline = inline
        self._stored = stored
        self._tier = tier
        self._groups = [(table, tuple(slices)) for table, slices in groups]
        unpooled = [
            (table, [s for s in slices if type(s) is _FeatureSlice]) for table, slices in groups
        ]
        self._rows = [
            _UnpooledFeatures(table, slices, stored=stored) for table, slices in unpooled if slices
        ]
        self._pooled = [s for _, slices in groups for s in slices if isinstance(s, _PooledFeature)]
        filled = [s.feature.name for each in self._rows for s in each.slices]
        filled += [each.feature.name for each in self._pooled]
        self._names = None if names == tuple(filled) else names
        source = bytes([tier.info.source])
        self._answers = [
            (table, source * sum(s.n for s in slices), [(s.feature.name, s.n) for s in slices])
            for table, slices in groups
        ]
        self._finished = meter.finished_alike(self._answers)
        sizes = [(each.table, each.shape[0]) for each in self._rows]
        sizes += [(each.feature.table, each.n) for each in self._pooled]
        self._gather: GatherFunction = prepare_gather(tier, sizes)

    def __call__(self, keys: Sequence[KeyArray]) -> LookupResult | PartialHit | None:
        """Answer for each feature's keys ``(n,)``, in the request's order.

        None if the request must take the slow path."""
        started = perf_counter()
        asks: list[Ask] = []
        for each in self._rows:
            flat = keys[each.position] if each.as_sent else each.keys(keys)
            asks.append((each.table, flat, np.empty(each.shape, each.dtype)))
        bags = [each.bags(keys) for each in self._pooled] if self._pooled else []
        if not self._gather(asks, bags):
            return None
        vectors: dict[str, VectorArray] = {}
        for each, (_, _, rows) in zip(self._rows, asks, strict=True):
            if each.single_name is not None:
                vectors[each.single_name] = rows
            else:
                each.split(rows, vectors)
        if bags and not self._collect(bags, vectors):
            return self._partial_hit(keys, bags, self._ordered(vectors), started)
        vectors = self._ordered(vectors)
        self._finished(perf_counter() - started)
        return LookupResult(vectors, stored_rows=self._stored)

    def _ordered(self, vectors: dict[str, VectorArray]) -> dict[str, VectorArray]:
        return vectors if self._names is None else {name: vectors[name] for name in self._names}

    def _collect(self, bags: list[Bags], vectors: dict[str, VectorArray]) -> bool:
        """Fill ``vectors``; return True if they are complete."""
        complete = True
        for each, bag in zip(self._pooled, bags, strict=True):
            vectors[each.feature.name] = bag.out
            complete = complete and bag.missing is None
        return complete

    def _partial_hit(
        self,
        keys: Sequence[KeyArray],
        bags: list[Bags],
        vectors: dict[str, VectorArray],
        started: float,
    ) -> PartialHit:
        incomplete: dict[EmbeddingTable, list[tuple[int, Bags]]] = {}
        for slice_, bag in zip(self._pooled, bags, strict=True):
            if bag.missing is not None:
                incomplete.setdefault(bag.table, []).append((slice_.start, bag))
        tables = []
        for position, (table, slices) in enumerate(self._groups):
            if table in incomplete:
                every_key = partial(_concatenated, slices, keys)
                tables.append(TablePartialHit(table, position, incomplete[table], every_key))
        return PartialHit(self._tier, tables, self._answers, vectors, started, self._stored)


class FastPath:
    """The fast path through ``tier``. Thread-safe."""

    def __init__(
        self,
        model: LookupModel,
        tier: FusedLookup,
        plan: Plan,
        meter: LookupMeter,
        inline_keys: int,
    ) -> None:
        self._model = model
        self._tier = tier
        self._plan = plan
        self._meter = meter
        self._inline_keys = inline_keys
        self._prepared_lookups: dict[tuple[object, ...], PreparedLookup | None] = {}

    def prepare(self, request: LookupRequest) -> PreparedLookup | None:
        """Return the prepared lookup for requests of this form.

        None if the request needs the slow path: for sources, ``out``, ``max_norm``, conversion of keys, or
        many rows that are not pooled. Raises ``BadRequest`` like the slow path.
        """
        if request.want_source or request.out:
            return None
        signature: list[object] = [request.by_table, request.stored_rows]
        is_fixed = True
        for name, keys in request.features.items():
            flat = keys.keys
            if flat.dtype != _INT64 or not flat.flags.c_contiguous:
                return None
            # Offsets and weights differ from request to request; each request must be checked.
            is_fixed = is_fixed and keys.offsets is None and keys.weights is None
            signature.append((name, flat.shape, keys.batch))
        if not is_fixed:
            return self._check(request)
        key = tuple(signature)
        if key not in self._prepared_lookups:
            memoize(self._prepared_lookups, key, self._check(request), _MAX_PREPARED)
        return self._prepared_lookups[key]

    def _check(self, request: LookupRequest) -> PreparedLookup | None:
        """Check ``request``; return its prepared lookup, or None as `prepare` does."""
        names = tuple(request.features)
        groups = self._plan(names, request.by_table)
        total = check_sizes(self._model, request)
        parts: list[tuple[EmbeddingTable, list[_FeatureSlice]]] = []
        any_pooled, poolable = False, True
        for table, features in groups:
            slices: list[_FeatureSlice] = []
            start = 0
            for feature in features:
                keys = check_keys(feature, request.features[feature.name])
                poolable = poolable and feature.max_norm is None
                position, n = names.index(feature.name), len(keys.keys)
                if is_pooled(feature.pooling, keys):
                    slices.append(_pooled(feature, keys, position, start))
                    any_pooled, poolable = True, poolable and is_poolable(table)
                else:
                    slices.append(_FeatureSlice(feature, position, start, n))
                start += n
            parts.append((table, slices))
        inline = total <= self._inline_keys
        if not poolable or not (inline or any_pooled):
            return None
        stored = request.stored_rows
        return PreparedLookup(self._tier, self._meter, parts, names, inline=inline, stored=stored)
