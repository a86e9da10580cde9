"""Reading from and writing to the stores, each against a minimal program that does the same.

`benchmarks.stores_redis` and `benchmarks.stores_rocksdb` describe their measurements, floors and bars, and
can run alone."""

from __future__ import annotations

import sys

from benchmarks import stores_redis, stores_rocksdb
from benchmarks.common import Benchmark, Options, Report, main

HALVES = (stores_redis, stores_rocksdb)


def run(options: Options) -> Report:
    report = Report()
    for half in HALVES:
        if missing := half.BENCHMARK.missing_requirement():
            report.notes.append(f"{half.BENCHMARK.name} was not measured: {missing}")
            continue
        found = half.run(options)
        report.values |= found.values
        report.tables |= found.tables
        report.figures |= found.figures
        report.notes += found.notes
    return report


BENCHMARK = Benchmark(
    name="stores",
    title="Rows out of the stores and into them",
    run=run,
    bars=tuple(bar for half in HALVES for bar in half.BARS),
    measured=(
        *(path for half in HALVES for path in half.BENCHMARK.measured),
        "benchmarks/stores_rocksdb.py",
    ),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
