"""The short way: a request whose every row is in memory is answered in one pass per table.

Most requests are such. For them the deduplication and the reports per key of the ordinary way cost
more than the rows: a repeated key is read again, which is cheaper than being recognised. What this way
can't answer goes the ordinary way from the start, as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from hps.lookup.base import Feature, LookupModel
from hps.lookup.checks import check_keys, check_sizes
from hps.lookup.pooling import pool
from hps.meters import LookupMeter
from hps.tiers.fused import Ask, FusedLookup, gather_alike
from hps.types import (
    EmbeddingTable,
    JaggedKeys,
    KeyArray,
    LookupRequest,
    LookupResult,
    VectorArray,
)

_INT64 = np.dtype(np.int64)
_FORMS_KEPT = 256

# The features of one request that share a table.
Group = tuple[EmbeddingTable, tuple[Feature, ...]]
Plan = Callable[[tuple[str, ...], bool], tuple[Group, ...]]
# Each feature's keys in the request's order; None when a row is not in memory.
FromMemory = Callable[[Sequence[KeyArray]], LookupResult | None]


@dataclass(frozen=True, slots=True)
class _Slice:
    """One feature's keys: where they stand in the request, how many there are, for how many samples.
    ``pooled``: a vector is more than one row."""

    feature: Feature
    position: int
    n: int
    batch: int
    pooled: bool


class _Share:
    """One table's share of the requests of a form.

    ``as_sent``: its keys are one feature's, as they came. ``unpooled``: the feature whose vectors its
    rows are.
    """

    __slots__ = ("as_sent", "dtype", "position", "shape", "slices", "table", "unpooled")

    def __init__(self, table: EmbeddingTable, slices: list[_Slice]) -> None:
        first = slices[0]
        self.table = table
        self.slices = slices
        self.shape = sum(each.n for each in slices), table.dim
        self.dtype = table.dtype
        self.position = first.position
        alone = len(slices) == 1
        self.as_sent = alone and first.feature.key_offset == 0 and table.key_bits == 64
        self.unpooled = first.feature.name if alone and not first.pooled else None

    def shifted(self, keys: Sequence[KeyArray]) -> KeyArray:
        """The table's keys ``(n,)``."""
        shifted = [each.feature.shift(keys[each.position]) for each in self.slices]
        return shifted[0] if len(shifted) == 1 else np.concatenate(shifted)

    def pool(
        self, rows: VectorArray, keys: Sequence[KeyArray], vectors: dict[str, VectorArray]
    ) -> None:
        """Fill in ``vectors`` from the share's ``rows (n, dim)``."""
        start = 0
        for each in self.slices:
            stop = start + each.n
            mine = JaggedKeys(keys[each.position], each.batch)
            vectors[each.feature.name] = pool(rows[start:stop], mine, each.feature.pooling)
            start = stop


class _Form:
    """What requests of the same features and sizes have in common, checked once; called with the keys
    of one of them. Any number of threads may."""

    __slots__ = ("_finished", "_gather", "_names", "_shares")

    def __init__(
        self,
        gather: Callable[[list[Ask]], bool],
        shares: list[_Share],
        names: tuple[str, ...] | None,
        finished: Callable[[float], None],
    ) -> None:
        """``names``: the features in the request's order, None when the shares are in it already."""
        self._gather = gather
        self._shares = shares
        self._names = names
        self._finished = finished

    def __call__(self, keys: Sequence[KeyArray]) -> LookupResult | None:
        started = perf_counter()
        asks = []
        for share in self._shares:
            flat = keys[share.position] if share.as_sent else share.shifted(keys)
            asks.append((share.table, flat, np.empty(share.shape, share.dtype)))
        if not self._gather(asks):
            return None
        vectors: dict[str, VectorArray] = {}
        for share, (_, _, rows) in zip(self._shares, asks, strict=True):
            if share.unpooled is not None:
                vectors[share.unpooled] = rows
            else:
                share.pool(rows, keys, vectors)
        if self._names is not None:
            vectors = {name: vectors[name] for name in self._names}
        self._finished(perf_counter() - started)
        return LookupResult(vectors)


class ShortWay:
    """The short way through ``tier``. Any number of threads may call it."""

    def __init__(
        self,
        model: LookupModel,
        tier: FusedLookup,
        plan: Plan,
        meter: LookupMeter,
        most_keys: int,
    ) -> None:
        self._model = model
        self._tier = tier
        self._source = bytes([tier.info.source])
        self._plan = plan
        self._meter = meter
        self._most_keys = most_keys
        self._forms: dict[tuple[object, ...], _Form | None] = {}

    def form(self, request: LookupRequest) -> FromMemory | None:
        """What answers requests of this form from memory; None when the request wants what only the
        ordinary way gives: sources, ``out``, bags of different lengths, weights, conversion of keys,
        or has too many keys. Raises ``BadRequest`` as that does."""
        if request.want_source or request.out:
            return None
        signature: list[object] = [request.by_table]
        for name, keys in request.features.items():
            flat = keys.keys
            if (
                keys.offsets is not None
                or keys.weights is not None
                or flat.dtype != _INT64
                or not flat.flags.c_contiguous
            ):
                return None
            signature.append((name, flat.shape, keys.batch))
        key = tuple(signature)
        return self._forms[key] if key in self._forms else self._check(request, key)

    def _check(self, request: LookupRequest, key: tuple[object, ...]) -> _Form | None:
        """The form of a request of a kind that was not seen before."""
        names = tuple(request.features)
        groups = self._plan(names, request.by_table)
        total = check_sizes(self._model, request)
        shares = []
        for table, features in groups:
            slices = []
            for feature in features:
                keys = check_keys(feature, request.features[feature.name])
                pooled = feature.pooling != "none" and keys.hotness != 1
                position = names.index(feature.name)
                slices.append(_Slice(feature, position, len(keys.keys), keys.batch, pooled))
            shares.append(_Share(table, slices))
        form = None
        if total <= self._most_keys:
            form = self._form(shares, names)
        if len(self._forms) >= _FORMS_KEPT:
            self._forms.clear()
        self._forms[key] = form
        return form

    def _form(self, shares: list[_Share], names: tuple[str, ...]) -> _Form:
        answers = [(share.table, self._source * sum(s.n for s in share.slices)) for share in shares]
        in_order = names == tuple(s.feature.name for share in shares for s in share.slices)
        finished = self._meter.finished_alike(answers)
        sizes = [(share.table, share.shape[0]) for share in shares]
        gather = gather_alike(self._tier, sizes)
        return _Form(gather, shares, None if in_order else names, finished)
