"""Cost of the table library's operations on a CPU, against a bare gather and scatter of as many rows.

A table of 4 M slots of dim 32 float32, half full and full (as many random keys as slots were offered).
Batches of 65,536 random keys on one thread; the sides of a round alternate,
medians with spread. Floor: `copy_rows` of the native core, which gathers rows by number, and NumPy's
assignment to rows by number.

Bars are ratios to the floor, round by round: a find waits for at least four cache lines where a gather waits
for two, and a write must also find its slot.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.measure import Spread, alternate, ratio
from hps.native import _core as native
from hps.table import Table

SLOTS, DIM, BATCH = 1 << 22, 32, 1 << 16
BARS = (
    Bar("find", "find, half full: find / gather, time", at_most=4.5),
    Bar("contains", "contains, half full: contains / gather, time", at_most=2.5),
    Bar("insert", "insert_or_assign of resident keys, half full / scatter, time", at_most=3.0),
    Bar("kept", "rows kept of as many random keys as slots", at_least=0.964),
)


def run(options: Options) -> Report:
    report = Report()
    slots = SLOTS >> 3 if options.quick else SLOTS
    rounds = 5 if options.quick else 15
    for load in (0.5, 1.0):
        random = np.random.default_rng(options.seed)
        table = Table(DIM, init_capacity=slots, policy="lru")
        keys = random.integers(-(2**63), 2**63 - 1, int(load * slots))
        for at in range(0, len(keys), BATCH):
            part = keys[at : at + BATCH]
            table.insert_or_assign(part, np.ones((len(part), DIM), np.float32))
        if load == 1:
            report.values["kept"] = table.size / slots
        name = f"{load:g} times as many keys as {slots:,} slots, ns a key"
        times = measure(table, keys[table.contains(keys)], random, rounds)
        report.tables[name] = [
            {"operation": side, "ns": f"{Spread.of(each)}"} for side, each in times.items()
        ]
        report.figures[name] = times
        if load < 1:
            report.values["find"] = ratio(times["find"], times["gather"]).median
            report.values["contains"] = ratio(times["contains"], times["gather"]).median
            report.values["insert"] = ratio(times["insert, resident"], times["scatter"]).median
    return report


def measure(
    table: Table, keys: np.ndarray, random: np.random.Generator, rounds: int
) -> dict[str, list[float]]:
    """Return nanoseconds a key of each operation, by rounds."""
    bare = np.ones((table.capacity, DIM), np.float32)
    rows, out = np.ones((BATCH, DIM), np.float32), np.zeros((BATCH, DIM), np.float32)
    add = np.ones(BATCH, bool)

    def numbers() -> np.ndarray:
        return random.integers(0, table.capacity, BATCH)

    def resident() -> np.ndarray:
        return random.choice(keys, BATCH)

    def new() -> np.ndarray:
        return random.integers(-(2**63), 2**63 - 1, BATCH)

    def timed(draw: Callable[[], np.ndarray], call: Callable[[np.ndarray], object]) -> float:
        batch = draw()
        start = time.perf_counter()
        call(batch)
        return (time.perf_counter() - start) / BATCH * 1e9

    sides: dict[str, Callable[[], float]] = {
        "gather": lambda: timed(numbers, lambda k: native.copy_rows(bare, k, out)),
        "scatter": lambda: timed(numbers, lambda k: bare.__setitem__(k, rows)),
        "find": lambda: timed(resident, lambda k: table.find(k, out=out)),
        "find with scores": lambda: timed(
            resident, lambda k: table.find(k, out=out, with_scores=True)
        ),
        "find, missing": lambda: timed(new, lambda k: table.find(k, out=out)),
        "contains": lambda: timed(resident, table.contains),
        "find_rows": lambda: timed(resident, table.find_rows),
        "insert, resident": lambda: timed(resident, lambda k: table.insert_or_assign(k, rows)),
        "assign_scores": lambda: timed(resident, table.assign_scores),
        "find_or_insert, resident": lambda: timed(
            resident, lambda k: table.find_or_insert(k, rows, out=out)
        ),
        "accum_or_assign": lambda: timed(resident, lambda k: table.accum_or_assign(k, rows, add)),
    }
    times = alternate(sides, rounds)
    # Last, as they change what is resident.
    for name, call in {
        "insert, new": table.insert_or_assign,
        "insert_and_evict, new": table.insert_and_evict,
    }.items():
        times[name] = [timed(new, lambda k, call=call: call(k, rows)) for _ in range(rounds)]
    return times


BENCHMARK = Benchmark(
    name="table",
    title="Operations of the table library on a CPU",
    run=run,
    bars=BARS,
    measured=("hps/table", "hps/native"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
