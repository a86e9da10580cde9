"""Encoding of lookup requests and decoding of responses (`hps/v1/lookup.proto`).

The common part of lookups with the same names and sizes is encoded once: per lookup only its keys are
written, and arrays are sliced from the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hps.errors import HpsError
from hps.lookup.base import Feature, LookupModel
from hps.lookup.pooling import gives_narrow_rows
from hps.observability.meters import LookupMeter
from hps.tiers.stored_rows import to_vectors
from hps.types import (
    EmbeddingTable,
    JaggedKeys,
    KeyArray,
    LookupRequest,
    LookupResult,
    Source,
    VectorArray,
)
from hps.v1 import lookup_pb2 as pb

_KEY_BYTES = 8
_INT64, _FLOAT32 = np.dtype("<i8"), np.dtype("<f4")
_UINT8, _UINT64 = np.dtype("u1"), np.dtype("<u8")
_REMOTE = bytes([Source.REMOTE])


class _ResponseSlice(NamedTuple):
    """Slice of a response for one name: its ``keys``; byte ``at`` and ``shape`` of its vectors.

    ``aligned``: that byte is a multiple of the element size. ``stored``: the table whose rows these are, as
    they are stored; None for vectors."""

    name: str
    keys: slice
    at: int
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    aligned: bool
    stored: EmbeddingTable | None = None


class _ResponseLayout:
    """Where the vectors of a response lie. ``stored``: those of narrow row formats are rows as stored."""

    def __init__(
        self, known: Mapping[str, Feature], features: Mapping[str, JaggedKeys], *, stored: bool
    ) -> None:
        self.keys = self.size = 0
        self.slices = tuple(
            self._next_slice(known[name], name, keys, stored=stored)
            for name, keys in features.items()
        )
        self._named = [piece.name for piece in self.slices]
        self._alike: tuple[tuple[int, int, int], np.dtype[Any]] | None = None
        plain = all(piece.stored is None for piece in self.slices)
        # One reshape is faster.
        if plain and len({(piece.shape, piece.dtype) for piece in self.slices}) == 1:
            first = self.slices[0]
            self._alike = (len(self.slices), *first.shape), first.dtype

    def _next_slice(
        self, feature: Feature, name: str, keys: JaggedKeys, *, stored: bool
    ) -> _ResponseSlice:
        count, table = len(keys.keys), feature.table
        rows = count if feature.pooling == "none" else keys.batch
        narrow = stored and gives_narrow_rows(feature, keys)
        dtype = (table.row_dtype if narrow else table.dtype).newbyteorder("<")
        width = table.row_width if narrow else table.dim
        key_slice, at = slice(self.keys, self.keys + count), self.size
        self.keys += count
        self.size += rows * width * dtype.itemsize
        is_aligned = at % dtype.itemsize == 0
        of = table if narrow else None
        return _ResponseSlice(name, key_slice, at, (rows, width), dtype, is_aligned, of)

    def vectors(self, packed: bytes) -> dict[str, VectorArray]:
        """Cut ``packed``, of ``size`` bytes, into vectors by name."""
        if self._alike is not None:
            whole, dtype = self._alike
            rows = np.frombuffer(packed, dtype).reshape(whole)
            return dict(zip(self._named, rows, strict=True))
        vectors = {}
        for name, _, at, shape, dtype, is_aligned, stored in self.slices:
            found: Any = np.ndarray(shape, dtype, packed, at)
            if stored is not None:
                vectors[name] = to_vectors(stored, found)
            else:
                vectors[name] = found if is_aligned else found.copy()
        return vectors


class LookupRequestTemplate:
    """Codec of lookups of one model version with the same names and sizes. Thread-safe."""

    __slots__ = ("_head", "_report", "_stored", "_vectors", "are_keys_all", "finished")

    def __init__(
        self,
        model: LookupModel,
        known: Mapping[str, Feature],
        request: LookupRequest,
        features: Mapping[str, JaggedKeys],
        meter: LookupMeter,
    ) -> None:
        """``features`` are the request's checked keys, of the ``known`` features."""
        self._vectors = _ResponseLayout(known, features, stored=False)
        self._stored = _ResponseLayout(known, features, stored=True)
        header = pb.Asked(
            model=model.name,
            version=model.version,
            by_table=request.by_table,
            report=request.want_source,
            stored_rows=self._stored.size < self._vectors.size,
        )
        self._report = request.want_source
        plain = [keys.offsets is None and keys.weights is None for keys in features.values()]
        self.are_keys_all = all(plain)
        """True if the requests have neither offsets nor weights."""
        for name, jagged in features.items():
            header.names.add(
                name=name,
                count=len(jagged.keys),
                batch=jagged.batch,
                has_offsets=jagged.offsets is not None,
                has_weights=jagged.weights is not None,
            )
        self._head = _encoded_head(header, self._vectors.keys)
        remote = [(known[n].table, _REMOTE * len(k.keys), ()) for n, k in features.items()]
        self.finished = meter.finished_alike(remote)
        """Counts one lookup; called with the seconds that it took."""

    def message(self, keys: Sequence[KeyArray], more: bytes = b"") -> bytes:
        """Encode the ``LookupRequest`` of ``keys``, one array per name.

        ``more``: see `offsets_and_weights`."""
        pieces: list[Any] = [self._head, *keys, more]
        return b"".join(pieces)

    def result(self, response: Any) -> LookupResult:
        """Decode a ``LookupResponse``; most arrays are read-only. Raises ``HpsError`` for a mismatch."""
        packed, layout = response.vectors, self._stored if response.stored_rows else self._vectors
        if len(packed) != layout.size:
            raise HpsError(
                f"a lookup node sent {len(packed)} bytes of vectors, not {layout.size}, for "
                + ", ".join(piece.name for piece in layout.slices)
            )
        result = LookupResult(
            layout.vectors(packed),
            defaulted=response.defaulted,
            degraded=tuple(response.degraded),
            stale_s=response.stale_s,
        )
        if self._report:
            self._cut(result, response.sources, response.versions)
        return result

    def _cut(self, result: LookupResult, sources: bytes, versions: bytes) -> None:
        """Fill in the sources and versions of every key."""
        n = self._vectors.keys
        if (len(sources), len(versions)) != (n, n * _UINT64.itemsize):
            raise HpsError(
                f"a lookup node sent {len(sources)} bytes of sources and {len(versions)} of versions for "
                f"{n} keys"
            )
        all_sources = np.frombuffer(sources, _UINT8)
        all_versions = np.frombuffer(versions, _UINT64)
        for piece in self._vectors.slices:
            result.sources[piece.name] = all_sources[piece.keys]
            result.versions[piece.name] = all_versions[piece.keys]


def _encoded_head(header: Any, keys: int) -> bytes:
    """The bytes of a ``LookupRequest`` with ``header`` before those of its ``keys``."""
    request = pb.LookupRequest(asked=header.SerializeToString(), keys=bytes(_KEY_BYTES * keys))
    packed: bytes = request.SerializeToString()
    return packed[: len(packed) - len(request.keys)]


def offsets_and_weights(features: Mapping[str, JaggedKeys]) -> bytes:
    """Encode the rest of a ``LookupRequest``, which follows its keys."""
    offsets = [each.offsets for each in features.values() if each.offsets is not None]
    weights = [each.weights for each in features.values() if each.weights is not None]
    if not (offsets or weights):
        return b""
    more = pb.LookupRequest(
        offsets=b"".join(each.astype(_INT64, copy=False).tobytes() for each in offsets),
        weights=b"".join(each.astype(_FLOAT32, copy=False).tobytes() for each in weights),
    )
    packed: bytes = more.SerializeToString()
    return packed
