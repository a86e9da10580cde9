"""Miss fill: rows from the host for the misses of a fetch, in the order in which the device listed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.launch import UNANSWERED
from hps.cuda.loader import cupy
from hps.types import EmbeddingTable, KeyArray

SLICE_BYTES = 1 << 24
"""Bytes of rows that are gathered at a time, while the device takes the rows before them."""


@dataclass(slots=True)
class MissBatch:
    """Missing keys of a batch with a part per table, in no order, and the memory for their rows.

    Each part begins at its entry of ``bases (tables,)``. ``positions (m,)`` are those of the missing keys;
    ``keys`` are these keys if ``listed``, else all keys of the batch. ``rows (m, stride) uint8`` takes a row
    each in its first bytes, ``sources (m,)`` its source code, or `UNANSWERED`; ``counts (tables, 2)`` is
    increased by the table's misses and rows found. The batch is one of several slices of ``total`` misses.

    ``placing``: a `PlaceLaunch`, by which a gather of the compiled core places the rows on ``stream``, a CUDA
    stream's address, as they arrive; it then sets ``is_placed``. None: there is none."""

    tables: Sequence[EmbeddingTable]
    bases: NDArray[np.uint32]
    keys: KeyArray
    positions: NDArray[np.uint32]
    listed: bool
    rows: NDArray[np.uint8]
    sources: NDArray[np.uint8]
    counts: NDArray[np.uint32]
    total: int
    placing: Any = None
    stream: int = 0
    is_placed: bool = False


Gather = Callable[[MissBatch], int]
"""Fills the rows and sources of a batch of misses; returns the number of keys without a row."""


def no_rows(batch: MissBatch) -> int:
    """The `Gather` of a host without rows."""
    batch.sources[:] = UNANSWERED
    parts = np.searchsorted(batch.bases, batch.positions, side="right") - 1
    batch.counts[:, 0] += np.bincount(parts, minlength=len(batch.bases)).astype(np.uint32)
    return len(batch.positions)


@dataclass(slots=True)
class MissReport:
    """Misses of a fetch: per table their number and those filled, ``counts (tables, 2)``; and the
    ascending positions of each table's keys that have no row, ``left``, None if there are none."""

    counts: NDArray[np.int64]
    left: list[NDArray[np.int64]] | None


class MissRows:
    """Two buffers of pinned memory by which rows reach a device in turn. One thread at a time."""

    def __init__(self) -> None:
        self._buffers = [_RowBuffer(), _RowBuffer()]

    def fill(self, fetch: Any, first: int, stream: Any, gather: Gather) -> MissReport:
        """Fill the misses of ``fetch``, launched on ``stream``, with the rows of ``gather``.

        ``first``: the number of a chunk before which there are none. Does not wait for the last copies of
        rows, which are on ``stream``."""
        counts = np.zeros((len(fetch.requests), 2), np.int64)
        left: list[tuple[Any, NDArray[np.uint32]]] = []
        for chunk in fetch.chunks[first:]:
            missing = chunk.wait(stream)
            own = np.zeros((len(chunk.tables), 2), np.uint32)
            rows = max(1, SLICE_BYTES // (chunk.stride + 1))
            for start in range(0, missing, rows):
                batch = self._begin_slice(chunk, start, min(missing, start + rows), own, missing)
                batch.placing, batch.stream = chunk.placing(), stream.ptr
                unanswered = self._fill_slice(chunk, start, batch, stream, gather)
                if len(unanswered):
                    left.append((chunk, unanswered))
            counts[chunk.indices] += own
        return MissReport(counts, _by_table(fetch, left) if left else None)

    def _begin_slice(
        self, chunk: Any, start: int, stop: int, counts: NDArray[np.uint32], total: int
    ) -> MissBatch:
        """Return the misses from ``start`` to ``stop`` of ``total``, with the next buffer for their rows."""
        self._buffers.reverse()
        rows, sources = self._buffers[0].begin(stop - start, chunk.stride)
        positions, keys, listed = chunk.misses(start, stop)
        tables, bases = chunk.tables, chunk.bases
        return MissBatch(tables, bases, keys, positions, listed, rows, sources, counts, total)

    def _fill_slice(
        self, chunk: Any, start: int, batch: MissBatch, stream: Any, gather: Gather
    ) -> NDArray[np.uint32]:
        """Fill the misses of ``batch``, from ``start`` on; return the positions of keys without a row."""
        buffer, n = self._buffers[0], len(batch.positions)
        unanswered = gather(batch)
        if unanswered < n and not batch.is_placed:
            chunk.place(stream, start, n, buffer.rows_at, buffer.sources_at)
        buffer.sent.record(stream)
        return batch.positions[batch.sources == UNANSWERED] if unanswered else _NONE


_NONE = np.empty(0, np.uint32)


def _by_table(fetch: Any, left: list[tuple[Any, NDArray[np.uint32]]]) -> list[NDArray[np.int64]]:
    """Return the ascending positions of each table's keys among its own, from positions in chunks."""
    found: list[list[NDArray[np.int64]]] = [[] for _ in fetch.requests]
    for chunk, positions in left:
        positions = np.sort(positions)
        cuts = [*np.searchsorted(positions, chunk.bases).tolist(), len(positions)]
        for part, index in enumerate(chunk.indices.tolist()):
            own = positions[cuts[part] : cuts[part + 1]].astype(np.int64)
            found[index].append(own - int(chunk.bases[part]) + chunk.starts[part])
    return [np.sort(np.concatenate(own)) if own else _NONE.astype(np.int64) for own in found]


class _RowBuffer:
    """Pinned memory for rows and their sources; reusable once ``sent`` has happened."""

    def __init__(self) -> None:
        self.sent = cupy().cuda.Event(block=False, disable_timing=True)
        self._size = 0
        self.rows_at = self.sources_at = 0

    def begin(self, n: int, stride: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return ``(n, stride)`` bytes for rows and ``(n,)`` for sources."""
        self.sent.synchronize()
        size = n * (stride + 1)
        if size > self._size:
            self._size = 1 << (size - 1).bit_length()
            self._memory = cupy().cuda.alloc_pinned_memory(self._size)
            self._bytes: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8, self._size)
        self.rows_at = self._memory.ptr
        self.sources_at = self.rows_at + n * stride
        rows = self._bytes[: n * stride].reshape(n, stride)
        return rows, self._bytes[n * stride : size]
