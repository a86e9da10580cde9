"""The front end compared with others that do the same work: Triton's, KServe's, MLServer's.

Each half describes its measurements and bars, and can run alone: `benchmarks.frontend_triton` sends requests
to hps and Triton by NVIDIA's perf_analyzer, `benchmarks.frontend_servers` to all four by a small load
generator."""

from __future__ import annotations

import sys

from benchmarks import frontend_servers, frontend_triton
from benchmarks.common import Benchmark, Options, Report, main

HALVES = (frontend_triton, frontend_servers)


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
    name="frontend",
    title="The front end against Triton's, KServe's and MLServer's",
    run=run,
    bars=tuple(bar for half in HALVES for bar in half.BARS),
    measured=(*frontend_servers.BENCHMARK.measured, "benchmarks/frontend_servers.py"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
