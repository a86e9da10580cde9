"""``hps.v1`` lookups: from the bytes of requests to keys, and from vectors to the bytes of responses.

Requests that differ only in their numbers have the same `Asked`. It is parsed once, and kept with the
prepared lookup and the head of the responses. Vectors are joined to the head once: protobuf would copy them
twice more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.lookup.base import PreparedSubmit
from hps.node.traffic_split import ValueOf, input_text
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.tracing import RequestContext
from hps.types import JaggedKeys, KeyArray, LookupRequest, LookupResult
from hps.v1 import lookup_pb2 as pb
from services.frontend import request_errors as faults
from services.frontend.errors import short_value
from services.frontend.grpc.protobuf_wire import field, varint
from services.frontend.state import ServedEndpoint

_INT64, _FLOAT32 = np.dtype("<i8"), np.dtype("<f4")
# Tags of fields of LookupResponse.
_SOURCES, _VERSIONS, _VECTORS = 0x32, 0x3A, 0x42


class _NamedKeys(NamedTuple):
    """A feature or a table, and the slices of the request's numbers that belong to it."""

    name: str
    keys: slice
    batch: int
    offsets: slice | None
    weights: slice | None


class LookupRequestParser:
    """Parser and encoder of the requests with one `Asked`. Thread-safe."""

    def __init__(
        self, asked: Any, entry: ServedEndpoint, digest: int, max_keys: int, metrics: Metrics
    ) -> None:
        """``asked`` is an `Asked` message, ``digest`` that of the entry's description.

        Raises ``BadRequest`` or ``TooLarge``.
        """
        self.entry = entry
        self.report, self.by_table = asked.report, asked.by_table
        self.stored_rows: bool = asked.stored_rows
        self.observe = metrics.histogram(
            m.REQUEST_SECONDS, "grpc", "lookup", entry.name, entry.version, "OK"
        ).observe
        self.choose: Callable[[ValueOf], LookupRequestParser] | None = None
        """Returns the parser in this one's place for a request, if a traffic rule chooses its version."""
        self.names_version = bool(asked.version or asked.label)
        self.prepared: PreparedSubmit | None = None
        """Submits requests without offsets and weights; set by `prepare`."""
        self._digest = digest
        self._keys = self._offsets = self._weights = 0
        self._names = tuple(self._name(each) for each in asked.names)
        if self._keys > max_keys:
            raise faults.too_many_keys(self._keys, max_keys)
        known: set[str] = set()
        for each in self._names:
            if each.name in known:
                raise BadRequest(f"{short_value(each.name)} occurs twice in the request")
            known.add(each.name)
        self.batch = max((each.batch for each in self._names), default=0)
        """Samples, for statistics; keys by table count as one sample."""
        if self.by_table and self._names:
            self.batch = 1
        plain, stored = LookupResult({}), LookupResult({}, stored_rows=True)
        self._heads = self._encode_head(plain, 0), self._encode_head(stored, 0)

    def _name(self, declared: Any) -> _NamedKeys:
        """Assign the next slices of the numbers to a name; names are in order."""
        name, count, batch = declared.name, declared.count, declared.batch
        if count < 0 or batch < 0:
            raise BadRequest(
                f"{short_value(name)}: count {count} and batch {batch} must not be negative"
            )
        if not (declared.has_offsets or batch):
            batch = count
        if self.by_table and batch > count:
            raise BadRequest(
                f"{short_value(name)} is a table: batch {batch} exceeds its {count} keys; omit the batch"
            )
        keys, offsets, weights = slice(self._keys, self._keys + count), None, None
        self._keys += count
        if declared.has_offsets:
            offsets = slice(self._offsets, self._offsets + batch + 1)
            self._offsets += batch + 1
        if declared.has_weights:
            weights = slice(self._weights, self._weights + count)
            self._weights += count
        return _NamedKeys(name, keys, batch, offsets, weights)

    def prepare(self) -> None:
        """Prepare the lookup, as more requests like this one are expected. Raises ``BadRequest``."""
        if self._offsets or self._weights or not self._names:
            return
        keys = np.zeros(self._keys, _INT64)
        features = {each.name: JaggedKeys(keys[each.keys], each.batch) for each in self._names}
        request = self.request(features, None)
        self.prepared = self.entry.lookup.prepare(request)

    def first_key(self, request: Any, name: str) -> str | None:
        """Return the first key of a feature or table as text; None if there is none."""
        for each in self._names:
            if each.name == name and each.keys.start < each.keys.stop:
                at = each.keys.start * _INT64.itemsize
                return input_text(np.frombuffer(request.keys[at : at + _INT64.itemsize], _INT64))
        return None

    def keys(self, request: Any) -> list[KeyArray]:
        """Return the keys of each name, ``(n,)``, read-only. Raises ``BadRequest``."""
        flat = _numbers(request.keys, self._keys, _INT64, "keys")
        return [flat[each.keys] for each in self._names]

    def features(self, request: Any, keys: list[KeyArray]) -> dict[str, JaggedKeys]:
        """Combine ``keys`` with the request's offsets and weights. Raises ``BadRequest``."""
        offsets = _numbers(request.offsets, self._offsets, _INT64, "offsets")
        weights = _numbers(request.weights, self._weights, _FLOAT32, "weights")
        return {
            each.name: JaggedKeys(
                mine,
                each.batch,
                None if each.offsets is None else offsets[each.offsets],
                None if each.weights is None else weights[each.weights],
            )
            for each, mine in zip(self._names, keys, strict=True)
        }

    def request(
        self,
        features: dict[str, JaggedKeys],
        deadline: float | None,
        origin: RequestContext | None = None,
    ) -> LookupRequest:
        """Return the lookup of ``features``."""
        return LookupRequest(
            features, deadline, self.report, None, self.by_table, origin, self.stored_rows
        )

    def answer(self, result: LookupResult, stale_s: int) -> bytes:
        """Return the encoded ``LookupResponse`` with ``result``."""
        is_plain = not (result.defaulted or result.degraded or stale_s)
        head = self._heads[result.stored_rows] if is_plain else self._encode_head(result, stale_s)
        pieces: list[Any] = [head]
        names = [each.name for each in self._names]
        if self.report:
            sources = b"".join([result.sources[name].tobytes() for name in names])
            versions = b"".join([result.versions[name].tobytes() for name in names])
            pieces += [field(_SOURCES, sources), field(_VERSIONS, versions)]
        vectors: list[Any] = [np.ascontiguousarray(result.vectors[name]) for name in names]
        size = sum([each.nbytes for each in vectors])
        return b"".join((*pieces, b"%c%b" % (_VECTORS, varint(size)), *vectors))

    def _encode_head(self, result: LookupResult, stale_s: int) -> bytes:
        head = pb.LookupResponse(
            version=self.entry.served.version,
            digest=self._digest,
            defaulted=result.defaulted,
            degraded=result.degraded,
            stale_s=stale_s,
            stored_rows=result.stored_rows,
        )
        packed: bytes = head.SerializeToString()
        return packed


def _numbers(packed: bytes, n: int, dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """``packed`` as an array ``(n,)``, read-only, without a copy."""
    if len(packed) != n * dtype.itemsize:
        raise BadRequest(
            f"{what}: {len(packed)} bytes do not match 'asked', which declares {n} {dtype.name} numbers of "
            f"{dtype.itemsize} bytes each"
        )
    return np.frombuffer(packed, dtype)
