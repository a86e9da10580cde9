"""The protocol of a lookup, local (`LookupEngine`) or remote, and the model it serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from hps.config.ps_json.tables import is_fused
from hps.tracing import RequestContext, span_until_done
from hps.types import EmbeddingTable, JaggedKeys, KeyArray, LookupRequest, LookupResult, Pooling

Truncation = Literal["reject", "keep_first", "keep_last"]
"""What happens to a sample with more keys than the feature's ``max_length``."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A categorical field of a request: its table, pooling and limits.

    ``key_offset`` is added to every key mod 2^64. ``hotness`` is the number of keys per sample, None
    if the request decides. A ``context`` feature may have batch 1 while the candidates have more.
    ``max_hotness`` bounds the keys per sample, on average over a request. ``keys_of`` is the request's
    name for the keys if several tables take the same keys; by default it is ``name``. Rows longer than
    ``max_norm`` are scaled down to it: see `hps.lookup.max_norm`. The vectors of a feature that is not
    pooled are padded to ``max_length`` per sample for a network, if it is set: see `hps.lookup.padding`."""

    name: str
    table: EmbeddingTable
    key_offset: int = 0
    pooling: Pooling = "sum"
    hotness: int | None = None
    context: bool = False
    max_hotness: int | None = None
    keys_of: str = ""
    max_norm: float | None = None
    max_length: int | None = None
    truncation: Truncation = "reject"

    @property
    def input(self) -> str:
        """The request's name for the keys."""
        return self.keys_of or self.name

    @property
    def shifts(self) -> bool:
        """Whether `shift` changes keys."""
        return bool(self.key_offset) or self.table.key_bits != 64

    def shift(self, keys: KeyArray) -> KeyArray:
        """Convert this feature's keys to the table's.

        Adds ``key_offset`` mod 2^64; a table with 32-bit keys uses the low 32 bits."""
        if self.key_offset:
            keys = (keys.view(np.uint64) + np.uint64(self.key_offset % 2**64)).view(np.int64)
        return keys if self.table.key_bits == 64 else self.table.narrow(keys)


def features_by_input(features: Mapping[str, Feature]) -> dict[str, list[Feature]]:
    """Group the features by the request's name for their keys."""
    inputs: dict[str, list[Feature]] = {}
    for feature in features.values():
        inputs.setdefault(feature.input, []).append(feature)
    return inputs


def keys_by_feature(
    keys: Mapping[str, JaggedKeys], features: Mapping[str, Feature]
) -> Mapping[str, JaggedKeys]:
    """Map a request's ``keys`` to features; keys that several features share are repeated for each.

    Unknown names stay; the lookup rejects them."""
    if keys.keys() <= features.keys():
        return keys
    inputs = features_by_input(features)
    by_feature: dict[str, JaggedKeys] = {}
    for name, jagged in keys.items():
        by_feature |= {feature.name: jagged for feature in inputs.get(name, ())} or {name: jagged}
    return by_feature


def hps_keys_order(tables: Sequence[str], features: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    """Map the names in the order of HPS's ``KEYS`` input to their tables.

    The names are those of the tables. For HPS's fused tables they are those of ``features (name,
    table)``, which are the names that the tables had before fusing."""
    return dict(features) if any(map(is_fused, tables)) else dict(zip(tables, tables, strict=True))


@dataclass(frozen=True, slots=True)
class LookupModel:
    """One version of a model as lookups see it.

    ``max_keys`` bounds the keys of one request; ``max_table_keys`` bounds the keys of each table in a
    request that names tables instead of features."""

    name: str
    version: int
    tables: Mapping[str, EmbeddingTable]
    features: Mapping[str, Feature]
    max_batch_size: int = 65_536
    max_keys: int = 1 << 31
    max_table_keys: Mapping[str, int] = field(default_factory=dict)


class PreparedSubmit(Protocol):
    """Function that starts a prepared lookup: keys, deadline and request context in, future out.

    Keys are ``(n,) int64`` per feature, in the request's order. Requests that are recorded
    (`RequestContext.is_recorded`) must not use a prepared lookup."""

    def __call__(
        self,
        keys: Sequence[KeyArray],
        deadline: float | None,
        origin: RequestContext | None = None,
        /,
    ) -> Future[LookupResult]: ...


class PreparedRequest:
    """Makes requests that differ from ``request`` only in keys, deadline and context."""

    def __init__(self, request: LookupRequest) -> None:
        self._batches = [(name, keys.batch) for name, keys in request.features.items()]
        self._bare = replace(request, features={})

    def request(
        self, keys: Sequence[KeyArray], deadline: float | None, origin: RequestContext | None
    ) -> LookupRequest:
        features = {
            name: JaggedKeys(flat, batch)
            for (name, batch), flat in zip(self._batches, keys, strict=True)
        }
        return replace(self._bare, features=features, deadline=deadline, origin=origin)


class Lookup(Protocol):
    """Lookup of vectors, local or remote. Thread-safe."""

    model: LookupModel
    features: Mapping[str, Feature]
    tables: Mapping[str, EmbeddingTable]

    def submit(self, request: LookupRequest) -> Future[LookupResult]:
        """Start a lookup; the future is already done if no store was needed.

        Never blocks. Raises ``BadRequest`` for an invalid request and ``Unavailable`` if too many
        lookups are queued; later errors are the future's exception.

        ``request.out`` belongs to the lookup until the future is done, also if cancelled: ``cancel``
        returns False while rows are being written."""
        ...

    def prepare(self, request: LookupRequest) -> PreparedSubmit:
        """Prepare ``submit`` for requests that differ only in key values and deadline.

        The number of keys per feature and the batch size are fixed. For requests without offsets,
        weights and ``out``. Raises ``BadRequest``."""
        ...

    def lookup(self, request: LookupRequest) -> LookupResult:
        """Like ``submit``, but wait for the result."""
        return self.submit(request).result()


def submit_in_span(
    model: str, request: LookupRequest, submit: Callable[[LookupRequest], Future[LookupResult]]
) -> Future[LookupResult]:
    """Call ``submit(request)``, in a span of the request's trace if that is recorded."""
    origin = request.origin
    if origin is None or not origin.is_recorded:
        return submit(request)
    span = origin.begin("lookup")
    span.note(model=model, keys=sum(len(keys.keys) for keys in request.features.values()))
    return span_until_done(span, partial(submit, replace(request, origin=span)), _span_attributes)


def _span_attributes(result: LookupResult) -> dict[str, Any]:
    return {"defaulted": result.defaulted, "degraded": ",".join(result.degraded)}


def is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline
