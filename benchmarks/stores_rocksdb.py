"""Fetches from RocksDB, in batches of 1,000 to 100,000 keys and rows of 128 and 512 bytes.

Random keys of a table of 10 million rows (2.5 million of the wide ones), loaded in bulk, its files in the
operating system's cache; every key is found. Ours is `RocksDbTier.fetch` into the caller's array, keys
unsorted.

* the peer: a C++ program, `MultiGet` of the same keys, sorted, over the same database files with the same
  options, values copied into an array. It alternates with ours. Debian's librocksdb reads the files that the
  Python binding's RocksDB wrote; without it the bars count as unmeasured.

Both modes of reading files are judged, each against a peer in the same mode: by system calls, and mapped
 (`tiers.rocksdb.mmap_reads`, off by default).

The figure is CPU time a key, of one thread on both sides: `keys/s` on an otherwise idle machine. The load of
the table, whose rows are in memory in key order, is wall time: it waits for the disk. Its CPU time, which
depends less on other load, is reported as well.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Bar, Benchmark, Report, main
from benchmarks.common import Options as RunOptions
from benchmarks.measure import Spread, alternate, ratio, versions
from benchmarks.peers.environments import PeerMissing
from benchmarks.peers.rocksdb import MultiGet
from hps.tiers.base import FetchContext, Part
from hps.tiers.rocksdb import LoadRecord, RocksDbTier, RocksDbTuning
from hps.types import EmbeddingTable, VectorArray

# Table files of 1.5 GB each: larger ones would be read from the disk on a machine with other load.
ROWS = {128: 10_000_000, 512: 2_500_000}
QUICK_ROWS = 300_000
KEYS, QUICK_KEYS = 200_000, 100_000
ROUNDS, QUICK_ROUNDS = 5, 2
BATCHES = (1_000, 10_000, 100_000)
_CHUNK = 1 << 16
_HEADER_BYTES = 9

MODES = ("read", "mapped")

BARS = (
    Bar("load", "bulk load, 128 B: million rows/s", at_least=1.0),
    *(
        Bar(
            f"{mode}_{row}_{batch}",
            f"{row} B, {batch:,} keys, {mode}: keys/s, ours / C++",
            at_least=0.7,
        )
        for mode in MODES
        for row in ROWS
        for batch in BATCHES
    ),
)


@dataclass(frozen=True)
class Batches:
    """The keys of one round: a row per batch, unsorted; and sorted, as a file for the peer."""

    keys: NDArray[np.int64]
    file: Path


def run(options: RunOptions) -> Report:
    report = Report(figures={"versions": versions("numpy", "rocksdict")})
    for row_bytes, full in ROWS.items():
        rows = QUICK_ROWS if options.quick else full
        with tempfile.TemporaryDirectory() as name:
            _one_width(Path(name), row_bytes, rows, options, report)
    if options.quick:
        report.notes.append(f"--quick: {QUICK_ROWS:,} rows.")
    return report


def _one_width(
    folder: Path, row_bytes: int, rows: int, options: RunOptions, report: Report
) -> None:
    table = EmbeddingTable.make("t", row_bytes // 4)
    keys, seconds, cpu = _load(folder / "db", table, rows, options.seed)
    if row_bytes == min(ROWS):
        report.values["load"] = rows / 1e6 / seconds
    report.tables[f"Bulk load of {rows:,} rows of {row_bytes} bytes"] = [
        {
            "million rows/s": f"{rows / 1e6 / seconds:.2f}",
            "million rows/s of CPU": f"{rows / 1e6 / cpu:.2f}",
        }
    ]
    keys = np.random.default_rng(options.seed).permutation(keys)
    lines = _reads(folder, table, keys, options, report)
    report.tables[f"{rows:,} rows of {row_bytes} bytes"] = lines


def _reads(
    folder: Path,
    table: EmbeddingTable,
    keys: NDArray[np.int64],
    options: RunOptions,
    report: Report,
) -> list[Mapping[str, Any]]:
    """A line for each mode and batch size."""
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    total = QUICK_KEYS if options.quick else KEYS
    lines: list[Mapping[str, Any]] = []
    for mode, batch in product(MODES, BATCHES):
        # Other keys each time, so that no side finds the previous reads in the processor's cache.
        keys = np.roll(keys, total)
        drawn = _draw(keys, batch, total, rounds + 1, folder)
        times = _compare(folder / "db", table, drawn, batch, mmap=mode == "mapped")
        name = f"{mode}_{4 * table.dim}_{batch}"
        line: dict[str, Any] = {"": mode, "keys": f"{batch:,}"}
        for side, found in times.items():
            line[f"{side}, µs a key"] = f"{Spread.of([1e6 * s / total for s in found])}"
        line["ours / C++, keys/s"] = "–"
        if "C++" in times:
            ours = ratio(times["C++"], times["ours"])
            report.values[name] = ours.median
            line["ours / C++, keys/s"] = f"{ours}"
        report.figures[name] = times
        lines.append(line)
    return lines


def _load(
    path: Path, table: EmbeddingTable, rows: int, seed: int
) -> tuple[NDArray[np.int64], float, float]:
    """Load ``rows`` rows into a new database; returns their keys, and wall and CPU seconds of the load."""
    rng = np.random.default_rng(seed)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, rows))
    vectors = rng.random((_CHUNK, table.dim), np.float32)
    tier = RocksDbTier(path)
    codes = np.sort(tier.codes(table, keys))

    def chunks() -> Iterator[tuple[NDArray[np.uint64], VectorArray]]:
        for start in range(0, len(codes), _CHUNK):
            some = codes[start : start + _CHUNK]
            yield some, vectors[: len(some)]

    began, worked = time.monotonic(), time.process_time()
    tier.bulk_load(table, chunks(), LoadRecord("benchmark", len(keys)))
    seconds, cpu = time.monotonic() - began, time.process_time() - worked
    tier.close()
    for file in path.glob("*.sst"):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass
    return keys, seconds, cpu


def _draw(
    keys: NDArray[np.int64], batch: int, total: int, rounds: int, folder: Path
) -> list[Batches]:
    """Batches of ``total`` keys a round from the start of ``keys``."""
    drawn = []
    for turn in range(rounds):
        some = keys[turn * total : (turn + 1) * total].reshape(-1, batch)
        file = folder / f"{batch}-{turn}.keys"
        codes = some.view(np.uint64) ^ np.uint64(1 << 63)
        np.sort(codes, axis=1).astype(">u8").tofile(file)
        drawn.append(Batches(some, file))
    return drawn


def _compare(
    db: Path, table: EmbeddingTable, drawn: list[Batches], batch: int, *, mmap: bool
) -> dict[str, list[float]]:
    """CPU seconds of each round except the first, which warms up."""
    with ExitStack() as stack:
        tier = RocksDbTier(db, access="read_only", tuning=RocksDbTuning(mmap_reads=mmap))
        stack.callback(tier.close)
        sides: dict[str, Callable[[Batches], float]] = {"ours": lambda b: _ours(tier, table, b)}
        try:
            value_bytes = _HEADER_BYTES + table.dim * 4
            peer = stack.enter_context(MultiGet(db, table.id, value_bytes, mmap=mmap))
        except PeerMissing as error:
            print(f"C++ peer: {error}", file=sys.stderr)
        else:
            sides["C++"] = lambda b: _theirs(peer, b, batch)
        turns = {name: iter(drawn) for name in sides}
        times = alternate(
            {name: lambda n=name, s=side: s(next(turns[n])) for name, side in sides.items()},  # type: ignore[misc] # bound now
            len(drawn),
        )
    return {name: found[1:] for name, found in times.items()}


def _ours(tier: RocksDbTier, table: EmbeddingTable, batches: Batches) -> float:
    out = np.empty((batches.keys.shape[1], table.dim), np.float32)
    begun, missing = time.process_time(), 0
    for keys in batches.keys:
        part = Part.make(table, keys, out)
        tier.fetch([part], FetchContext())
        missing += len(part.missing)
    took = time.process_time() - begun
    if missing:
        raise AssertionError(f"{missing} rows were not found")
    return took


def _theirs(peer: MultiGet, batches: Batches, batch: int) -> float:
    found, cpu, _wall = peer.run(batches.file, batch)
    if found != batches.keys.size:
        raise AssertionError(f"the peer found {found} of {batches.keys.size} rows")
    return cpu


BENCHMARK = Benchmark(
    name="stores_rocksdb",
    title="Fetches from RocksDB, against a C++ MultiGet",
    run=run,
    bars=BARS,
    measured=(
        "hps/tiers",
        "hps/types.py",
        "benchmarks/peers/rocksdb.py",
        "benchmarks/peers/rocksdb_multiget.cpp",
    ),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
