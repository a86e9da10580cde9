"""Device clock and filled tables of the GPU cache's benchmark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu_gather import Gather, Gathers
from hps.cuda import launch
from hps.cuda.fetch import FetchVariant
from hps.cuda.layout import EvictionPolicy
from hps.cuda.loader import cupy
from hps.tiers.base import Part
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.plan import GpuTableRequest, plan_gpu
from hps.types import EmbeddingTable, make_version

CALL = 1 << 20
SMALL_CALL = 26 * 1024
ROUNDS, WARM_UP = 30, 6
SPIN_CYCLES = 600_000  # a third of a millisecond: more than the host takes for a launch
AMPLE = 1 << 40
"""Bytes: more than any table here takes."""
NOW = make_version(time.time_ns() // 1_000_000)


class DeviceClock:
    """Timer of work on the current stream, by CUDA events."""

    def __init__(self) -> None:
        cp = cupy()
        self._spin = cp.RawKernel(
            'extern "C" __global__ void spin(long long n)'
            "{ long long end = clock64() + n; while (clock64() < end); }",
            "spin",
        )
        self._start, self._end = cp.cuda.Event(), cp.cuda.Event()

    def median(self, prepare: Callable[[], Any], work: Callable[[Any], None]) -> float:
        """Median seconds on the device of ``work(prepare())``."""
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
class FilledTable:
    """A cache of one table that holds most of the keys from ``first`` to ``first + held - 1``."""

    cache: GpuCache
    table: EmbeddingTable
    held: int
    clock: DeviceClock
    version: int = NOW
    first: int = 0

    @staticmethod
    def make(dim: int, capacity: int, *, load: float = 0.75, **options: Any) -> FilledTable:
        """``load`` of the capacity is filled; a static table has just so many rows."""
        held = int(capacity * load)
        table, cache = EmbeddingTable.make("bench", dim), GpuCache({})
        cache.add_table(table, held if options.get("static") else capacity, **options)
        filled = FilledTable(cache, table, held, DeviceClock())
        for start in range(0, held, CALL):
            filled.write(np.arange(start, min(start + CALL, held)))
        if options.get("static"):
            cache.seal(table)
        return filled

    @staticmethod
    def planned(dim: int, rows: int) -> FilledTable:
        """All ``rows`` are resident, in a table as a node plans it if its capacity is ample."""
        table, cache = EmbeddingTable.make("bench", dim), GpuCache({})
        plan = plan_gpu({table: GpuTableRequest(rows)}, capacity_bytes=AMPLE)[table]
        cache.add_table(table, plan.rows, load=plan.load)
        filled = FilledTable(cache, table, rows, DeviceClock())
        for start in range(0, rows, CALL):
            filled.write(np.arange(start, min(start + CALL, rows)))
        return filled

    def write(self, keys: Any, verb: str = "insert") -> None:
        cp = cupy()
        keys = cp.asarray(keys)
        vectors = cp.random.random((len(keys), self.table.dim), np.float32)
        stamps = cp.full(len(keys), self.version, np.uint64)
        getattr(self.cache, verb)(self.table, keys, vectors, stamps, self.scores(stamps))

    def scores(self, stamps: Any) -> Any:
        """Eviction scores of new rows under the SCORE policy, higher for newer rows; else None."""
        scored = self.cache.held(self.table).policy is EvictionPolicy.SCORE
        return stamps if scored else None

    def overfill(self, capacity: int) -> None:
        """Insert until the table is full."""
        for at in range(int(capacity * 0.8), int(capacity * 1.3), CALL):
            self.write(cupy().arange(at, at + CALL))

    def keys(self, n: int) -> Any:
        return cupy().random.randint(self.first, self.first + self.held, n, np.int64)

    def fetch_time(
        self, n: int, *, form: int = launch.ROWS, advance: str = "", by: int = 1
    ) -> float:
        """Seconds of a fetch of ``n`` keys; before each, ``advance`` of the table's clock grows by ``by``."""
        cp, held = cupy(), self.cache.held(self.table)
        numbers = form == launch.NUMBERS
        out = cp.empty(n if numbers else (n, self.table.dim), np.uint32 if numbers else np.float32)
        misses = cp.zeros(4 + n, np.uint32)

        def prepare() -> Any:
            if advance:
                setattr(held.clock, advance, getattr(held.clock, advance) + by)
            misses[:4] = 0
            return self.keys(n)

        variant = FetchVariant(form, stamp=not numbers)
        return self.clock.median(
            prepare, lambda keys: self.cache.direct.fetch(held, keys, out, misses, variant)
        )

    def settle(self) -> None:
        """Give every row the current stamp, as after a period without clock ticks."""
        cp, held = cupy(), self.cache.held(self.table)
        out, misses = cp.empty((CALL, self.table.dim), np.float32), cp.zeros(4 + CALL, np.uint32)
        end = self.first + self.held
        for start in range(self.first, end, CALL):
            keys = cp.arange(start, min(start + CALL, end))
            self.cache.direct.fetch(held, keys, out, misses)
        cp.cuda.get_current_stream().synchronize()

    def floor_time(self, n: int) -> tuple[float, Gather]:
        """Seconds of the fastest gather of rows by known numbers, and that gather.

        Raises AssertionError if it does not copy what `GpuTable.gather` copies."""
        cp, held = cupy(), self.cache.held(self.table)
        out = cp.empty((n, self.table.dim), np.float32)
        gathers = Gathers(held, out)
        took, best = gathers.fastest(lambda gather: self.clock.median(self._numbers(n), gather))
        numbers, expected = self._numbers(n)(), cp.empty_like(out)
        held.gather(cp.cuda.get_current_stream(), numbers, expected)
        gathers.launch(best, numbers)
        assert bool((out.view(np.uint32) == expected.view(np.uint32)).all())
        return took, best

    def gather_time(self, n: int, first: int = 0) -> float:
        """Seconds of `GpuTable.gather`, which also reads pinned memory, of rows from ``first`` up."""
        cp, held = cupy(), self.cache.held(self.table)
        out = cp.empty((n, self.table.dim), np.float32)
        stream = cp.cuda.get_current_stream()
        return self.clock.median(
            self._numbers(n, first), lambda numbers: held.gather(stream, numbers, out)
        )

    def _numbers(self, n: int, first: int = 0) -> Callable[[], Any]:
        rows = self.cache.held(self.table).shape.rows
        return lambda: cupy().random.randint(first, rows, n, np.uint32)

    def write_rate(self, verb: str, calls: int, *, new: bool = False) -> float:
        """Billion rows/s of ``calls`` calls by the host's clock (writes block it), input ready on the device,
        each of unique keys and newer than all before."""
        cp, times = cupy(), []
        for _ in range(calls + 1):
            self.version += 1
            first = (1 << 40) + (self.version - NOW) * CALL
            keys = cp.arange(first, first + CALL) if new else cp.random.permutation(CALL)
            vectors = cp.random.random((CALL, self.table.dim), np.float32)
            stamps = cp.full(CALL, self.version, np.uint64)
            cp.cuda.get_current_stream().synchronize()
            start = time.perf_counter()
            rows = keys, vectors, stamps, self.scores(stamps)
            getattr(self.cache, verb)(self.table, *rows, unique=True)
            times.append(time.perf_counter() - start)
        return CALL / statistics.median(times[1:]) / 1e9

    def export_rate(self, calls: int) -> float:
        """Billion rows/s of ``calls`` exports of the whole table, likewise."""
        times = []
        for _ in range(calls + 1):  # the first allocates memory
            start = time.perf_counter()
            exported = self.cache.export(self.table, with_versions=False)
            times.append(time.perf_counter() - start)
            rows = len(exported[0])
            del exported
        return rows / statistics.median(times[1:]) / 1e9

    def close(self) -> None:
        self.cache.close()
        cupy().get_default_memory_pool().free_all_blocks()
        cupy().get_default_pinned_memory_pool().free_all_blocks()


def device_part(table: EmbeddingTable, keys: Any) -> Part:
    """A new part whose results are on the device."""
    cp, n = cupy(), len(keys)
    out = cp.empty((n, table.dim), table.dtype)
    return Part(table, keys, out, cp.zeros(n, np.uint64), cp.zeros(n, np.uint8), np.arange(n))


def percentiles(times: list[float]) -> dict[str, float]:
    """p50 and p99, in ms, of times in seconds; the first tenth is skipped as warm-up."""
    warm = sorted(times[len(times) // 10 :])
    return {
        "p50 ms": statistics.median(warm) * 1e3,
        "p99 ms": warm[int(len(warm) * 0.99)] * 1e3,
    }
