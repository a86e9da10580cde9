"""What the GPU cache's benchmark measures with: a clock on the device, filled tables, traces."""

from __future__ import annotations

import lzma
import os
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda import launch
from hps.cuda.loader import cupy
from hps.tiers.base import FetchContext, Part
from hps.tiers.gpu_cache import GpuCache
from hps.types import EmbeddingTable, make_version

CALL = 1 << 20
SMALL_CALL = 26 * 1024
ROUNDS, WARM_UP = 30, 6
SPIN_CYCLES = 600_000  # a third of a millisecond: more than the host takes for a launch
NOW = make_version(time.time_ns() // 1_000_000)


class Clock:
    """Times work on the current stream."""

    def __init__(self) -> None:
        cp = cupy()
        self._spin = cp.RawKernel(
            'extern "C" __global__ void spin(long long n)'
            "{ long long end = clock64() + n; while (clock64() < end); }",
            "spin",
        )
        self._start, self._end = cp.cuda.Event(), cp.cuda.Event()

    def median(self, prepare: Callable[[], Any], work: Callable[[Any], None]) -> float:
        """Seconds that ``work`` of what ``prepare`` returns takes on the device."""
        cp = cupy()
        times = []
        for turn in range(WARM_UP + ROUNDS):
            prepared = prepare()
            self._spin((1,), (1,), (np.int64(SPIN_CYCLES),))
            self._start.record()
            work(prepared)
            self._end.record()
            self._end.synchronize()
            if turn >= WARM_UP:
                times.append(cp.cuda.get_elapsed_time(self._start, self._end) / 1e3)
        return statistics.median(times)


@dataclass
class Filled:
    """A cache of one table that holds most of the keys from ``first`` to ``first + held - 1``."""

    cache: GpuCache
    table: EmbeddingTable
    held: int
    clock: Clock
    version: int = NOW
    first: int = 0

    @staticmethod
    def make(dim: int, capacity: int, **options: Any) -> Filled:
        """Three quarters full; a static table has just so many rows."""
        held = int(capacity * 0.75)
        table, cache = EmbeddingTable.make("bench", dim), GpuCache({})
        cache.add_table(table, held if options.get("static") else capacity, **options)
        filled = Filled(cache, table, held, Clock())
        for start in range(0, held, CALL):
            filled.write(np.arange(start, min(start + CALL, held)))
        if options.get("static"):
            cache.seal(table)
        return filled

    def write(self, keys: Any, verb: str = "insert") -> None:
        cp = cupy()
        keys = cp.asarray(keys)
        vectors = cp.random.random((len(keys), self.table.dim), np.float32)
        stamps = cp.full(len(keys), self.version, np.uint64)
        getattr(self.cache, verb)(self.table, keys, vectors, stamps)

    def keys(self, n: int) -> Any:
        return cupy().random.randint(self.first, self.first + self.held, n, np.int64)

    def fetch_time(self, n: int, *, form: int = launch.ROWS, ticks: int = 0) -> float:
        cp, held = cupy(), self.cache.held(self.table)
        numbers = form == launch.NUMBERS
        out = cp.empty(n if numbers else (n, self.table.dim), np.uint32 if numbers else np.float32)
        misses = cp.zeros(4 + n, np.uint32)

        def prepare() -> Any:
            held.clock += ticks
            misses[:4] = 0
            return self.keys(n)

        return self.clock.median(
            prepare,
            lambda keys: self.cache.direct.fetch(
                held, keys, out, misses, form=form, stamp=not numbers
            ),
        )

    def settle(self) -> None:
        """Let every row have the current stamp, as when the clock has stood still for a while."""
        cp, held = cupy(), self.cache.held(self.table)
        out, misses = cp.empty((CALL, self.table.dim), np.float32), cp.zeros(4 + CALL, np.uint32)
        end = self.first + self.held
        for start in range(self.first, end, CALL):
            keys = cp.arange(start, min(start + CALL, end))
            self.cache.direct.fetch(held, keys, out, misses)
        cp.cuda.get_current_stream().synchronize()

    def floor_time(self, n: int, first: int = 0) -> float:
        """Of a gather of rows whose numbers, from ``first`` on, are known."""
        cp, held = cupy(), self.cache.held(self.table)
        out = cp.empty((n, self.table.dim), np.float32)
        stream = cp.cuda.get_current_stream()
        return self.clock.median(
            lambda: cp.random.randint(first, held.shape.rows, n, np.uint32),
            lambda numbers: held.gather(stream, numbers, out),
        )

    def write_rate(self, verb: str, calls: int, *, new: bool = False) -> float:
        """B rows/s of ``calls`` calls by the host's clock (writes block it), input ready on the device, each
        of unique keys and newer than all before."""
        cp, times = cupy(), []
        for _ in range(calls + 1):
            self.version += 1
            first = (1 << 40) + (self.version - NOW) * CALL
            keys = cp.arange(first, first + CALL) if new else cp.random.permutation(CALL)
            vectors = cp.random.random((CALL, self.table.dim), np.float32)
            stamps = cp.full(CALL, self.version, np.uint64)
            cp.cuda.get_current_stream().synchronize()
            start = time.perf_counter()
            getattr(self.cache, verb)(self.table, keys, vectors, stamps, unique=True)
            times.append(time.perf_counter() - start)
        return CALL / statistics.median(times[1:]) / 1e9

    def close(self) -> None:
        self.cache.close()
        cupy().get_default_memory_pool().free_all_blocks()
        cupy().get_default_pinned_memory_pool().free_all_blocks()


def part_of(table: EmbeddingTable, keys: Any) -> Part:
    """A fresh part whose answers lie on the device."""
    cp, n = cupy(), len(keys)
    out = cp.empty((n, table.dim), table.dtype)
    return Part(table, keys, out, cp.zeros(n, np.uint64), cp.zeros(n, np.uint8), np.arange(n))


def percentiles(times: list[float]) -> dict[str, float]:
    """Of seconds, in ms; the first tenth is left out."""
    warm = sorted(times[len(times) // 10 :])
    return {
        "p50 ms": statistics.median(warm) * 1e3,
        "p99 ms": warm[int(len(warm) * 0.99)] * 1e3,
    }


# -- hit rates -------------------------------------------------------------------------------------

BATCH = 1024


def scarab() -> NDArray[np.int64] | None:
    """The keys of the Scarab trace, in time order, from ``HPS_SHARED_DATA`` or ``../shared/data``."""
    stated = os.environ.get("HPS_SHARED_DATA")
    folder = Path(stated) if stated else Path(__file__).parents[2] / "shared" / "data"
    file = folder / "scarab" / "scarab-recs.trace.xz"
    if not file.is_file():
        return None
    return np.frombuffer(lzma.decompress(file.read_bytes()), ">i8").astype(np.int64)


def batches_of(trace: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The distinct keys of each ``BATCH`` accesses."""
    return [np.unique(trace[start : start + BATCH]) for start in range(0, len(trace), BATCH)]


def exact_lru(trace: NDArray[np.int64], capacity: int) -> float:
    """Hit rate of exact LRU over the accesses, asked and filled batch by batch."""
    held: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for batch in batches_of(trace):
        keys = batch.tolist()
        for key in keys:
            missed += key not in held
        for key in keys:
            held[key] = None
            held.move_to_end(key)
        while len(held) > capacity:
            held.popitem(last=False)
    return 1 - missed / len(trace)


def hit_rate(trace: NDArray[np.int64], capacity: int, **options: Any) -> float:
    """Hit rate of the GPU cache, likewise."""
    table, cache = EmbeddingTable.make("trace", 4), GpuCache({})
    cache.add_table(table, capacity, **options)
    vectors, stamps = np.zeros((BATCH, 4), np.float32), np.full(BATCH, NOW, np.uint64)
    missed = 0
    for keys in batches_of(trace):
        part = part_of(table, keys)
        cache.fetch([part], FetchContext())
        left = keys[part.missing]
        missed += len(left)
        if len(left):
            cache.insert(table, left, vectors[: len(left)], stamps[: len(left)], unique=True)
    cache.close()
    return 1 - missed / len(trace)
