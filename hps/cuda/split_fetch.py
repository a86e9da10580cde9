"""Fetches from a table that is split over several devices; see README.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hps.cuda import launch
from hps.cuda.device import CudaDevice
from hps.cuda.fetch import DirectFetch, FetchVariant
from hps.cuda.launch import PARTITION_ARGS, blocks_of
from hps.cuda.layout import NO_ROW
from hps.cuda.loader import KernelStruct, cupy, kernel
from hps.cuda.owners import MOST_OWNERS
from hps.cuda.table import GpuTable

_VECTORS = FetchVariant(launch.VECTORS)


@dataclass(frozen=True, slots=True)
class TableShard:
    """The rows of a split table on one device: its array, and what launches fetches there."""

    device: CudaDevice
    table: GpuTable
    direct: DirectFetch


@dataclass(frozen=True, slots=True)
class OwnerRows:
    """Rows that were left on their owner, device ``device``.

    ``positions (m,) int64``: of the keys, on the device of these. ``rows (m, row_width)`` and
    ``source (m,) uint8`` (0: no row, and ``rows`` is undefined there) on the owner."""

    device: int
    positions: Any
    rows: Any
    source: Any


class _Division:
    """The keys of a fetch by their owners: ``lists (owners, n)`` are positions, of which ``counts`` are used;
    ``grouped`` are the keys, if wanted. On the device of the keys."""

    def __init__(
        self, keys: Any, owners: int, misses: Any, left_out: int, *, grouped: bool
    ) -> None:
        cp, n = cupy(), len(keys)
        stream = cp.cuda.get_current_stream()
        self.lists = cp.empty((owners, n), np.int64)
        self.grouped: Any = cp.empty((owners, n), np.int64) if grouped else None
        counts, args = cp.zeros(owners, np.uint32), KernelStruct(PARTITION_ARGS)
        args["keys"], args["lists"], args["counts"] = (
            keys.data.ptr,
            self.lists.data.ptr,
            counts.data.ptr,
        )
        args["grouped"] = 0 if self.grouped is None else self.grouped.data.ptr
        if misses is not None:
            args["count"], args["positions"] = misses.data.ptr, misses.data.ptr + 16
        args["n"], args["owners"], args["left_out"] = n, owners, left_out
        kernel("partition_kernel").launch(blocks_of(n), args, stream.ptr)
        self.counts: list[int] = counts.get(stream=stream).tolist()


class SplitFetch:
    """Fetches rows of one table from ``shards``, an owner each, in the order of `owner_of`.

    The devices must have peer access (`enable_peer_access`); two shards may be on one device. Each owner
    searches its array and writes the rows it has straight into the caller's memory, so that only they
    cross the connection. Work runs on the thread's current stream of each device: callers on several threads
    run in parallel if their streams differ. Any number of fetches and the tables' writers may run in
    parallel."""

    def __init__(self, shards: Sequence[TableShard]) -> None:
        if not 1 <= len(shards) <= MOST_OWNERS:
            raise ValueError(f"a table has 1 to {MOST_OWNERS} owners, got {len(shards)}")
        self._shards = tuple(shards)

    def fetch(self, home: int, keys: Any, out: Any, source: Any, *, copies: bool = True) -> None:
        """Fetch ``keys (n,) int64``, n > 0, to ``out (n, row_width)``, on the device of shard ``home``.

        ``source (n,) uint8`` there receives a code for each row, 0 for a key without one. With ``copies``
        the shard ``home`` is asked for every key first: it may have copies of other owners' rows. Counts as
        a use of the keys. Waits until it is known how many keys each owner is asked for; later work on the
        current stream of ``home`` sees the rows."""
        cp, own = cupy(), self._shards[home]
        with own.device:
            stream = cp.cuda.get_current_stream()
            source.data.memset_async(0, source.nbytes, stream)
            misses, left_out = None, NO_ROW
            if copies:
                misses, left_out = cp.zeros(4 + len(keys), np.uint32), home
                own.direct.fetch(own.table, keys, out, misses, _VECTORS, source=source)
            division = _Division(keys, len(self._shards), misses, left_out, grouped=False)
            ready = _record(stream)
        ends = []
        for shard, list_, count in zip(self._shards, division.lists, division.counts, strict=True):
            if count:
                with shard.device:
                    owner_stream = cp.cuda.get_current_stream()
                    owner_stream.wait_event(ready)
                    scratch = cp.zeros(4 + count, np.uint32)
                    positions = list_[:count]
                    shard.direct.fetch(
                        *(shard.table, keys, out, scratch, _VECTORS),
                        positions=positions,
                        source=source,
                    )
                    ends.append(_record(owner_stream))
        with own.device:
            for end in ends:
                stream.wait_event(end)

    def fetch_apart(self, home: int, keys: Any) -> list[OwnerRows]:
        """Fetch ``keys (n,) int64``, n > 0, on the device of shard ``home``, and leave rows on their owners.

        Returns the rows of each owner that has keys. They are used on that device's current stream, after
        which work on the current stream of ``home`` waits: the keys may then be overwritten there."""
        cp, own = cupy(), self._shards[home]
        with own.device:
            stream = cp.cuda.get_current_stream()
            division = _Division(keys, len(self._shards), None, NO_ROW, grouped=True)
            ready = _record(stream)
        apart, ends = [], []
        for owner, (shard, count) in enumerate(zip(self._shards, division.counts, strict=True)):
            if count:
                table = shard.table.table
                with shard.device:
                    owner_stream = cp.cuda.get_current_stream()
                    owner_stream.wait_event(ready)
                    rows = cp.empty((count, table.row_width), table.row_dtype)
                    source, scratch = cp.zeros(count, np.uint8), cp.zeros(4 + count, np.uint32)
                    mine = division.grouped[owner, :count]
                    shard.direct.fetch(shard.table, mine, rows, scratch, _VECTORS, source=source)
                    ends.append(_record(owner_stream))
                positions = division.lists[owner, :count]
                apart.append(OwnerRows(shard.device.id, positions, rows, source))
        with own.device:
            for end in ends:
                stream.wait_event(end)
        return apart


def _record(stream: Any) -> Any:
    """Return an event after the work on ``stream``, of the current device."""
    event = cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    return event
