"""No update is lost when processes are killed: seed by seed, a million updates in all.

Each seed streams 50,000 updates and deletions, some repeated, in any order and over all partitions, into two
nodes, one with RocksDB and one with Redis, both with a CPU cache. The node of Redis writes to it, with every
other seed `hps ingest` does. Nodes, ingest, Redis and the broker are killed with ``kill -9`` at random times
and restarted. Lookups run all the time; each row must have been sent for its key. At the end every store, and
every answer, must match the stream row by row and deletion by deletion.
`tests/integration/test_update_crashes.py` does the same with few rows."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.peers.kafka_broker import KAFKA
from benchmarks.peers.redis_server import missing_requirement
from tests.support.crash_run import CrashRun

SEEDS, QUICK_SEEDS = 20, 1
UPDATES, QUICK_UPDATES = 50_000, 10_000
KEYS, SECONDS = 20_000, 12.0

BARS = (
    Bar(
        "exact",
        "share of seeds after which every store and answer matches the stream",
        at_least=1.0,
    ),
)


def run(options: Options) -> Report:
    report, lines = Report(), []
    seeds = QUICK_SEEDS if options.quick else SEEDS
    for seed in range(options.seed, options.seed + seeds):
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            updates = QUICK_UPDATES if options.quick else UPDATES
            crash = CrashRun(Path(folder), seed, KEYS, updates, SECONDS, ingest=seed % 2 == 0)
            fault = ""
            try:
                crash.run()
            except AssertionError as error:
                fault = str(error)
                report.notes.append(f"seed {seed}: {fault[:500]}")
        seconds = time.monotonic() - begun
        lines.append({"seed": seed, "killed": len(crash.killed), "s": seconds, "exact": not fault})
        print(f"seed {seed}: {fault or 'exact'} ({', '.join(crash.killed)})", file=sys.stderr)
    report.tables[f"{updates:,} updates a seed"] = lines
    report.values["exact"] = sum(line["exact"] for line in lines) / len(lines)
    return report


def _missing_requirement() -> str | None:
    return (
        missing_requirement() if KAFKA.ready() else "Kafka is not set up: run `make test-services`"
    )


BENCHMARK = Benchmark(
    name="update_crashes",
    title="No update is lost when processes are killed",
    run=run,
    bars=BARS,
    measured=(
        "hps/tiers",
        "hps/updates",
        "hps/node/streams.py",
        "hps/node/stream_readers.py",
        "tests/support",
    ),
    missing_requirement=_missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
