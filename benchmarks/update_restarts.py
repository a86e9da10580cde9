"""Time until a killed server serves updates again.

A server with RocksDB, a CPU cache and a Redis that it writes to, as a member of the shared group, is killed
(``kill -9``) and restarted. The time counts from the moment it is ready: until it serves an update that was
sent while it was down, and until it serves one that was sent after that and has written it to Redis.
`tests/integration/test_update_restarts.py` does the same a few times.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.peers.kafka_broker import KAFKA, kafka_broker
from benchmarks.peers.redis_server import redis_server
from tests.support.restarts import restarts

KILLS, QUICK_KILLS = 30, 4

BARS = (
    Bar(
        "missed",
        "s until it serves an update that was sent while it was down, the worst",
        at_most=2.0,
    ),
    Bar("served", "s until it serves one that was sent when it was ready, the worst", at_most=2.0),
    Bar("redis", "s until that one is in Redis, the worst", at_most=2.0),
)


def run(options: Options) -> Report:
    report, kills = Report(), QUICK_KILLS if options.quick else KILLS
    with (
        tempfile.TemporaryDirectory() as folder,
        kafka_broker(Path(folder) / "kafka") as broker,
        redis_server(Path(folder) / "redis") as redis,
        restarts(Path(folder), broker, redis) as restarted,
    ):
        seen = []
        for number in range(kills):
            times = restarted.kill_and_start()
            print(f"kill {number + 1}: {times}", file=sys.stderr)
            seen.append(times)
    for bar in BARS:
        worst = max(times[bar.name] for times in seen)
        report.values[bar.name] = worst
    report.tables[f"{kills} kills, seconds"] = [
        {"kill": number + 1, **{name: round(s, 3) for name, s in times.items()}}
        for number, times in enumerate(seen)
    ]
    return report


def _missing_requirement() -> str | None:
    return None if KAFKA.ready() else "Kafka is not set up: run `make test-services`"


BENCHMARK = Benchmark(
    name="update_restarts",
    title="Time until a killed server serves updates again",
    run=run,
    bars=BARS,
    measured=("hps", "services", "tests/support"),
    missing_requirement=_missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
