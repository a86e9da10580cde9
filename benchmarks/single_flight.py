"""Gain of single flight when many lookups miss the same rows, and its cost when they share no keys.

A node without a CPU cache over RocksDB, 4 lookup threads. 32 lookups of 1,000 keys (dim 32) are started
together: all of the same keys (a herd), or each of random ones of 300,000. With and without `SingleFlight`,
alternating in one run; medians, CPU time of the process. Then 32 concurrent fetches of one hot key and 999
random ones each, over a store that takes 20 ms: how often the hot key is fetched. And the bare wrapper: a
fetch alone, and with three other fetches of other keys in flight.

Bars: a herd must be answered in a third of the time. Lookups that share almost no keys (about three with
each other) may take 1.15 times the CPU time at most. The hot key is fetched once, and its fetches take no
longer. Floor: the same lookups without the wrapper.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np

import hps
from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.measure import Spread, ratio
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.models.version_writer import write_version
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.single_flight import SingleFlight, _Flight
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, Source
from tests.support.memory_tier import MemoryTier

ROWS, DIM, KEYS, LOOKUPS = 300_000, 32, 1_000, 32
SLOW_S = 0.02
SPEC = ModelSpec(
    name="m",
    tables=[TableSpec(name="t", dim=DIM)],
    features=[FeatureSpec(name="t", table="t", pooling="none")],
)
BARS = (
    Bar("herd", "32 lookups of the same 1,000 keys: without / with, time", at_least=3.0),
    Bar("apart", "32 lookups of random keys: with / without, CPU", at_most=1.15),
    Bar("hot", "32 fetches of a hot key and 999 random ones: fetches of it", at_most=1.0),
    Bar("hot_time", "the same: with / without, time of a fetch", at_most=1.15),
)


def run(options: Options) -> Report:
    report = Report()
    random = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        rows = random.random((ROWS, DIM), np.float32)
        contents = {"t": (np.arange(ROWS), rows)}
        write_version(Path(folder) / "models", SPEC, 1, contents, mapped=False)
        tiers = {"cpu_cache": {"enabled": False}, "rocksdb": {"path": f"{folder}/db"}}
        config = {"models": {"repository": f"{folder}/models"}, "tiers": tiers}
        with hps.open(config) as node:
            lookups(node.model("m").engine, random, 7 if options.quick else 25, report)
    hot(random, 5 if options.quick else 15, report)
    report.tables["A fetch through the wrapper, µs beyond the tier's own"] = wrapper(random)
    return report


def lookups(engine: Any, random: np.random.Generator, rounds: int, report: Report) -> None:
    shared = engine._stores
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for keys in ("the same", "random"):
            for kind, stores in (("with", shared), ("without", shared.inner)):
                engine._stores = stores
                batches = [random.choice(ROWS, KEYS, replace=False) for _ in range(LOOKUPS)]
                if keys == "the same":
                    batches = batches[:1] * LOOKUPS
                found.setdefault((keys, kind), []).append(timed(engine, batches))
    medians = {each: np.median(np.array(times), axis=0) for each, times in found.items()}
    report.tables["32 concurrent lookups"] = [
        {
            "keys": keys,
            "single flight": kind,
            "ms": f"{1e3 * wall:.1f}",
            "CPU ms": f"{1e3 * cpu:.1f}",
        }
        for (keys, kind), (wall, cpu) in medians.items()
    ]
    same, apart = medians["the same", "with"], medians["random", "with"]
    report.values["herd"] = float(medians["the same", "without"][0] / same[0])
    report.values["apart"] = float(apart[1] / medians["random", "without"][1])


def timed(engine: Any, batches: list[Any]) -> tuple[float, float]:
    """Wall seconds and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    requests = [LookupRequest({"t": JaggedKeys.dense(keys)}) for keys in batches]
    for future in [engine.submit(request) for request in requests]:
        future.result()
    return time.perf_counter() - wall, time.process_time() - cpu


class _Slow(MemoryTier):
    """A slow store that has every key and counts the fetches of key 0."""

    def __init__(self) -> None:
        super().__init__(TierInfo("slow", Source.ROCKSDB))
        self.hot_fetches: list[int] = []

    def fetch(self, parts: Any, ctx: FetchContext) -> None:
        for part in parts:
            self.hot_fetches.append(int(np.count_nonzero(part.keys[part.missing] == 0)))
        time.sleep(SLOW_S)
        for part in parts:
            part.out[part.missing] = part.keys[part.missing, None]
            part.source[part.missing] = Source.ROCKSDB
            part.missing = part.missing[:0]


def hot(random: np.random.Generator, rounds: int, report: Report) -> None:
    """Concurrent fetches that all contain key 0."""
    found: dict[str, list[tuple[float, int]]] = {"with": [], "without": []}
    table = EmbeddingTable.make("t", DIM)
    with ThreadPoolExecutor(LOOKUPS) as pool:
        for _ in range(rounds):
            batches = [
                np.append(random.choice(ROWS, KEYS - 1, False) + 1, 0) for _ in range(LOOKUPS)
            ]
            for kind, times in found.items():
                slow = _Slow()
                tier = SingleFlight(slow) if kind == "with" else slow
                begin = Barrier(LOOKUPS)
                one = partial(_fetch, tier, table, begin)
                times.append(
                    (float(np.median(list(pool.map(one, batches)))), sum(slow.hot_fetches))
                )
    report.tables["32 concurrent fetches with a hot key, from a store that takes 20 ms"] = [
        {
            "single flight": kind,
            "a fetch, ms": f"{Spread.of([1e3 * seconds for seconds, _ in times])}",
            "fetches of the hot key": f"{Spread.of([fetches for _, fetches in times])}",
        }
        for kind, times in found.items()
    ]
    report.values["hot"] = float(max(fetches for _, fetches in found["with"]))
    took = {kind: [seconds for seconds, _ in times] for kind, times in found.items()}
    report.values["hot_time"] = ratio(took["with"], took["without"]).median


def _fetch(tier: Any, table: EmbeddingTable, begin: Barrier, keys: Any) -> float:
    part = Part.make(table, keys)
    begin.wait()
    start = time.perf_counter()
    tier.fetch([part], FetchContext())
    took = time.perf_counter() - start
    if len(part.missing) or not np.array_equal(part.out[:, 0], keys.astype(np.float32)):
        raise AssertionError("a wrong row, or none")
    return took


class _Nothing(MemoryTier):
    """A store without rows that answers immediately."""

    def fetch(self, parts: Any, ctx: FetchContext) -> None:
        pass


def wrapper(random: np.random.Generator) -> list[Mapping[str, Any]]:
    nothing = _Nothing(TierInfo("nothing", Source.ROCKSDB))
    table, ctx = EmbeddingTable.make("t", DIM), FetchContext()
    rows: list[Mapping[str, Any]] = []

    def part(n: int) -> Part:
        return Part.make(table, random.integers(-(2**62), 2**62, n))

    for n in (1, 100, 1_000, 10_000):
        tier, mine = SingleFlight(nothing), [part(n)]
        bare = best(lambda mine=mine: nothing.fetch(mine, ctx))  # type: ignore[misc] # bound now
        fetch = partial(tier.fetch, mine, ctx)
        alone = best(fetch)
        for _ in range(3):
            tier._claim(_Flight(next(tier._numbers)), [part(n)])
        crowded = best(fetch)
        rows.append(
            {
                "keys": f"{n:,}",
                "alone": f"{alone - bare:.1f}",
                "with three others": f"{crowded - bare:.1f}",
            }
        )
    return rows


def best(call: Callable[[], object], times: int = 300) -> float:
    """CPU time of a call in µs, the shortest of several rounds."""
    rounds = []
    for _ in range(7):
        start = time.process_time()
        for _ in range(times):
            call()
        rounds.append(time.process_time() - start)
    return min(rounds) / times * 1e6


BENCHMARK = Benchmark(
    name="single_flight",
    title="Rows that many lookups miss at the same time",
    run=run,
    bars=BARS,
    measured=("hps/tiers", "hps/lookup", "hps/threads.py", "benchmarks/single_flight.py"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
