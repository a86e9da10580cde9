"""Redis: reading rows against a C program, writing them against bare HSETs. Half of `benchmarks.stores`.

A real redis-server on one core, the client on another. Batches of 1 k, 10 k and 100 k random keys of
rows of 128 and 512 bytes, 8 partitions, `native` layout, every key found:

* ours: `RedisTier.fetch` of one part, from keys to rows, versions and sources;
* the peer: a C program that pipelines the same HMGETs with hiredis and copies the rows out
  (`benchmarks/peers/redis_hmget.c`); same keys, same server, alternating batch by batch;
* Feast's `RedisOnlineStore.online_read` of the same rows, 10,000 at a time, as it keeps them on the same
  server (`benchmarks/peers/feast_redis.py`); making its keys and decoding its values is not counted;
* TensorFlow Recommenders-Addons' `RedisTable.lookup` of the same rows, 10,000 at a time, in as many buckets
  (`benchmarks/peers/tfra_redis.py`); it is compiled, uses hiredis and keeps no versions. Its last release,
  0.8.1, supports TensorFlow 2.11 to 2.16.2 and Python up to 3.11;
* the floor: the server's CPU time for our commands.

"Twice TFRA or Feast" is the bar against Feast. Against TFRA, the bar is that ours is not slower: both
saturate the server.

Then the cost of writing: `RedisTier.insert`, whose script applies the version rule, against bare HSETs of the
same rows in the same slices; and a bulk load, which records its progress.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import ROOT, Bar, Benchmark, Options, Report, main
from benchmarks.measure import Spread, alternate, ratio, versions
from benchmarks.peers.environments import PeerMissing, require
from benchmarks.peers.process import cores
from benchmarks.peers.redis_hmget import ProgramUnavailable, build, checksum, running
from benchmarks.peers.redis_server import RedisServer, missing_requirement
from hps.config.store_settings import RedisSettings
from hps.tiers.base import FetchContext, Part
from hps.tiers.redis import RedisLoadSource, RedisTier
from hps.tiers.redis.layout import TableLayout, pack
from hps.types import EmbeddingTable, version_now

DIMS = (32, 128)
BATCHES = {1_000: 600, 10_000: 90, 100_000: 21}
"""Keys per batch -> batches of each side."""
ROWS, QUICK_ROWS = 400_000, 100_000
LOADED, QUICK_LOADED = 1_000_000, 200_000
QUICK_SHARE = 6
PEER_ROWS, PEER_KEYS, PEER_TURNS = 20_000, 10_000, 12
PARTITIONS = 8
PEERS = {"feast": "Feast", "tfra": "TFRA"}
_SLICE = 1000


MEASURED = (
    "hps/tiers/redis",
    "hps/tiers/redis_scripts",
    "hps/tiers/row_values.py",
    "hps/native/src/resp.cpp",
    "benchmarks/stores_redis.py",
)


def _name(keys: int, dim: int) -> str:
    return f"redis_{keys // 1000}k_{4 * dim}"


BARS = (
    *(
        Bar(
            _name(keys, dim),
            f"Redis, {keys:,} keys x {4 * dim} B: keys/s of ours / C with hiredis",
            at_least=0.6 if keys == 1_000 else 0.8,
        )
        for dim in DIMS
        for keys in BATCHES
    ),
    Bar("redis_load", "Redis, bulk load at dim 32: million rows/s", at_least=0.2),
    Bar("redis_feast", f"Redis, {PEER_KEYS:,} keys x 128 B: keys/s of ours / Feast", at_least=2.0),
    Bar("redis_tfra", f"Redis, {PEER_KEYS:,} keys x 128 B: keys/s of ours / TFRA", at_least=1.0),
)


def run(options: Options) -> Report:
    """Measure reads and writes; bars whose peer cannot be built stay unmeasured."""
    report = Report(figures={"redis": {"versions": versions("redis", "hiredis", "numpy")}})
    with tempfile.TemporaryDirectory() as name, _server(Path(name)) as server:
        settings = RedisSettings(addresses=[server.address], timeout_ms=60_000)
        tier = RedisTier(settings)
        try:
            for dim in DIMS:
                _reads(tier, server, dim, Path(name), options, report)
            for name in PEERS:
                _peer(name, tier, server, options, report)
            _writes(tier, server, options, report)
            _load(tier, options, report)
        finally:
            tier.close()
    return report


@contextmanager
def _server(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder / "redis")
    here = os.sched_getaffinity(0)
    server_core, client_core = cores()
    try:
        server.start()
        if server_core is not None and client_core is not None:
            psutil.Process(server.pid).cpu_affinity([server_core])
            os.sched_setaffinity(0, {client_core})
        yield server
    finally:
        os.sched_setaffinity(0, here)
        server.stop()


def _table(dim: int) -> EmbeddingTable:
    return EmbeddingTable.make(f"d{dim}", dim, model="bench")


def _rows(keys: np.ndarray, dim: int) -> np.ndarray:
    return (keys[:, None] * 7 % 65_521 + np.arange(dim)).astype(np.float32)


def _cpu(server: RedisServer) -> float:
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


# -- reading --------------------------------------------------------------------------------------


def _reads(
    tier: RedisTier,
    server: RedisServer,
    dim: int,
    folder: Path,
    options: Options,
    report: Report,
) -> None:
    table, n = _table(dim), QUICK_ROWS if options.quick else ROWS
    keys = np.arange(n)
    tier.insert(table, keys, _rows(keys, dim), np.full(n, version_now(), np.uint64))
    random = np.random.default_rng(options.seed)
    lines: list[dict[str, Any]] = []
    try:
        program = build(folder)
    except ProgramUnavailable as error:
        report.notes.append(f"The C program is missing: {error}.")
        return
    name = TableLayout(table, "native", PARTITIONS).rows_keys[0].decode().replace("p0", "p%d")
    command = [str(program), str(server.port), str(PARTITIONS), str(4 * dim), name]
    with running(command) as peer:
        for size, turns in BATCHES.items():
            turns = turns // QUICK_SHARE if options.quick else turns
            batches = [random.permutation(n)[:size] for _ in range(min(turns, 50))]
            _agree(tier, table, peer.read, batches[0])
            mine, other = cycle(batches), cycle(batches)

            def ours(mine: Iterator[Any] = mine, size: int = size) -> float:
                return size / _fetch(tier, table, next(mine))[0]

            def theirs(other: Iterator[Any] = other, size: int = size) -> float:
                return size / peer.read(next(other))[0]

            before = _cpu(server)
            for _ in range(turns):
                ours()
            floor = (_cpu(server) - before) * 1e6 / (turns * size)
            rates = alternate({"ours": ours, "C": theirs}, turns)
            found = ratio(rates["ours"], rates["C"])
            report.values[_name(size, dim)] = found.median
            lines.append(
                {"keys": f"{size:,}", "ours, M keys/s": f"{_million(rates['ours'])}",
                 "C, M keys/s": f"{_million(rates['C'])}", "ours / C": f"{found:.2f}",
                 "server µs/key": floor}
            )  # fmt: skip
            report.figures["redis"][_name(size, dim)] = {
                side: asdict(_million(each)) for side, each in rates.items()
            }
    report.tables[f"Redis, rows of {4 * dim} B"] = lines


def _peer(
    name: str, tier: RedisTier, server: RedisServer, options: Options, report: Report
) -> None:
    """Compare with one peer: the same rows in the same server, each in the peer's or our layout."""
    label, table = PEERS[name], _table(DIMS[0])
    turns = PEER_TURNS // (3 if options.quick else 1)
    random = np.random.default_rng(options.seed)
    try:
        script = str(ROOT / f"benchmarks/peers/{name}_redis.py")
        arguments = [str(server.port), str(table.dim), str(PEER_ROWS)]
        with running([str(require(name).python), script, *arguments], b"ready\n") as peer:
            batches = [random.permutation(PEER_ROWS)[:PEER_KEYS] for _ in range(turns)]
            _agree(tier, table, peer.read, batches[0])
            mine, other = cycle(batches), cycle(batches)
            rates = alternate(
                {
                    "ours": lambda: PEER_KEYS / _fetch(tier, table, next(mine))[0],
                    label: lambda: PEER_KEYS / peer.read(next(other))[0],
                },
                turns,
            )
    except (PeerMissing, ProgramUnavailable) as error:
        report.notes.append(f"{label} is missing: {error}")
        return
    found = ratio(rates["ours"], rates[label])
    report.values[f"redis_{name}"] = found.median
    report.figures["redis"][name] = {side: asdict(_million(r)) for side, r in rates.items()}
    report.tables[f"Redis, {PEER_KEYS:,} keys of 128 B, M keys/s: {label}"] = [
        {"ours": f"{_million(rates['ours'])}", label: f"{_million(rates[label])}",
         f"ours / {label}": f"{found:.1f}"}
    ]  # fmt: skip


def _million(rates: list[float]) -> Spread:
    return Spread.of([rate / 1e6 for rate in rates])


def _fetch(tier: RedisTier, table: EmbeddingTable, keys: np.ndarray) -> tuple[float, Part]:
    part = Part.make(table, keys)
    start = time.perf_counter()
    tier.fetch([part], FetchContext())
    return time.perf_counter() - start, part


def _agree(
    tier: RedisTier,
    table: EmbeddingTable,
    read: Callable[[np.ndarray], tuple[float, int]],
    keys: np.ndarray,
) -> None:
    """Check that both return the rows that were written."""
    part = _fetch(tier, table, keys)[1]
    if not np.array_equal(part.out, _rows(keys, table.dim)) or read(keys)[1] != checksum(part.out):
        raise AssertionError("the rows read are not the rows written")


# -- writing --------------------------------------------------------------------------------------


def _writes(tier: RedisTier, server: RedisServer, options: Options, report: Report) -> None:
    """Cost of the version rule, into an empty table and over older rows."""
    n = QUICK_ROWS if options.quick else ROWS
    table, keys = EmbeddingTable.make("written", DIMS[0], model="bench"), np.arange(n)
    rows = _rows(keys, table.dim)
    layout = TableLayout(table, "native", PARTITIONS)
    lines = []
    for what in ("first", "again"):
        stamps = np.full(n, version_now(), np.uint64)

        def script(stamps: np.ndarray = stamps) -> None:
            tier.insert(table, keys, rows, stamps)

        def bare(stamps: np.ndarray = stamps) -> None:
            _hset(server, layout, keys, layout.values.records(rows, stamps))

        for name, work in {"script": script, "bare HSET": bare}.items():
            if what == "first":
                tier.erase("bench", table="written")
            cpu, start = _cpu(server), time.perf_counter()
            work()
            took = time.perf_counter() - start
            lines.append(
                {"": f"{name}, {what}", "M rows/s": n / took / 1e6,
                 "server µs/row": (_cpu(server) - cpu) * 1e6 / n}
            )  # fmt: skip
    report.tables[f"Redis, writing rows of {4 * table.dim} B"] = lines
    report.figures["redis"]["writes"] = lines


def _hset(server: RedisServer, layout: TableLayout, keys: np.ndarray, records: Any) -> None:
    with server.client() as client:
        connection = client.connection_pool.get_connection()
        for start in range(0, len(keys), 32 * _SLICE):
            some, values = keys[start : start + 32 * _SLICE], records[start : start + 32 * _SLICE]
            packed = []
            for share in layout.shares(some):
                for i in range(0, len(share.at), _SLICE):
                    at = share.at[i : i + _SLICE]
                    fields = layout.stored_keys(some[at]).view("V8").tolist()
                    stored = values[at].view(f"V{values.dtype.itemsize}").tolist()
                    pairs = [part for pair in zip(fields, stored, strict=True) for part in pair]
                    packed.append(pack("HSET", layout.rows_keys[share.partition], *pairs))
            connection.send_packed_command(packed)
            for _ in packed:
                connection.read_response()
        client.connection_pool.release(connection)


def _load(tier: RedisTier, options: Options, report: Report) -> None:
    n = QUICK_LOADED if options.quick else LOADED
    table = EmbeddingTable.make("loaded", DIMS[0], model="bench")
    chunks = ((keys, _rows(keys, table.dim)) for keys in np.array_split(np.arange(n), n // 50_000))
    start = time.perf_counter()
    tier.preload(table, RedisLoadSource(chunks, version_now(), mark="benchmark"))
    rate = n / (time.perf_counter() - start) / 1e6
    report.values["redis_load"] = rate
    report.figures["redis"]["load"] = {"rows": n, "million_rows_per_s": rate}


BENCHMARK = Benchmark(
    name="stores_redis",
    title="Rows out of Redis and into it",
    run=run,
    bars=BARS,
    measured=MEASURED,
    missing_requirement=missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
