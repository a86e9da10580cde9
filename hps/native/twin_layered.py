"""NumPy twin of a mapped table with a cache table behind it (include/hps/layered_reader.hpp)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hps.native import twin_pool
from hps.native.twin_cache import CacheTable
from hps.native.twin_mapped import MappedTable
from hps.types import IndexArray, KeyArray, SourceArray, VectorArray, VersionArray


class LayeredTable:
    """The rows of ``mapped``, and those of ``cache`` for keys that are absent there or overridden.

    Reads only; all methods are thread-safe. Rows of ``mapped`` are reported with the source ``code``.
    ``cache`` may be None. A damaged ``mapped`` is not read."""

    def __init__(self, mapped: MappedTable, cache: CacheTable | None, code: int) -> None:
        self._mapped, self._cache, self._code = mapped, cache, code
        self.dim, self.like, self.threads = mapped.dim, mapped.like, 1
        self.format = mapped.format

    @property
    def tombstones(self) -> int:
        """The number of tombstones in the cache."""
        return 0 if self._cache is None else self._cache.tombstones

    def fetch(
        self,
        keys: KeyArray,
        missing: IndexArray,
        oldest_tombstone: int,
        out: VectorArray,
        versions: VersionArray,
        source: SourceArray,
    ) -> IndexArray | None:
        """See `CacheTable.fetch`."""
        hidden, absent = self._mapped.fetch(keys, missing, out, versions, source)
        asked = missing
        missing = np.sort(
            np.concatenate([a for a in (hidden, absent, missing[:0]) if a is not None])
        )
        source[np.setdiff1d(asked, missing)] = self._code
        if not len(missing):
            return None
        if self._cache is None:
            return missing
        return self._cache.fetch(keys, missing, oldest_tombstone, out, versions, source)

    def gather(self, keys: KeyArray, out: VectorArray) -> bool:
        """See `CacheTable.gather`."""
        return not self.read_rows(keys, out).any()

    def pool_bags(
        self,
        keys: KeyArray,
        offsets: IndexArray | None,
        weights: twin_pool.Floats | None,
        divisors: twin_pool.Floats | None,
        out: VectorArray,
        supplied: tuple[IndexArray, twin_pool.Floats] | None = None,
    ) -> IndexArray | None:
        """See `CacheTable.pool_bags`."""
        return twin_pool.pool_bags(
            self.read_rows, self.like, keys, offsets, weights, divisors, out, supplied, self.format
        )

    def read_rows(self, keys: KeyArray, vectors: VectorArray) -> NDArray[np.bool_]:
        """Read the rows of all ``keys`` into ``vectors``; return which keys have none."""
        missing = self._mapped.read_rows(keys, vectors)
        if self._cache is not None and missing.any():
            rows = np.zeros((int(missing.sum()), self.dim), vectors.dtype)
            still = self._cache.read_rows(keys[missing], rows)
            vectors[missing] = rows
            missing[missing] = still
        return missing
