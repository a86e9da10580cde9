"""What a row in the CPU cache costs, against the memory's own speed.

A table of 5 million rows of float32 (``--quick``: one million; dim 128: two), all in the cache, keys any
int64; batches of 26 × 64 and 26 × 1,024 keys, Zipf-distributed with s = 0.85 (and 1.05, and
uniform) over rows in random order; one thread. Recency is kept, readers are safe beside a writer.

* hps: `CpuCache.gather`, the way of a request whose every row is in memory;
* hps fetch: `CpuCache.fetch`, which reports each key's version and source too;
* the floor: rows copied by numbers known in advance, with prefetch, the same instructions, huge pages
  for both: what is left of a lookup when nothing has to be found;
* numpy: ``searchsorted`` on sorted keys, then ``take``.

FBGEMM's and PyTorch's embedding bags on dense row numbers are peers of the fused lookup, which does
not exist yet: their bars are unmeasured.

Sides take turns, round by round; the figure is CPU time of the calling thread per key, each round over
batches that no cache of the processor holds; ratios are taken round by round and their median is judged.
The whole call from Python is the best of many (the least disturbed). p99 is of single calls, 26 × 64
keys, while a thread of the same process inserts 200,000 rows/s, against the same without, in turns.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.measure import Spread, alternate, ratio, versions, zipf_keys
from hps.native import COMPILED, _core
from hps.tiers.base import FetchContext, Part
from hps.tiers.cpu_cache import CpuCache
from hps.types import EmbeddingTable, KeyArray, VectorArray

SMALL, LARGE, WRITES_PER_S = 26 * 64, 26 * 1024, 200_000

BARS = (
    Bar("floor_32", "dim 32, 26 × 1,024 keys, Zipf 0.85: hps / floor", at_most=1.9),
    Bar("floor_128", "dim 128, 26 × 1,024 keys, Zipf 0.85: hps / floor", at_most=1.5),
    Bar("numpy", "dim 32, 26 × 1,024 keys, Zipf 0.85: numpy / hps", at_least=10),
    Bar("memory_32", "dim 32: bytes / raw bytes of keys, versions, rows", at_most=1.15),
    Bar("memory_128", "dim 128: bytes / raw bytes of keys, versions, rows", at_most=1.15),
    Bar("call", "the whole call from Python for 26 keys, µs (bar: over the C++ call)", at_most=2),
    Bar("p99", "26 × 64 keys: p99 beside a writer / without", at_most=2),
    Bar("fbgemm_32", "dim 32, 26 × 1,024 keys: FBGEMM on row numbers / hps", at_least=1.15),
    Bar("fbgemm_128", "dim 128, 26 × 1,024 keys: FBGEMM on row numbers / hps", at_least=1.4),
    Bar("fbgemm_small", "dim 32, 26 × 64 keys: FBGEMM on row numbers / hps", at_least=2),
)


def aligned(count: int, dim: int) -> VectorArray:
    """(count, dim) float32 at the start of a huge page; NumPy asks for huge pages itself. Elsewhere rows
    of 128 bytes would lie across three cache lines, and the floor be too high."""
    memory = np.empty(count * dim * 4 + (2 << 20), np.uint8)
    start = -memory.ctypes.data % (2 << 20)
    return memory[start : start + count * dim * 4].view(np.float32).reshape(count, dim)


@dataclass(frozen=True)
class Scene:
    """A full cache, the same rows by number, and what NumPy needs."""

    table: EmbeddingTable
    cache: CpuCache
    keys: KeyArray
    rows: VectorArray
    order: NDArray[np.int64]
    sorted_keys: KeyArray

    @staticmethod
    def make(count: int, dim: int, random: np.random.Generator) -> Scene:
        table = EmbeddingTable.make(f"dim_{dim}", dim)
        keys = random.integers(-(2**63), 2**63 - 1, count)
        rows = aligned(count, dim)
        cache = CpuCache({table: count})
        for start in range(0, count, 1 << 16):
            some = keys[start : start + (1 << 16)]
            rows[start : start + len(some)] = (some % 1000)[:, None] + np.arange(dim)
            cache.insert(
                table, some, rows[start : start + len(some)], np.ones(len(some), np.uint64)
            )
        if cache.size(table) != count:
            raise RuntimeError(f"{count - cache.size(table)} of {count} rows found no room")
        order = np.argsort(keys)
        return Scene(table, cache, keys, rows, order, keys[order])


def cpu_ns(work: Callable[[int], object], batches: int, keys: int) -> float:
    """CPU time per key of ``work(batch)`` for every batch."""
    start = time.thread_time_ns()
    for batch in range(batches):
        work(batch)
    return (time.thread_time_ns() - start) / (batches * keys)


def sides(scene: Scene, numbers: NDArray[np.int64]) -> dict[str, Callable[[], float]]:
    """Every side's measurement over ``numbers (batches, keys)`` of rows."""
    batches, n = numbers.shape
    asked = scene.keys[numbers]
    out = aligned(n, scene.table.dim)
    part = Part.make(scene.table, asked[0], out)
    everything = part.missing

    def hps(batch: int) -> None:
        if not scene.cache.gather([(scene.table, asked[batch], out)]):
            raise RuntimeError("a row is missing")

    def fetch(batch: int) -> None:
        part.keys, part.missing = asked[batch], everything
        scene.cache.fetch([part], FetchContext())

    def numpy(batch: int) -> None:
        at = scene.order[np.searchsorted(scene.sorted_keys, asked[batch])]
        np.take(scene.rows, at, axis=0, out=out, mode="clip")

    hps(0)
    if not (out == scene.rows[numbers[0]]).all():
        raise RuntimeError("wrong rows")
    every: dict[str, Callable[[], float]] = {
        "floor": partial(cpu_ns, lambda b: _core.copy_rows(scene.rows, numbers[b], out), batches, n)
    }
    for name, work in {"hps": hps, "hps fetch": fetch}.items():
        every[name] = partial(cpu_ns, work, batches, n)
    every["numpy"] = partial(cpu_ns, numpy, max(1, batches // 16), n)
    return every


def compare(scene: Scene, report: Report, random: np.random.Generator, *, quick: bool) -> None:
    """Time per key of every side, for all distributions and batch sizes."""
    dim, count = scene.table.dim, len(scene.keys)
    title, rows = f"{count:,} rows, dim {dim}: ns of CPU per key", []
    spreads: tuple[float, ...] = (0.85,) if quick else (0.85, 1.05, 0.0)
    for s in spreads:
        for n in (SMALL, LARGE):
            batches = (3_000_000 if quick else 8_000_000) // n
            numbers = zipf_keys(random, count, (batches, n), s)
            took = alternate(sides(scene, numbers), 3 if quick else 7)
            over = {name: ratio(times, took["floor"]) for name, times in took.items()}
            rows.append(
                {"keys": f"{n:,}", "Zipf s": s or "uniform"}
                | {name: f"{Spread.of(times):.1f}" for name, times in took.items()}
                | {"hps / floor": f"{over['hps']:.2f}", "fetch / floor": f"{over['hps fetch']:.2f}"}
            )
            report.figures[f"dim {dim}, {n} keys, s={s}"] = took
            if (s, n) == (0.85, LARGE):
                report.values[f"floor_{dim}"] = over["hps"].median
                if dim == 32:
                    report.values["numpy"] = ratio(took["numpy"], took["hps"]).median
    report.tables[title] = rows
    stats = scene.cache.stats(scene.table)
    report.values[f"memory_{dim}"] = stats.bytes / (stats.rows * (8 + 8 + 4 * dim))


def call_us(scene: Scene) -> float:
    """The best of many calls for 26 keys."""
    asks = [(scene.table, scene.keys[:26], np.empty((26, scene.table.dim), np.float32))]
    best = sys.maxsize
    for _ in range(20_000):
        start = time.perf_counter_ns()
        scene.cache.gather(asks)
        best = min(best, time.perf_counter_ns() - start)
    return best / 1e3


@contextmanager
def writing(scene: Scene) -> Iterator[None]:
    """Meanwhile another thread inserts WRITES_PER_S rows a second: half of them new versions, half new
    keys, in steps of 1,000."""
    stop = threading.Event()

    def write() -> None:
        random, step = np.random.default_rng(2), 1_000
        due = time.monotonic()
        for n in range(2, 1 << 40):
            keys = random.choice(scene.keys, step)
            keys[::2] = random.integers(-(2**63), 2**63 - 1, step // 2)
            scene.cache.insert(scene.table, keys, scene.rows[:step], np.full(step, n, np.uint64))
            due += step / WRITES_PER_S
            if stop.wait(max(0.0, due - time.monotonic())):
                return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def p99_us(scene: Scene, numbers: NDArray[np.int64], *, written: bool) -> float:
    """Of the wall time of single fetches; a key that the writer drove out is a miss like others."""
    part = Part.make(scene.table, scene.keys[numbers[0]])
    everything, took = part.missing, []

    def ask() -> None:
        for batch in numbers:
            part.keys, part.missing = scene.keys[batch], everything
            start = time.perf_counter_ns()
            scene.cache.fetch([part], FetchContext())
            took.append(time.perf_counter_ns() - start)

    if written:
        with writing(scene):
            ask()
    else:
        ask()
    return float(np.percentile(took, 99)) / 1e3


def beside_a_writer(scene: Scene, report: Report, random: np.random.Generator, rounds: int) -> None:
    numbers = zipf_keys(random, len(scene.keys), (4_000, SMALL))
    took = alternate(
        {
            "alone": partial(p99_us, scene, numbers, written=False),
            "beside a writer": partial(p99_us, scene, numbers, written=True),
        },
        rounds,
    )
    report.values["p99"] = ratio(took["beside a writer"], took["alone"]).median
    report.figures["p99 µs"] = took
    report.tables["26 × 64 keys: p99 of a fetch, µs"] = [
        {name: f"{Spread.of(times):.0f}" for name, times in took.items()}
    ]


def run(options: Options) -> Report:
    report = Report(figures={"versions": versions("numpy"), "kernels": _core.cache_kernels()})
    random = np.random.default_rng(options.seed)
    for dim, count in {32: 5_000_000, 128: 2_000_000}.items():
        scene = Scene.make(1_000_000 if options.quick else count, dim, random)
        compare(scene, report, random, quick=options.quick)
        if dim == 32:
            report.values["call"] = call_us(scene)
            beside_a_writer(scene, report, random, 3 if options.quick else 7)
        del scene
    return report


BENCHMARK = Benchmark(
    name="cpu_cache",
    title=__doc__.splitlines()[0],
    run=run,
    bars=BARS,
    measured=("hps/native", "hps/tiers/cpu_cache.py"),
    lacking=lambda: None if COMPILED else "the native core is not built",
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
