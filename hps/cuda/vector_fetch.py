"""Prepared fetches of rows into the caller's memory; the host fills the rows that the cache misses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.fetch_chunk import FetchChunk, FetchedKeys, Piece
from hps.cuda.launch import COPIED_IN_CHUNKS, PARTS
from hps.cuda.loader import cupy
from hps.cuda.reader_events import ReaderEvents
from hps.cuda.table import GpuTable
from hps.native import WorkerPool


class VectorFetch(FetchedKeys):
    """A prepared fetch of ``n`` keys of each table, without versions. One thread at a time, on the current
    device.

    ``offsets``: the position of each table's rows ``(n, dim)`` in a block of device memory, in bytes, a
    multiple of 16. ``on_device``: whether each table's keys are on the device. ``sources``: the address of
    ``(total,) uint8`` on the device for the source code of each row that the cache has, or 0.

    The caller fills ``keys``, ``(n,) int64`` of pinned memory per table, or passes arrays to `launch`. The
    tables must not be freed. Fetches of many tables run in several ``chunks``, one after the other.
    """

    def __init__(
        self,
        readers: ReaderEvents,
        requests: Sequence[tuple[GpuTable, int]],
        offsets: Sequence[int],
        on_device: Sequence[bool],
        sources: int = 0,
    ) -> None:
        super().__init__(requests, offsets, on_device, sources)
        self.readers = readers
        self.chunks = [FetchChunk(self, pieces) for pieces in _split(requests)]
        launches: list[Any] = [chunk.native for chunk in self.chunks]
        single = len(self.chunks) == 1 and all(on_device) and not self.chunks[0].timed
        self._quick = launches[0] if single else None
        self._is_copied = (
            self.total >= COPIED_IN_CHUNKS and not self.lists_keys and None not in launches
        )
        cupy().cuda.get_current_stream().synchronize()

    def launch(
        self,
        stream: Any,
        block: int,
        arrays: Sequence[Any] | None = None,
        pool: WorkerPool | None = None,
        used: NDArray[np.int64] | None = None,
    ) -> None:
        """Fetch to the block at the address ``block``, on ``stream``, without waiting. Counts as a use of
        the keys.

        ``arrays``: each table's keys ``(n,) int64``, on host or device, contiguous; None if they are in
        ``keys``. ``pool`` copies those on the host. ``used (tables,)``: how many of each table's keys to
        fetch, the first ones; None: all."""
        if used is not None:
            self._quick = None  # its launches do not restore the numbers of keys
        if self._quick is not None and arrays is not None:
            at = stream.ptr, self.readers.end_of(stream).ptr
            self._quick.run_block(block, [array.data.ptr for array in arrays], *at)
            return
        is_copied = self._is_copied and arrays is not None and used is None
        for chunk in self.chunks:
            if arrays is not None and is_copied:
                chunk.launch_copied(stream, block, arrays, pool)
                continue
            if arrays is not None:
                chunk.take_keys(arrays, pool)
            chunk.launch(stream, block, used)

    def fill_steps(
        self, keys_at: Sequence[int], hotness: Sequence[int], tables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the fetch as steps of the batch scheduler, and a native `FillChunk` for each chunk.

        ``keys_at``: the addresses of each table's keys, which count as ``on_device``; ``offsets`` are
        addresses, too. ``hotness``: keys per sample; ``tables``: the `CacheTable` of each table, or None.
        They use this object's memory."""
        parts = [chunk.fill_steps(keys_at, hotness, tables) for chunk in self.chunks]
        return [step for steps, _ in parts for step in steps], [chunk for _, chunk in parts]


def _split(requests: Sequence[tuple[GpuTable, int]]) -> list[list[Piece]]:
    """Divide the keys into chunks of at most `PARTS` tables."""
    pieces = [(index, 0, n) for index, (_, n) in enumerate(requests) if n]
    return [pieces[start : start + PARTS] for start in range(0, len(pieces), PARTS)] or [[]]
