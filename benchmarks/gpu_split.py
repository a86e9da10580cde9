"""A table split over two GPUs, against the same table on one, and against the connection between them.

Every table has all of its rows resident. Callers are threads, one for each device, each with keys on its
device; a rate is that of all callers, by the host's clock, over many calls in a row. *Left* leaves rows on
their owners, *gathered* brings them to the caller, of which there is one where it says so. The measured
rate of the connection is a gather of random rows by number from the other device's memory, by one caller.
*Hot* keys follow Zipf's law with exponent 0.85, and the hottest rows have copies on both devices. On a
machine with one GPU both arrays are there, and only rows are checked.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.gpu import NOW
from benchmarks.measure import versions
from hps.cuda.layout import ROOMY_LOAD, EvictionPolicy
from hps.cuda.loader import cupy, device_count, missing_requirement
from hps.cuda.owners import owner_of, rows_per_owner
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.split import GpuSplit
from hps.types import EmbeddingTable

ROWS, QUICK_ROWS = 16 << 20, 1 << 20
KEYS = 1 << 22
CALLS, WARM_UP = 20, 3
DIMS = 32, 64, 128
ZIPF, HOT = 0.85, 0.05
BATCH = 1 << 20
Work = Callable[[], object]

BARS = (
    *(
        Bar(f"left_{d}", f"rows left on their owners / one device, dim {d}", at_least=1.8)
        for d in DIMS
    ),
    *(
        Bar(
            f"gathered_{d}", f"rows gathered by one / rate of the connection, dim {d}", at_least=0.9
        )
        for d in DIMS
    ),
    *(
        Bar(f"hot_{d}", f"Zipf keys, hot rows on both / one device, dim {d}", at_least=1.6)
        for d in DIMS
    ),
    Bar("wrong", "rows that differ from those that were written", at_most=0),
)


def fill(table: EmbeddingTable, places: Sequence[int], rows: int) -> GpuSplit:
    """A table of ``rows`` rows, each its key in every place, with room for copies of hot ones."""
    capacity = rows_per_owner(rows, len(places))
    caches = [GpuCache({}, device=device) for device in places]
    for cache in caches:
        room = int(HOT * rows) if len(places) > 1 else 0
        cache.add_table(table, capacity + room, load=ROOMY_LOAD, policy=EvictionPolicy.LFU)
    split = GpuSplit(caches)
    for start in range(0, rows, BATCH):
        keys = np.arange(start, min(start + BATCH, rows))
        vectors = np.repeat(keys.astype(np.float32)[:, None], table.dim, axis=1)
        split.insert(table, keys, vectors, np.full(len(keys), NOW, np.uint64))
    return split


def rate(places: Sequence[int], callers: Sequence[tuple[int, Work]], units: int) -> float:
    """Billion units a second of all ``callers``, a device and its call of ``units`` each."""
    cp = cupy()
    start = threading.Barrier(len(callers) + 1)
    failures: list[Exception] = []

    def call(device: int, work: Work) -> None:
        with cp.cuda.Device(device), cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(WARM_UP):
                work()
            stream.synchronize()
            start.wait()
            for _ in range(CALLS):
                work()
            stream.synchronize()

    def run(device: int, work: Work) -> None:
        try:
            call(device, work)
        except Exception as error:
            failures.append(error)
            start.abort()

    threads = [threading.Thread(target=run, args=caller) for caller in callers]
    for thread in threads:
        thread.start()
    try:
        start.wait()
    except threading.BrokenBarrierError:
        raise failures[0] from None
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    for device in set(places):
        cp.cuda.Device(device).synchronize()
    if failures:
        raise failures[0]
    return len(callers) * CALLS * units / (time.perf_counter() - began) / 1e9


def keys_on(device: int, rows: int, *, hot: bool) -> Any:
    """``(KEYS,) int64`` on ``device``: uniform, or by Zipf's law with the lowest the hottest."""
    cp = cupy()
    with cp.cuda.Device(device):
        if not hot:
            return cp.random.randint(0, rows, KEYS, np.int64)
        at = cp.random.random(KEYS, np.float64) ** (1 / (1 - ZIPF))
        return cp.minimum((at * rows).astype(np.int64), rows - 1)


def plain(cache: GpuCache, table: EmbeddingTable, device: int, keys: Any) -> tuple[int, Work]:
    """A caller that fetches from the one cache that has all rows."""
    cp, held = cupy(), cache.held(table)
    with cp.cuda.Device(device):
        out, misses = cp.empty((KEYS, table.dim), np.float32), cp.zeros(4 + KEYS, np.uint32)

    def work() -> None:
        misses.data.memset_async(0, 16, cp.cuda.get_current_stream())
        cache.direct.fetch(held, keys, out, misses)

    return device, work


def gathered(
    split: GpuSplit, table: EmbeddingTable, places: Sequence[int], keys: Sequence[Any]
) -> list[tuple[int, Work]]:
    """Callers that fetch all rows to their device."""
    cp = cupy()

    def caller(home: int, device: int) -> tuple[int, Work]:
        with cp.cuda.Device(device):
            out, source = cp.empty((KEYS, table.dim), np.float32), cp.empty(KEYS, np.uint8)
        return device, lambda: split.fetch_rows(home, table, keys[home], out, source)

    return [caller(home, device) for home, device in enumerate(places)]


def left(
    split: GpuSplit, table: EmbeddingTable, places: Sequence[int], keys: Sequence[Any]
) -> list[tuple[int, Work]]:
    """Callers that leave rows on their owners."""

    def caller(home: int, device: int) -> tuple[int, Work]:
        return device, lambda: split.fetch_apart(home, table, keys[home])

    return [caller(home, device) for home, device in enumerate(places)]


def peer_gathers(
    split: GpuSplit, table: EmbeddingTable, places: Sequence[int]
) -> list[tuple[int, Work]]:
    """Callers that gather rows by number from the other device's memory."""
    cp = cupy()

    def caller(home: int, device: int) -> tuple[int, Work]:
        held = split.caches[1 - home].held(table)
        with cp.cuda.Device(device):
            numbers = cp.random.randint(0, held.shape.device_rows, KEYS, np.uint32)
            out = cp.empty((KEYS, table.dim), np.float32)
        return device, lambda: held.gather(cp.cuda.get_current_stream(), numbers, out)

    return [caller(home, device) for home, device in enumerate(places)]


def wrong(split: GpuSplit, table: EmbeddingTable, keys: Any) -> int:
    """The number of values of a fetch to the first device that are not their key."""
    cp = cupy()
    with split.caches[0].space.device:
        out, source = cp.empty((len(keys), table.dim), np.float32), cp.empty(len(keys), np.uint8)
        split.fetch_rows(0, table, keys, out, source)
        missing = int((source == 0).sum())
        return missing + int((out != keys[:, None].astype(np.float32)).sum())


def measure(report: Report, dim: int, rows: int, places: Sequence[int]) -> Any:
    table, cp = EmbeddingTable.make("bench", dim), cupy()
    one, device = fill(table, places[:1], rows), places[0]
    uniform = [keys_on(each, rows, hot=False) for each in places]
    zipf = [keys_on(each, rows, hot=True) for each in places]
    alone = {
        name: rate(places[:1], [plain(one.caches[0], table, device, keys[0])], KEYS)
        for name, keys in [("uniform", uniform), ("hot", zipf)]
    }
    one.close()
    cp.get_default_memory_pool().free_all_blocks()
    split = fill(table, places, rows)
    bad = wrong(split, table, uniform[0])
    peer = rate(places, peer_gathers(split, table, places)[:1], KEYS)
    apart = rate(places, left(split, table, places, uniform), KEYS)
    callers = gathered(split, table, places, uniform)
    by_one, by_both = rate(places, callers[:1], KEYS), rate(places, callers, KEYS)
    share = float((owner_of(uniform[0].get(), len(places)) != 0).mean())
    cold = rate(places, gathered(split, table, places, zipf), KEYS)
    copied = split.copy_hottest(table, int(HOT * rows / len(places)))
    hot = rate(places, gathered(split, table, places, zipf), KEYS)
    bad += wrong(split, table, zipf[0])
    split.close()
    cp.get_default_memory_pool().free_all_blocks()
    report.values["wrong"] = report.values.get("wrong", 0) + bad
    if len(set(places)) > 1:
        report.values |= {
            f"left_{dim}": apart / alone["uniform"],
            f"gathered_{dim}": by_one * share / peer,
            f"hot_{dim}": hot / alone["hot"],
        }
    return {
        "dim": dim,
        "one device B keys/s": alone["uniform"],
        "left B keys/s": apart,
        "gathered by one B keys/s": by_one,
        "by both": by_both,
        "connection B rows/s": peer,
        "its GB/s": peer * table.row_bytes,
        "Zipf, one device": alone["hot"],
        "Zipf, no copies": cold,
        f"Zipf, {copied:,} copies": hot,
    }


def run(options: Options) -> Report:
    cp = cupy()
    report, places = Report(), (0, min(1, device_count() - 1))
    for device in places:
        with cp.cuda.Device(device):
            cp.random.seed(options.seed + device)
    report.figures["devices"] = list(places)
    report.figures["device"] = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    report.figures["versions"] = versions("numpy", "cupy-cuda12x", "cupy-cuda13x")
    if places[1] == 0:
        report.notes.append(
            "one GPU: both arrays are there, and no bar is judged but that of wrong rows"
        )
    rows = QUICK_ROWS if options.quick else ROWS
    report.tables[f"{KEYS:,} keys a call, {rows >> 20} M rows, devices {places}"] = [
        measure(report, dim, rows, places) for dim in DIMS
    ]
    return report


BENCHMARK = Benchmark(
    name="gpu_split",
    title="A table split over two GPUs, against one",
    run=run,
    bars=BARS,
    measured=("hps/cuda", "hps/tiers/gpu"),
    helpers=("benchmarks/common.py", "benchmarks/measure.py", "benchmarks/gpu.py"),
    missing_requirement=missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
