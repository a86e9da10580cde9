"""Time from sending a row until it is served, and its cost for lookups.

A producer sends 50,000 rows of dim 32 a second into a Kafka topic of two partitions; a node, in this process,
applies them to RocksDB and its CPU cache, and `hps ingest` to Redis, which the node reads; at the same time
the node answers 200 lookups a second of 1,024 keys. Broker, Redis, producer, ingest and node share the
machine's cores. Measuring starts after some seconds, when the broker's code is compiled and the readers have
caught up.

Freshness: from the producer's call to a lookup that returns the new row (CPU cache), and to a fetch from each
store that does (polled every 20 ms, which adds 10 on average). 64 of the keys are probes, whose rows hold the
number of the producer's call; each call, one in 10 ms, sends one of them.

Cost for lookups: the 99th percentile of their time, from when they were due, relative to that of as many
lookups while the node's reader is paused and everything else runs. Both alternate in short stretches, so that
other load of the machine affects both; ratios are taken pair by pair, and their median is judged. If the host
takes cores from the machine, pairs are repeated, up to three times as many, and the least affected are
judged. The report also has the CPU time of threads and processes, and the largest lag of the node in
messages. All of this is repeated with the lookups in a separate process that is attached to the node, as with
`hps serve --workers 1`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

import hps
from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.cores import CoreTimes
from benchmarks.measure import ratio, versions
from benchmarks.peers.fresh_lookups import KEYS, LOOKUPS_S, AttachedLookups, Lookups, TickTimes
from benchmarks.peers.kafka_broker import KAFKA, kafka_broker
from benchmarks.peers.redis_server import missing_requirement, redis_server
from benchmarks.peers.row_stream import PROBES, RowStream, stream_producer
from hps.config.model_schema import ModelSpec, TableSpec
from hps.models.version_writer import write_version
from hps.tiers.base import FetchContext, Part

MODEL, TABLE, DIM = "fresh", "items", 32
ROWS = 500_000
ROWS_S = 50_000
STRETCH_S, TURNS, QUICK_TURNS = 4.0, 8, 2
Span = tuple[float, float]
"""Start and end, Unix time in seconds."""
# The broker starts cold, and readers lag behind at first.
_WARM_S, _CAUGHT_UP = 8.0, 100
_POLL_S = 0.02
# Most cores that the host may take from the machine in a stretch that counts as calm.
_CALM = 0.03

BARS = (
    *(
        Bar(f"{tier}_p{q}", f"sent to visible in {tier}, p{q}: ms", at_most=limit)
        for tier in ("cpu", "rocksdb", "redis", "worker")
        for q, limit in ((50, 50.0), (99, 500.0))
    ),
    Bar("lookup", "lookups' p99, with updates / paused", at_most=1.5),
    Bar("worker_lookup", "lookups' p99 in a worker, with updates / paused", at_most=1.5),
)


class StoreProbe:
    """A thread that fetches the probes from one store every 20 ms."""

    def __init__(self, fetch: Callable[[list[Part], FetchContext], None], node: hps.Node) -> None:
        self.seen, self._ended = TickTimes(), False
        table = node.models[MODEL].tables[TABLE]

        def run() -> None:
            while not self._ended:
                part = Part.make(table, np.arange(PROBES))
                fetch([part], FetchContext())
                self.seen.note(np.where(part.source > 0, part.out[:, 0], -1))
                time.sleep(_POLL_S)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended = True
        self._thread.join()


def _settings(folder: Path, brokers: str, redis: str) -> dict[str, Any]:
    spec = ModelSpec(name=MODEL, tables=[TableSpec(name=TABLE, dim=DIM)])
    # No tick has this value.
    write_version(
        folder / "models",
        spec,
        1,
        {TABLE: (np.arange(ROWS), np.full((ROWS, DIM), -1.0, np.float32))},
    )
    return {
        "models": {"repository": str(folder / "models")},
        "tiers": {
            "rocksdb": {"path": str(folder / "db")},
            "redis": {"addresses": [redis]},
            "cpu_cache": {"enabled": True, "share": 0.5},
        },
        "updates": {"kafka": {"brokers": brokers, "group": "bench", "shared_writer": "ingest"}},
        "server": {"runtime": str(folder / "run")},
    }


def run(options: Options) -> Report:
    report = Report(
        figures={"versions": versions("numpy", "confluent-kafka", "rocksdict", "redis")}
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(kafka_broker(folder / "kafka"))
        redis = stack.enter_context(redis_server(folder / "redis"))
        _make_topic(broker.address)
        settings = _settings(folder, broker.address, redis.address)
        ingest = _ingest(folder / "ingest.yaml", settings)
        stack.callback(ingest.kill)
        node = stack.enter_context(hps.open(settings))
        rows_sent = RowStream(broker.address, MODEL, TABLE, ROWS, DIM, ROWS_S, folder / "times.npy")
        stack.callback(rows_sent.kill)
        lookups = Lookups(node, MODEL, TABLE, ROWS, options.seed)
        stores = {each.tier.info.name: each.tier for each in node.tiers}
        asked = {name: StoreProbe(stores[name].fetch, node) for name in ("rocksdb", "redis")}
        _until(lambda: all(len(e.seen.times) > PROBES for e in (lookups, *asked.values())))
        time.sleep(_WARM_S)
        _until(lambda: _behind(node) < _CAUGHT_UP)
        turns = QUICK_TURNS if options.quick else TURNS
        processes = {"ingest": ingest.pid, "redis": redis.pid, "producer": rows_sent.pid}
        updating, paused, spans = _stretches(
            node, lookups.stretch, turns, processes, "node", report
        )
        lookups.end()
        for each in asked.values():
            each.end()
        worker = AttachedLookups(settings, MODEL, TABLE, ROWS, options.seed)
        stack.callback(worker.kill)
        processes["worker"] = worker.pid
        worker_updating, worker_paused, worker_spans = _stretches(
            node, worker.stretch, turns, processes, "worker", report
        )
        worker_seen = worker.end()
        sent = rows_sent.end()
    seen = {"cpu": lookups.seen.times, **{n: a.seen.times for n, a in asked.items()}}
    _report_freshness(seen, sent, spans, report)
    _report_freshness({"worker": worker_seen}, sent, worker_spans, report)
    _report_lookups("lookup", "", updating, paused, report)
    _report_lookups("worker_lookup", " in a worker", worker_updating, worker_paused, report)
    report.figures["rows_s"] = len(sent) * ROWS_S * 0.01 / (sent[-1] - sent[0])
    return report


def _make_topic(brokers: str) -> None:
    """Make the topic in advance, as an operator would: else its first rows wait until readers find it."""
    with stream_producer(brokers, MODEL) as producer:
        producer.watermark()


def _ingest(config: Path, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start `hps ingest` with the node's settings."""
    config.write_text(json.dumps({**settings, "server": {"admin": {"port": 0}}}))
    command = [sys.executable, "-m", "hps.cli.main", "ingest", "--config", str(config)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _behind(node: hps.Node) -> float:
    """Lag of the node in messages; infinite while it is unknown."""
    lags = [reader["lag"] for reader in node.streams.status()]
    return math.inf if None in lags else sum(lags)


def _until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise RuntimeError(f"updates did not arrive within {seconds:g} s")
        time.sleep(0.05)


def _stretches(
    node: hps.Node,
    stretch: Callable[[float], list[float]],
    turns: int,
    processes: dict[str, int],
    where: str,
    report: Report,
) -> tuple[list[list[float]], list[list[float]], list[Span]]:
    """Lookup times with updates and with the node's reader paused, alternating; the spans of the former."""
    shares: dict[str, list[dict[str, float]]] = {"with updates": [], "paused": []}

    def timed(kind: str) -> list[float]:
        before, begun = CoreTimes(processes), time.monotonic()
        took = stretch(STRETCH_S)
        shares[kind].append(CoreTimes(processes).shares(before, time.monotonic() - begun))
        return took

    tried: list[tuple[float, list[float], list[float], Span]] = []
    behind = 0.0
    while len(tried) < 3 * turns and sum(each[0] < _CALM for each in tried) < turns:
        begun, stolen = time.time(), psutil.cpu_times().steal
        updating = timed("with updates")
        span = begun, time.time() - 1.0
        behind = max(behind, _behind(node))
        node.streams.pause()
        time.sleep(0.5)
        paused = timed("paused")
        stolen = (psutil.cpu_times().steal - stolen) / (2 * STRETCH_S)
        node.streams.resume()
        time.sleep(2.5)  # the reported lag is from before the pause
        _until(lambda: _behind(node) < _CAUGHT_UP)
        tried.append((stolen, updating, paused, span))
    calmest = sorted(tried, key=lambda each: each[0])[:turns]
    means = {kind: _mean(each) for kind, each in shares.items()}
    report.tables[f"Cores used, lookups in the {where}"] = [
        {"": name, **{kind: each.get(name, 0.0) for kind, each in means.items()}}
        for name, share in sorted(means["with updates"].items(), key=lambda each: -each[1])
        if share >= 0.01
    ]
    report.notes.append(
        f"Lookups in the {where}: {turns} stretches of {len(tried)}; cores that the host took in them: "
        + ", ".join(f"{each[0]:.2f}" for each in calmest)
    )
    report.figures[f"behind, lookups in the {where}"] = behind
    report.notes.append(f"Most messages behind, lookups in the {where}: {behind}")
    return (
        [each[1] for each in calmest],
        [each[2] for each in calmest],
        [each[3] for each in calmest],
    )


def _mean(shares: list[dict[str, float]]) -> dict[str, float]:
    """Mean over all stretches, with the sum as "all"."""
    names = {name for each in shares for name in each}
    mean = {name: sum(each.get(name, 0.0) for each in shares) / len(shares) for name in names}
    return {"all": sum(mean.values())} | mean


def _report_freshness(
    seen: dict[str, dict[int, float]],
    sent: NDArray[np.float64],
    spans: list[Span],
    report: Report,
) -> None:
    chosen = np.flatnonzero(
        np.logical_or.reduce([(sent >= begun) & (sent < ended) for begun, ended in spans])
    )
    lines: list[Mapping[str, Any]] = []
    for tier, times in seen.items():
        # A tick that was never seen counts as infinitely late.
        waits = np.array([times.get(int(i), np.inf) - sent[i] for i in chosen]) * 1e3
        quantiles = np.quantile(waits, [0.5, 0.9, 0.99, 0.999, 1.0], method="higher")
        names = ("p50", "p90", "p99", "p99.9", "most")
        lines.append(
            {"sent to visible, ms": tier, **dict(zip(names, quantiles.tolist(), strict=True))}
        )
        report.values[f"{tier}_p50"], report.values[f"{tier}_p99"] = quantiles[0], quantiles[2]
    report.tables[f"{len(chosen):,} of the producer's calls, {', '.join(seen)}"] = lines


def _report_lookups(
    bar: str, where: str, updating: list[list[float]], paused: list[list[float]], report: Report
) -> None:
    kinds = {"with updates": updating, "paused": paused}
    p99 = {
        name: [float(np.quantile(each, 0.99)) for each in turns] for name, turns in kinds.items()
    }
    lines: list[Mapping[str, Any]] = [
        {
            "lookup, ms": name,
            **{
                f"p{q}": float(np.quantile(np.concatenate(turns), q / 100)) * 1e3
                for q in (50, 90, 99)
            },
            "p99 of the stretches": ", ".join(f"{each * 1e3:.1f}" for each in p99[name]),
        }
        for name, turns in kinds.items()
    ]
    report.tables[f"Lookups{where} of {KEYS:,} keys, {LOOKUPS_S} a second"] = lines
    report.figures[f"{bar}_turns"] = p99
    report.values[bar] = ratio(p99["with updates"], p99["paused"]).median


def _missing_requirement() -> str | None:
    return (
        missing_requirement() if KAFKA.ready() else "Kafka is not set up: run `make test-services`"
    )


BENCHMARK = Benchmark(
    name="update_freshness",
    title="Time from sending a row until it is served",
    run=run,
    bars=BARS,
    measured=(
        "hps/native",
        "hps/lookup",
        "hps/tiers",
        "hps/updates",
        "hps/node/streams.py",
        "hps/node/stream_readers.py",
        "hps/node/attached.py",
    ),
    missing_requirement=_missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
