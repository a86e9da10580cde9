"""What a lookup serves and who may serve it: in this process (``LookupEngine``) or elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hps.config.ps_json.tables import is_fused
from hps.tracing import RequestContext
from hps.types import EmbeddingTable, JaggedKeys, KeyArray, LookupRequest, LookupResult, Pooling


@dataclass(frozen=True, slots=True)
class Feature:
    """Vectors made of a categorical field of the request: from which table, and how.

    ``key_offset`` is added to every key mod 2^64. ``hotness`` is the number of keys per sample, None
    when the request decides. A ``context`` feature may come with batch 1 beside candidates.
    ``max_hotness`` bounds the keys per sample, on average over a request. ``keys_of`` is the request's
    name for the keys where several tables take the same; else it is ``name``.
    """

    name: str
    table: EmbeddingTable
    key_offset: int = 0
    pooling: Pooling = "sum"
    hotness: int | None = None
    context: bool = False
    max_hotness: int | None = None
    keys_of: str = ""

    @property
    def input(self) -> str:
        """The request's name for the keys."""
        return self.keys_of or self.name

    def shift(self, keys: KeyArray) -> KeyArray:
        """The table's keys for this feature's keys: ``key_offset`` added mod 2^64, and of a table
        with 32-bit keys the low 32 bits."""
        if self.key_offset:
            keys = (keys.view(np.uint64) + np.uint64(self.key_offset % 2**64)).view(np.int64)
        return keys if self.table.key_bits == 64 else self.table.narrow(keys)


def features_by_input(features: Mapping[str, Feature]) -> dict[str, list[Feature]]:
    """The features by the request's name for their keys."""
    inputs: dict[str, list[Feature]] = {}
    for feature in features.values():
        inputs.setdefault(feature.input, []).append(feature)
    return inputs


def keys_by_feature(
    keys: Mapping[str, JaggedKeys], features: Mapping[str, Feature]
) -> Mapping[str, JaggedKeys]:
    """The request's ``keys`` by feature: those that several tables take once for each. Unknown names stay;
    the lookup rejects them."""
    if keys.keys() <= features.keys():
        return keys
    inputs = features_by_input(features)
    found: dict[str, JaggedKeys] = {}
    for name, given in keys.items():
        found |= {feature.name: given for feature in inputs.get(name, ())} or {name: given}
    return found


def hps_keys_order(tables: Sequence[str], features: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    """Names that HPS's ``KEYS`` go by, in order, with the table of each: the tables, or where these are HPS's
    fused ones the ``features (name, table)``, which are called as the tables were before."""
    return dict(features) if any(map(is_fused, tables)) else dict(zip(tables, tables, strict=True))


@dataclass(frozen=True, slots=True)
class LookupModel:
    """One version of a model as lookups see it. ``max_keys`` bounds the keys of one request,
    ``max_table_keys`` those of one table where a request names tables instead of features."""

    name: str
    version: int
    tables: Mapping[str, EmbeddingTable]
    features: Mapping[str, Feature]
    max_batch_size: int = 65_536
    max_keys: int = 1 << 31
    max_table_keys: Mapping[str, int] = field(default_factory=dict)


class PreparedSubmit(Protocol):
    """A prepared lookup, begun with the keys of each feature, ``(n,) int64`` in the request's order, the
    deadline, and on whose behalf. What is recorded of that (`RequestContext.is_recorded`) is not prepared."""

    def __call__(
        self,
        keys: Sequence[KeyArray],
        deadline: float | None,
        origin: RequestContext | None = None,
        /,
    ) -> Future[LookupResult]: ...


class Lookup(Protocol):
    """``LookupEngine`` and its remote twin. May be called from any thread."""

    @property
    def features(self) -> Mapping[str, Feature]: ...

    @property
    def tables(self) -> Mapping[str, EmbeddingTable]: ...

    def submit(self, request: LookupRequest) -> Future[LookupResult]:
        """Start a lookup; the future is done already when no store had to be asked.

        Never waits. Raises ``BadRequest`` for a request at fault and ``Unavailable`` when too many
        lookups wait already; everything later is the future's exception.

        ``request.out`` belongs to the lookup until the future is done, cancelled included: ``cancel``
        returns False while rows are being written.
        """
        ...

    def prepare(self, request: LookupRequest) -> PreparedSubmit:
        """``submit`` for requests that differ from this one in their keys and deadline alone: not in
        how many keys a feature has, nor in their batch. For requests without offsets, weights and
        ``out``. Raises ``BadRequest``."""
        ...

    def lookup(self, request: LookupRequest) -> LookupResult:
        """As ``submit``, waiting for the answer."""
        ...
