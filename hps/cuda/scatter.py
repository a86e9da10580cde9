"""Scatter: one launch over all tables of a batch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.launch import PARTS, SCATTER_ARGS, blocks_of, unit_of
from hps.cuda.loader import KernelStruct, kernel
from hps.cuda.staging import StagingBuffer, padded_bytes
from hps.types import EmbeddingTable

_PART = struct.Struct("<8Q4I")
_PARTS_AT = SCATTER_ARGS.fields["part"][1]  # type: ignore[index] # None for a plain dtype


@dataclass(slots=True)
class ScatterInputs:
    """Arrays in a staging buffer: rows of one table and the positions that they are copied to.

    For ``n`` distinct keys rows (n, dim), versions (n,) and sources (n,); for ``m`` destinations positions
    (m,) and, unless each key has one destination, in order, picks (m,) of the keys. ``at``: their addresses
    for kernels.
    """

    table: EmbeddingTable
    rows: NDArray[Any]
    versions: NDArray[np.uint64]
    sources: NDArray[np.uint8]
    positions: NDArray[np.int64]
    at: tuple[int, int, int, int, int]

    @staticmethod
    def bytes(table: EmbeddingTable, n: int, m: int) -> int:
        """Return the most bytes that `make` takes of a staging buffer."""
        return (
            padded_bytes(n * table.row_bytes)
            + padded_bytes(8 * n)
            + padded_bytes(n)
            + 2 * padded_bytes(8 * m)
        )

    @staticmethod
    def make(
        staging: StagingBuffer,
        table: EmbeddingTable,
        n: int,
        places: NDArray[np.int64],
        picks: NDArray[np.int64] | None,
    ) -> ScatterInputs:
        """Allocate the arrays; positions and picks are filled in."""
        rows, rows_at = staging.allocate(n * table.row_width, table.row_dtype)
        versions, versions_at = staging.allocate(n, np.uint64)
        sources, sources_at = staging.allocate(n, np.uint8)
        positions, positions_at = staging.allocate(len(places), np.int64)
        positions[:] = places
        at = (rows_at, versions_at, sources_at, positions_at, staging.put(picks))
        return ScatterInputs(
            table, rows.reshape(n, table.row_width), versions, sources, positions, at
        )


def scatter(
    args: KernelStruct,
    stream: Any,
    answers: Sequence[ScatterInputs],
    targets: Sequence[tuple[Any, Any, Any]],
) -> None:
    """Write ``answers`` to ``targets``, each the device arrays out, versions and source of its table, on
    ``stream``; versions and source may be None. Keys whose source is `UNANSWERED` are skipped. Overwrites
    ``args``, of `SCATTER_ARGS`."""
    for start in range(0, len(answers), PARTS):
        some = slice(start, start + PARTS)
        _scatter_some(args, stream, answers[some], targets[some])


def tile_and_unit(tables: Sequence[EmbeddingTable], outs: Sequence[Any]) -> tuple[int, int]:
    """Return the threads per row and bytes per move, for rows of ``tables`` in aligned staging buffers
    that are copied to ``outs``."""
    return tile_of_rows(tables, reduce(or_, (out.data.ptr for out in outs), 0))


def tile_of_rows(tables: Sequence[EmbeddingTable], addresses: int = 0) -> tuple[int, int]:
    """The same for destinations whose ``addresses`` are combined by bitwise or."""
    sizes = [table.row_bytes for table in tables]
    unit, widest = unit_of(reduce(or_, sizes, addresses)), max(sizes)
    return 4 if widest <= 4 * unit else 8 if widest <= 16 * unit else 32, unit


def _scatter_some(
    args: KernelStruct,
    stream: Any,
    answers: Sequence[ScatterInputs],
    targets: Sequence[tuple[Any, Any, Any]],
) -> None:
    blocks, at = 0, _PARTS_AT
    tile, unit = tile_and_unit(
        [answer.table for answer in answers], [target[0] for target in targets]
    )
    for answer, (out, versions, source) in zip(answers, targets, strict=True):
        n = len(answer.positions)
        addressed = [0 if array is None else array.data.ptr for array in (out, versions, source)]
        sizes = (answer.table.row_bytes, n, blocks, 0)
        _PART.pack_into(args.array.data, at, *answer.at, *addressed, *sizes)
        at += _PART.size
        blocks += blocks_of(n, tile)
    args["parts"] = len(answers)
    kernel(f"scatter_kernel<{tile}, {unit}>").launch(blocks, args, stream.ptr)
