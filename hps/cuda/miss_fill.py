"""Miss fill: rows from the host for the misses of a prepared fetch, all tables in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.launch import PARTS, SCATTER_ARGS, blocks_of
from hps.cuda.loader import CudaKernel, KernelStruct, cupy, kernel
from hps.cuda.prepared import PreparedFetch
from hps.cuda.scatter import tile_and_unit
from hps.cuda.staging import StagingBuffer, padded_bytes
from hps.types import EmbeddingTable


class PreparedMissFill:
    """Completes ``fetch``, whose keys are of ``tables``, with rows of the source ``code``.

    The caller fills the arrays that `allocate` returns and calls `launch`; the previous launch must have
    ended. Versions are not copied: the rows' are 0 afterwards. One thread at a time, on the current device.
    """

    def __init__(self, fetch: PreparedFetch, tables: Sequence[EmbeddingTable], code: int) -> None:
        cp = cupy()
        self._tables = tuple(tables)
        self._staging = StagingBuffer()
        most = max(len(rows) for rows in fetch.rows)
        # The same for all rows, so they need not be copied over the bus.
        self._same = cp.full(most, code, np.uint8), cp.zeros(most, np.uint64)
        self._launches = [
            _MissFillLaunch(fetch, self._same, self._tables, start)
            for start in range(0, len(self._tables), PARTS)
        ]
        cp.cuda.get_current_stream().synchronize()

    def allocate(self, misses: Sequence[NDArray[np.int64]]) -> list[NDArray[Any]]:
        """Return, per table, ``(m, dim)`` of pinned memory for the rows at the positions ``misses (m,)``."""
        staging, sizes = self._staging, [len(left) for left in misses]
        each = [padded_bytes(n * t.row_bytes) for n, t in zip(sizes, self._tables, strict=True)]
        staging.begin(sum(each) + padded_bytes(8 * sum(sizes)))
        places = [
            staging.allocate(n * table.dim, table.dtype)
            for n, table in zip(sizes, self._tables, strict=True)
        ]
        positions, positions_at = staging.allocate(sum(sizes), np.int64)
        np.concatenate(misses, out=positions)
        counts = np.array(sizes)
        ends = np.cumsum(counts)
        rows_at = np.array([at for _, at in places], np.uint64)
        for each_launch in self._launches:
            each_launch.fill(rows_at, positions_at + 8 * (ends - counts), counts)
        return [
            rows.reshape(n, table.dim)
            for (rows, _), n, table in zip(places, sizes, self._tables, strict=True)
        ]

    def launch(self, stream: Any) -> None:
        """Write the filled rows and their sources to the fetch's arrays on ``stream``; does not wait."""
        self._staging.send(stream)
        for each in self._launches:
            each.run(stream)


class _MissFillLaunch:
    """One launch: the tables from ``start`` on, as many as fit."""

    def __init__(
        self,
        fetch: PreparedFetch,
        same: tuple[Any, Any],
        tables: Sequence[EmbeddingTable],
        start: int,
    ) -> None:
        self._mine = slice(start, start + PARTS)
        tables, outs = tables[self._mine], fetch.rows[self._mine]
        self._fetch = fetch  # keeps the memory that the kernel writes to
        self._args, self._blocks = KernelStruct(SCATTER_ARGS), 0
        self._args["parts"] = len(tables)
        self._part = part = self._args["part"][: len(tables)]
        codes, versions = same
        part["sources"], part["row_versions"] = codes.data.ptr, versions.data.ptr
        part["out"] = [out.data.ptr for out in outs]
        part["versions"] = [each.data.ptr for each in fetch.versions[self._mine]]
        part["source"] = [each.data.ptr for each in fetch.sources[self._mine]]
        part["row_bytes"] = [table.row_bytes for table in tables]
        self._tile, unit = tile_and_unit(tables, outs)
        self._kernel: CudaKernel = kernel(f"scatter_kernel<{self._tile}, {unit}>")

    def fill(self, rows_at: Any, positions_at: Any, counts: Any) -> None:
        part, mine = self._part, self._mine
        blocks = np.array([blocks_of(n, self._tile) for n in counts[mine].tolist()])
        ends = np.cumsum(blocks)
        part["rows"], part["positions"], part["n"] = rows_at[mine], positions_at[mine], counts[mine]
        part["first_block"] = ends - blocks
        self._blocks = int(ends[-1])

    def run(self, stream: Any) -> None:
        if self._blocks:
            self._kernel.launch(self._blocks, self._args, stream.ptr)
