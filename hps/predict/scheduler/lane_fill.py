"""The work of a lane for batches with missing rows, as the native scheduler runs it.

The device fetches the rows that it has and lists the missing keys; native threads gather their rows from the
CPU cache; the device places them and runs the rest. Rows of features with one key per sample go straight to
the network's inputs if they are stored as vectors; the others are decoded and pooled afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hps.cuda.prepared import FixedRows
from hps.lookup.gpu.miss_fill import DeviceBags, HostCaches, block_offsets

_ROW_ALIGN = 16
_SLICE_ROWS = 1 << 15
"""Rows that are gathered at a time, while the device takes the rows before them."""


@dataclass(frozen=True, slots=True)
class LaneTables:
    """The caches that a lane's rows come from."""

    cache: Any
    host: HostCaches


@dataclass(frozen=True, slots=True)
class LaneFillMemory:
    """Memory that all batch sizes of a lane share, made for the largest.

    On the device: rows and source codes of features that are pooled. ``pinned``: rows from the host,
    ``stride`` bytes apart, and their source codes."""

    rows: Any
    sources: Any
    pinned: Any
    stride: int

    @staticmethod
    def make(space: Any, bags: Sequence[DeviceBags]) -> LaneFillMemory:
        _, size = _pooled_offsets(bags)
        keys = sum(each.n for each in bags)
        stride = max(each.feature.table.row_bytes for each in bags)
        stride = -(-stride // _ROW_ALIGN) * _ROW_ALIGN
        half = min(keys, _SLICE_ROWS) * (stride + 1) + _ROW_ALIGN
        return LaneFillMemory(
            space.allocate(max(1, size)), space.bytes(keys), space.pinned(2 * half), stride
        )


class LaneFill:
    """The work for one batch size. Its native form uses this object's memory.

    ``keys_at``: the addresses of each feature's keys, in pinned memory."""

    def __init__(
        self,
        tables: LaneTables,
        batch: int,
        bags: Sequence[DeviceBags],
        keys_at: Sequence[int],
        memory: LaneFillMemory,
    ) -> None:
        self._space, self._host, self._memory = tables.cache.space, tables.host, memory
        sizes = [each.n for each in bags]
        starts, (offsets, _) = [0, *accumulate(sizes)], _pooled_offsets(bags)
        block = self._space.address(memory.rows)
        self._sources = memory.sources[: starts[-1]]
        pooled = [self._rows(*each) for each in zip(bags, offsets, starts, strict=False)]
        self._fixed = [each for each in pooled if each is not None]
        self._pooling = tables.cache.prepare_rows(self._fixed) if self._fixed else None
        self._fetch = tables.cache.prepare_vectors(
            [(each.feature.table, each.n) for each in bags],
            [
                self._space.array_address(each.out) if own is None else block + at
                for each, own, at in zip(bags, pooled, offsets, strict=True)
            ],
            [True] * len(bags),
            self._sources if self._fixed else None,
        )
        self._tables = self._host.native_tables([each.feature.table for each in bags])
        self._steps = self._fetch.fill_steps(keys_at, [n // batch for n in sizes], self._tables)

    def _rows(self, bags: DeviceBags, at: int, start: int) -> FixedRows | None:
        """Return the pooling of a feature's rows, which begin at ``at``; None if they are not pooled.

        ``start``: the position of its first key in the batch."""
        if not _is_pooled(bags):
            return None
        table = bags.feature.table
        return FixedRows(
            self._space.array(self._memory.rows, at, (bags.n, table.row_width), table.row_dtype),
            self._sources[start : start + bags.n],
            self._space.upload(table.default),
            bags.hotness,
            bags.feature.pooling,
            bags.out,
            table.row_format,
        )

    def native(self, before: Sequence[Any], after: Sequence[Any]) -> Any:
        """Return the native `MissFill`. ``before``: the steps that copy the other inputs to the device;
        ``after``: those of the network and its outputs."""
        from hps.native.scheduler import MissFill

        fetches, chunks = self._steps
        clears = [self._space.clear_step(self._sources)] if self._fixed else []
        pools = [] if self._pooling is None else self._pooling.steps()
        pinned = self._memory.pinned
        return MissFill.make(
            fetch=[*clears, *before, *fetches],
            chunks=chunks,
            rest=[*pools, *after],
            memory=int(pinned.ctypes.data),
            bytes=len(pinned),
            stride=self._memory.stride,
            code=self._host.code,
        )


def _pooled_offsets(bags: Sequence[DeviceBags]) -> tuple[list[int], int]:
    """Return the positions of the pooled features' rows in one block, and its bytes."""
    return block_offsets(
        [each.n * each.feature.table.row_bytes if _is_pooled(each) else 0 for each in bags]
    )


def _is_pooled(bags: DeviceBags) -> bool:
    """True if rows must be summed or decoded: else they are the vectors."""
    return bags.hotness > 1 or not bags.feature.table.stores_vectors
