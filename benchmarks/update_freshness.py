"""How soon a row that was sent is served, and what lookups pay for it.

A producer sends 50,000 rows of dim 32 a second into a Kafka topic of two partitions; a node, in this process,
takes them into RocksDB and its CPU cache, and `hps ingest` into Redis, which the node reads; meanwhile the
node answers 200 lookups a second of 1,024 keys. Broker, Redis, producer, ingest and node share the machine's
cores. The broker is given some seconds to compile its code, and the readers to catch up, before anything is
judged.

Freshness: from the producer's call to a lookup that returns the new row (CPU cache), and to a fetch from each
store that does (asked every 20 ms, which adds 10 on average). 64 of the keys asked for are those whose rows
tell when they were sent; each of the producer's calls, one in 10 ms, sends one of them.

What lookups pay: the 99th percentile of their time, from when they were due, beside that of as many lookups
when the node's reader is paused while all others go on: in short stretches by turns, so that what else the
machine does meets both; ratios are taken turn by turn, and their median is judged. Where the machine's host
takes its cores away, turns are repeated, up to three times as many, and those judged of which it took least.
Who spends the cores' time is told beside it, and how many messages the node is behind at the end. Then the
same once more with the lookups in a process of their own that is attached to the node, as with
`hps serve --workers 1`.
"""

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
from benchmarks.peers.fresh_lookups import KEYS, LOOKUPS_S, AttachedLookups, Lookups, Seen
from benchmarks.peers.kafka_broker import KAFKA, kafka_broker
from benchmarks.peers.redis_server import lacking, redis_server
from benchmarks.peers.row_stream import PROBES, RowStream, stream_producer
from hps.config.model_schema import ModelSpec, TableSpec
from hps.models.version_writer import write_version
from hps.tiers.base import FetchContext, Part

MODEL, TABLE, DIM = "fresh", "items", 32
ROWS = 500_000
ROWS_S = 50_000
STRETCH_S, TURNS, QUICK_TURNS = 4.0, 8, 2
Span = tuple[float, float]
"""Since and until when, Unix time in seconds."""
# The broker starts cold; whoever reads is behind then.
_WARM_S, _CAUGHT_UP = 8.0, 100
_ASK_EVERY_S = 0.02
# Cores taken by the machine's host in a turn that counts as calm.
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


class Asked:
    """The probes fetched from one store every 20 ms."""

    def __init__(self, fetch: Callable[[list[Part], FetchContext], None], node: hps.Node) -> None:
        self.seen, self._ended = Seen(), False
        table = node.models[MODEL].tables[TABLE]

        def run() -> None:
            while not self._ended:
                part = Part.make(table, np.arange(PROBES))
                fetch([part], FetchContext())
                self.seen.note(np.where(part.source > 0, part.out[:, 0], -1))
                time.sleep(_ASK_EVERY_S)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended = True
        self._thread.join()


def _settings(folder: Path, brokers: str, redis: str) -> dict[str, Any]:
    spec = ModelSpec(name=MODEL, tables=[TableSpec(name=TABLE, dim=DIM)])
    # No tick looks like one of these.
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
        asked = {name: Asked(stores[name].fetch, node) for name in ("rocksdb", "redis")}
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
    _tell_freshness(seen, sent, spans, report)
    _tell_freshness({"worker": worker_seen}, sent, worker_spans, report)
    _tell_lookups("lookup", "", updating, paused, report)
    _tell_lookups("worker_lookup", " in a worker", worker_updating, worker_paused, report)
    report.figures["rows_s"] = len(sent) * ROWS_S * 0.01 / (sent[-1] - sent[0])
    return report


def _make_topic(brokers: str) -> None:
    """As an operator would, before anything runs: else its first rows wait until readers find it."""
    with stream_producer(brokers, MODEL) as producer:
        producer.watermark()


def _ingest(config: Path, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """`hps ingest` by the node's settings."""
    config.write_text(json.dumps({**settings, "server": {"admin": {"port": 0}}}))
    command = [sys.executable, "-m", "hps.cli.main", "ingest", "--config", str(config)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _behind(node: hps.Node) -> float:
    """Messages that the node has still to read; infinite while it does not know."""
    lags = [reader["lag"] for reader in node.streams.status()]
    return math.inf if None in lags else sum(lags)


def _until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise RuntimeError(f"updates did not come within {seconds:g} s")
        time.sleep(0.05)


def _stretches(
    node: hps.Node,
    stretch: Callable[[float], list[float]],
    turns: int,
    processes: dict[str, int],
    where: str,
    report: Report,
) -> tuple[list[list[float]], list[list[float]], list[Span]]:
    """The lookups' times with updates and with the node's reader paused, by turns; when the first were."""
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
        time.sleep(2.5)  # how far it is behind was told before the pause
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
        f"Lookups in the {where}: {turns} turns of {len(tried)}; cores that the machine's host took then: "
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
    """Of all stretches, with the sum as "all"."""
    names = {name for each in shares for name in each}
    mean = {name: sum(each.get(name, 0.0) for each in shares) / len(shares) for name in names}
    return {"all": sum(mean.values())} | mean


def _tell_freshness(
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
        # What was never seen counts as infinitely late.
        waits = np.array([times.get(int(i), np.inf) - sent[i] for i in chosen]) * 1e3
        quantiles = np.quantile(waits, [0.5, 0.9, 0.99, 0.999, 1.0], method="higher")
        names = ("p50", "p90", "p99", "p99.9", "most")
        lines.append(
            {"sent to visible, ms": tier, **dict(zip(names, quantiles.tolist(), strict=True))}
        )
        report.values[f"{tier}_p50"], report.values[f"{tier}_p99"] = quantiles[0], quantiles[2]
    report.tables[f"{len(chosen):,} of the producer's calls, {', '.join(seen)}"] = lines


def _tell_lookups(
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
            "p99 of the turns": ", ".join(f"{each * 1e3:.1f}" for each in p99[name]),
        }
        for name, turns in kinds.items()
    ]
    report.tables[f"Lookups{where} of {KEYS:,} keys, {LOOKUPS_S} a second"] = lines
    report.figures[f"{bar}_turns"] = p99
    report.values[bar] = ratio(p99["with updates"], p99["paused"]).median


def _lacking() -> str | None:
    return lacking() if KAFKA.ready() else "Kafka is not set up: run `make test-services`"


BENCHMARK = Benchmark(
    name="update_freshness",
    title="How soon a row that was sent is served",
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
    lacking=_lacking,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
