"""The short way: a request whose every row is in memory is answered in one pass per table.

Most requests are such. For them the deduplication and the reports per key of the ordinary way cost
more than the rows: a repeated key is read again, which is cheaper than being recognised. What this way
can't answer goes the ordinary way from the start, as if nothing had happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hps.lookup.base import Feature, LookupModel, LookupObserver
from hps.lookup.checks import check_keys, check_sizes
from hps.lookup.pooling import pool
from hps.tiers.fused import Ask, FusedLookup
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, LookupResult, VectorArray

_INT64 = np.dtype(np.int64)
_FORMS_KEPT = 256

# The features of one request that share a table.
Group = tuple[EmbeddingTable, tuple[Feature, ...]]
Plan = Callable[[tuple[str, ...], bool], tuple[Group, ...]]


@dataclass(frozen=True, slots=True)
class _Share:
    """One table's share of the requests of a form: ``n`` keys in all."""

    table: EmbeddingTable
    features: tuple[Feature, ...]
    n: int


@dataclass(frozen=True, slots=True)
class _Form:
    """What requests of the same features and sizes have in common, checked once.

    ``sources`` is what the observer is told; ``in_order`` that the shares are in the order of the
    request's features.
    """

    shares: tuple[_Share, ...]
    sources: list[tuple[EmbeddingTable, bytes]]
    in_order: bool


class FromMemory:
    """The short way through ``tier``. Any number of threads may call it."""

    def __init__(
        self,
        model: LookupModel,
        tier: FusedLookup,
        plan: Plan,
        observer: LookupObserver,
        most_keys: int,
    ) -> None:
        self._model = model
        self._tier = tier
        self._source = bytes([tier.info.source])
        self._plan = plan
        self._observer = observer
        self._most_keys = most_keys
        self._forms: dict[tuple[object, ...], _Form | None] = {}

    def answer(self, request: LookupRequest) -> LookupResult | None:
        """The answer; None when a row is not in memory, or the request wants what only the ordinary
        way gives: sources, ``out``, bags of different lengths, weights, conversion of keys. Raises
        ``BadRequest`` as that does."""
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
        form = self._forms[key] if key in self._forms else self._check(request, key)
        if form is None or (request.deadline is not None and time.monotonic() > request.deadline):
            return None
        started = time.perf_counter()
        asks = [_ask(share, request.features) for share in form.shares]
        if not self._tier.gather(asks):
            return None
        vectors: dict[str, VectorArray] = {}
        for share, (_, _, rows) in zip(form.shares, asks, strict=True):
            _pool_share(share, rows, request.features, vectors)
        if not form.in_order:
            vectors = {name: vectors[name] for name in request.features}
        self._observer.finished(form.sources, time.perf_counter() - started, ())
        return LookupResult(vectors)

    def _check(self, request: LookupRequest, key: tuple[object, ...]) -> _Form | None:
        """The form of a request of a kind that was not seen before."""
        groups = self._plan(tuple(request.features), request.by_table)
        total = check_sizes(self._model, request)
        shares = []
        for table, features in groups:
            sizes = [
                len(check_keys(feature, request.features[feature.name]).keys)
                for feature in features
            ]
            shares.append(_Share(table, features, sum(sizes)))
        names = [feature.name for share in shares for feature in share.features]
        form = None
        if total <= self._most_keys:
            sources = [(share.table, self._source * share.n) for share in shares]
            form = _Form(tuple(shares), sources, names == list(request.features))
        if len(self._forms) >= _FORMS_KEPT:
            self._forms.clear()
        self._forms[key] = form
        return form


def _ask(share: _Share, keys: Mapping[str, JaggedKeys]) -> Ask:
    """The share's keys, and room for their rows."""
    if len(share.features) == 1:
        feature = share.features[0]
        flat = feature.shift(keys[feature.name].keys)
    else:
        flat = np.concatenate([f.shift(keys[f.name].keys) for f in share.features])
    table = share.table
    return table, flat, np.empty((share.n, table.dim), table.dtype)


def _pool_share(
    share: _Share,
    rows: VectorArray,
    keys: Mapping[str, JaggedKeys],
    vectors: dict[str, VectorArray],
) -> None:
    """Fill in ``vectors`` from the share's ``rows (n, dim)``."""
    if len(share.features) == 1:
        feature = share.features[0]
        vectors[feature.name] = pool(rows, keys[feature.name], feature.pooling)
        return
    start = 0
    for feature in share.features:
        mine = keys[feature.name]
        stop = start + len(mine.keys)
        vectors[feature.name] = pool(rows[start:stop], mine, feature.pooling)
        start = stop
