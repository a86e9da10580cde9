"""Cost of reading a row from the CPU cache, relative to the speed of memory.

A table of 5 million rows of float32 (dim 128: two million where memory is short; ``--quick``: half a
million, one thread), all in the cache, keys any int64; batches of 26 × 64 and 26 × 1,024 keys,
Zipf-distributed with s = 0.85 (and 1.05, and uniform) over rows in random order; one thread, and two.
Recency is kept; readers are safe while a writer runs.

* hps: `CpuCache.gather`, which serves requests whose every row is in memory;
* hps fetch: `CpuCache.fetch`, which reports each key's version and source too;
* the floor: rows copied by numbers known in advance, with prefetch, the same instructions, in huge
  pages like the cache's: a lookup without its search;
* numpy: ``searchsorted`` on sorted keys, then ``take``;
* fbgemm, embedding_bag: FBGEMM's and PyTorch's embedding bags on dense row numbers, which search for no
  key; in a separate environment and separate processes (``make bench-peers``), by
  ``benchmarks/cpu_pooling.py``. They are judged as installed, because their users run them so: PyTorch
  leaves its tables in pages of 4 KiB, and page walks cost more the longer a row is. The cache requests
  huge pages itself (`tiers.cpu_cache.huge_pages`). PyTorch configured to do the same
  (``THP_MEM_ALLOC_ENABLE=1``) has separate columns, which no bar judges.

Sides alternate, round by round; the figure is CPU time of the calling thread per key, each round over
batches that no cache of the processor holds; ratios are taken round by round and their median is judged.
The whole call from Python is the best of many (the least disturbed). p99 is of single calls, 26 × 64
keys, while a thread of the same process inserts 200,000 rows/s, relative to the same calls without it.
``benchmarks/rest.py`` measures the cost of a whole request to a server whose rows are in this cache.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.common import HELPERS, Bar, Benchmark, Options, Report, main
from benchmarks.cpu_pooling import (
    POOLING_BARS,
    Peers,
    compare_pooling,
    compare_threads,
    peers,
)
from benchmarks.cpu_scene import Scene, aligned, cpu_ns, rounds
from benchmarks.measure import Spread, alternate, ratio, versions, zipf_keys
from hps.native import COMPILED, _core
from hps.tiers.base import FetchContext, Part

SMALL, LARGE, WRITES_PER_S = 26 * 64, 26 * 1024, 200_000

BARS = (
    Bar("floor_32", "dim 32, 26 × 1,024 keys, Zipf 0.85: hps / floor", at_most=1.9),
    Bar("floor_128", "dim 128, 26 × 1,024 keys, Zipf 0.85: hps / floor", at_most=1.5),
    Bar("numpy", "dim 32, 26 × 1,024 keys, Zipf 0.85: numpy / hps", at_least=10),
    Bar("memory_32", "dim 32: bytes / raw bytes of keys, versions, rows", at_most=1.15),
    Bar("memory_128", "dim 128: bytes / raw bytes of keys, versions, rows", at_most=1.15),
    Bar("call", "the whole call from Python for 26 keys, µs (bar: over the C++ call)", at_most=2),
    Bar("p99", "26 × 64 keys: p99 with a writer / without", at_most=2),
    *POOLING_BARS,
    Bar("fbgemm_32", "dim 32, 26 × 1,024 keys: FBGEMM on row numbers / hps", at_least=1.15),
    Bar("fbgemm_128", "dim 128, 26 × 1,024 keys: FBGEMM on row numbers / hps", at_least=1.4),
    Bar("fbgemm_small", "dim 32, 26 × 64 keys: FBGEMM on row numbers / hps", at_least=2),
)


def sides(
    scene: Scene, numbers: NDArray[np.int64], bags: Peers | None
) -> dict[str, Callable[[], float]]:
    """Every side's measurement over ``numbers (batches, keys)`` of rows."""
    batches, n = numbers.shape
    keys = scene.keys[numbers]
    out = aligned(n, scene.table.dim)
    part = Part.make(scene.table, keys[0], out)
    everything = part.missing

    def hps(batch: int) -> None:
        if not scene.cache.gather([(scene.table, keys[batch], out)]):
            raise RuntimeError("a row is missing")

    def fetch(batch: int) -> None:
        part.keys, part.missing = keys[batch], everything
        scene.cache.fetch([part], FetchContext())

    def numpy(batch: int) -> None:
        at = scene.order[np.searchsorted(scene.sorted_keys, keys[batch])]
        np.take(scene.rows, at, axis=0, out=out, mode="clip")

    hps(0)
    if not (out == scene.rows[numbers[0]]).all():
        raise RuntimeError("wrong rows")
    every: dict[str, Callable[[], float]] = {
        "floor": partial(cpu_ns, lambda b: _core.copy_rows(scene.rows, numbers[b], out), batches, n)
    }
    for name, work in {"hps": hps, "hps fetch": fetch}.items():
        every[name] = partial(cpu_ns, work, batches, n)
    if bags is not None:
        every |= bags.sides(["fbgemm"], numbers, 1, out.astype(np.float64).sum())
    every["numpy"] = partial(cpu_ns, numpy, max(1, batches // 16), n)
    return every


def compare(
    scene: Scene,
    report: Report,
    random: np.random.Generator,
    bags: Peers | None,
    *,
    quick: bool,
) -> None:
    """Time per key of every side, for all distributions and batch sizes."""
    dim, count = scene.table.dim, len(scene.keys)
    title, rows = f"{count:,} rows, dim {dim}: ns of CPU per key", []
    spreads: tuple[float, ...] = (0.85,) if quick else (0.85, 1.05, 0.0)
    for s in spreads:
        for n in (SMALL, LARGE):
            batches = (500_000 if quick else 3_000_000) // n
            numbers = zipf_keys(random, count, (batches, n), s)
            took = alternate(sides(scene, numbers, bags), rounds(s, quick=quick))
            over = {name: ratio(times, took["floor"]) for name, times in took.items()}
            rows.append(
                {"keys": f"{n:,}", "Zipf s": s or "uniform"}
                | {name: f"{Spread.of(times):.1f}" for name, times in took.items()}
                | {"hps / floor": f"{over['hps']:.2f}", "fetch / floor": f"{over['hps fetch']:.2f}"}
            )
            report.figures[f"dim {dim}, {n} keys, s={s}"] = took
            if s == 0.85 and "fbgemm" in took and (bar := _fbgemm_bar(dim, n)):
                report.values[bar] = ratio(took["fbgemm"], took["hps"]).median
            if (s, n) == (0.85, LARGE):
                report.values[f"floor_{dim}"] = over["hps"].median
                if dim == 32:
                    report.values["numpy"] = ratio(took["numpy"], took["hps"]).median
    report.tables[title] = rows
    stats = scene.cache.stats(scene.table)
    report.values[f"memory_{dim}"] = stats.bytes / (stats.rows * (8 + 8 + 4 * dim))


def _fbgemm_bar(dim: int, keys: int) -> str:
    return {(32, LARGE): "fbgemm_32", (128, LARGE): "fbgemm_128", (32, SMALL): "fbgemm_small"}.get(
        (dim, keys), ""
    )


def call_us(scene: Scene) -> float:
    """Shortest of many calls for 26 keys, µs."""
    asks = [(scene.table, scene.keys[:26], np.empty((26, scene.table.dim), np.float32))]
    best = sys.maxsize
    for _ in range(20_000):
        start = time.perf_counter_ns()
        scene.cache.gather(asks)
        best = min(best, time.perf_counter_ns() - start)
    return best / 1e3


@contextmanager
def writing(scene: Scene) -> Iterator[None]:
    """Insert WRITES_PER_S rows a second on another thread until the block ends: half new versions, half
    new keys, in steps of 1,000."""
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
    """99th percentile of the wall time of single fetches, µs; a key that the writer evicted is a miss."""
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


def compare_with_writer(
    scene: Scene, report: Report, random: np.random.Generator, *, quick: bool
) -> None:
    numbers = zipf_keys(random, len(scene.keys), (1_000 if quick else 4_000, SMALL))
    took = alternate(
        {
            "alone": partial(p99_us, scene, numbers, written=False),
            "with a writer": partial(p99_us, scene, numbers, written=True),
        },
        3 if quick else 7,
    )
    report.values["p99"] = ratio(took["with a writer"], took["alone"]).median
    report.figures["p99 µs"] = took
    report.tables["26 × 64 keys: p99 of a fetch, µs"] = [
        {name: f"{Spread.of(times):.0f}" for name, times in took.items()}
    ]


def run(options: Options) -> Report:
    report = Report(figures={"versions": versions("numpy"), "kernels": _core.cache_kernels()})
    random, quick = np.random.default_rng(options.seed), options.quick
    all_cores = os.sched_getaffinity(0)
    one = {max(all_cores)}
    os.sched_setaffinity(0, one)  # the peers inherit it
    with peers(report) as bags:
        for dim in (32, 128):
            scene = Scene.make(500_000 if quick else rows_for(dim), dim, random)
            if bags is not None:
                bags.table(len(scene.keys), dim)
            compare(scene, report, random, bags, quick=quick)
            compare_pooling(scene, report, random, bags, quick=quick)
            if dim == 32:
                report.values["call"] = call_us(scene)
                os.sched_setaffinity(0, all_cores)  # the writer has a separate core
                compare_with_writer(scene, report, random, quick=quick)
                os.sched_setaffinity(0, one)
            del scene
    os.sched_setaffinity(0, all_cores)
    if not quick:
        compare_threads(report, random)
    return report


def rows_for(dim: int) -> int:
    """5 million where cache, rows by number and the peers' tables fit into three quarters of the memory."""
    needed = 5_000_000 * dim * 4 * 4.5
    return 5_000_000 if needed < 0.75 * psutil.virtual_memory().available else 2_000_000


BENCHMARK = Benchmark(
    name="cpu_cache",
    title=__doc__.splitlines()[0],
    run=run,
    bars=BARS,
    measured=("hps/native", "hps/tiers/cpu/cache.py", "hps/tiers/cpu/cache_reads.py"),
    helpers=(*HELPERS, "benchmarks/cpu_pooling.py", "benchmarks/cpu_scene.py"),
    missing_requirement=lambda: None if COMPILED else "the native core is not built",
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
