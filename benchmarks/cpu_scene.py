"""Data of `benchmarks.cpu_cache`: a full cache, and the same rows by number."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hps.tiers.cpu.cache import CpuCache
from hps.types import EmbeddingTable, KeyArray, VectorArray


def aligned(count: int, dim: int) -> VectorArray:
    """(count, dim) float32 at the start of a huge page; NumPy requests huge pages itself.

    Unaligned rows of 128 bytes would span three cache lines and make the floor too slow."""
    memory = np.empty(count * dim * 4 + (2 << 20), np.uint8)
    start = -memory.ctypes.data % (2 << 20)
    return memory[start : start + count * dim * 4].view(np.float32).reshape(count, dim)


@dataclass(frozen=True)
class Scene:
    """A full cache, the same rows by number, and the sorted keys that NumPy needs."""

    table: EmbeddingTable
    cache: CpuCache
    keys: KeyArray
    rows: VectorArray
    order: NDArray[np.int64]
    sorted_keys: KeyArray

    @staticmethod
    def make(count: int, dim: int, random: np.random.Generator, threads: int = 1) -> Scene:
        table = EmbeddingTable.make(f"dim_{dim}", dim)
        keys = random.integers(-(2**63), 2**63 - 1, count)
        rows = aligned(count, dim)
        cache = CpuCache({table: count}, threads=threads)
        for start in range(0, count, 1 << 16):
            some = keys[start : start + (1 << 16)]
            numbers = np.arange(start, start + len(some))
            rows[start : start + len(some)] = (numbers % 1000)[:, None] + np.arange(dim)
            cache.insert(
                table, some, rows[start : start + len(some)], np.ones(len(some), np.uint64)
            )
        if cache.size(table) != count:
            raise RuntimeError(f"{count - cache.size(table)} of {count} rows do not fit")
        order = np.argsort(keys)
        return Scene(table, cache, keys, rows, order, keys[order])


def cpu_ns(work: Callable[[int], object], batches: int, keys: int) -> float:
    """CPU time per key of ``work(batch)`` for every batch."""
    start = time.thread_time_ns()
    for batch in range(batches):
        work(batch)
    return (time.thread_time_ns() - start) / (batches * keys)


def rounds(s: float, *, quick: bool) -> int:
    """Number of rounds; the bars judge Zipf 0.85."""
    return 5 if s == 0.85 and not quick else 3
