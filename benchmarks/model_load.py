"""Time to load a model's files into a RocksDB that is ready to serve, and time of the next start.

One table of 10 million rows × 32 float32 (1.4 GB) with random int64 keys in random order, from the
files of the model repository: checksums, sort, SST files, ingest, until a lookup is answered. Each load
runs in a separate process, into an empty folder.

* the floor: the same rows, already sorted in memory, through the bare SST writer and ingested;
* the peer: as HPS loads, write batches of 65,536 rows in the files' order, the log flushed after each.

Then the next start, which must find the rows loaded; the memory a load takes in addition to what the process
had before (anonymous pages; a copy of a large table's vectors is mapped); a model of 2,000 tables of 100
rows.

The rate is wall time, as the bar is; ``CPU s`` shows how much of it was spent waiting.
"""

from __future__ import annotations

import multiprocessing
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rocksdict import IngestExternalFileOptions, Options, Rdict, SstFileWriter, WriteBatch

from benchmarks.common import Bar, Benchmark, Report, main
from benchmarks.common import Options as RunOptions
from benchmarks.measure import Spread, alternate, ratio, versions
from hps.config.model_schema import ModelSpec
from hps.models.loader import load_tables
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.tiers.base import FetchContext, Part
from hps.tiers.rocksdb import RocksDbTier
from hps.types import NoProgress

DIM = 32
ROWS, QUICK_ROWS = 10_000_000, 500_000
TABLES, QUICK_TABLES = 2_000, 200
PEER_ROWS = 2_000_000
ROUNDS = 3
_CHUNK = 1 << 17

BARS = (
    Bar("rate", f"{ROWS:,} rows x {DIM}: million rows/s from files to ready", at_least=0.5),
    Bar("peer", "rows/s: ours / HPS's loading", at_least=3.0),
    Bar("next_start_s", "next start: seconds until the rows are ready", at_most=2.0),
    Bar("extra_mb", "memory a load takes, MB", at_most=512.0),
    Bar("tables_next_start_s", f"{TABLES:,} small tables: seconds of the next start", at_most=15.0),
)


def run(options: RunOptions) -> Report:
    rows = QUICK_ROWS if options.quick else ROWS
    report = Report(figures={"rows": rows, "dim": DIM, "versions": versions("numpy", "rocksdict")})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "models", rows, options.seed)
        loads = [_load(folder, "db") for _ in range(1 if options.quick else ROUNDS)]
        rate = Spread.of([rows / 1e6 / load["s"] for load in loads])
        after = _alone(_start, folder / "models", folder / "db", 0)
        report.values["rate"] = rate.median
        report.values["next_start_s"] = after["s"]
        report.values["extra_mb"] = max(load["extra_mb"] for load in loads)
        _compare(folder, min(rows, PEER_ROWS), options, report)
        report.tables["One table"] = [
            {"": "load", "million rows/s": f"{rate}", "CPU s": loads[-1]["cpu_s"],
             "MB": loads[-1]["extra_mb"]},
            {"": "next start", "million rows/s": "–", "CPU s": after["cpu_s"],
             "MB": after["extra_mb"]},
        ]  # fmt: skip
        report.figures |= {"loads": loads, "next_start": after}
    _many(QUICK_TABLES if options.quick else TABLES, report)
    if options.quick:
        report.notes.append(
            f"--quick: {rows:,} rows and {QUICK_TABLES} tables, not those of the bars."
        )
    return report


def _compare(folder: Path, rows: int, options: RunOptions, report: Report) -> None:
    shutil.rmtree(folder / "models")
    _write(folder / "models", rows, options.seed)

    def side(how: Callable[..., Any]) -> Callable[[], float]:
        def once() -> float:
            shutil.rmtree(folder / "db", ignore_errors=True)
            return rows / 1e6 / float(_alone(how, folder / "models", folder / "db", rows)["s"])

        return once

    sides = {"ours": side(_start), "HPS": side(_load_as_hps), "floor: bare SST": side(_bare)}
    rates = alternate(sides, 1 if options.quick else ROUNDS)
    report.values["peer"] = ratio(rates["ours"], rates["HPS"]).median
    report.tables[f"{rows:,} rows, million rows/s"] = [
        {"": name, "rate": f"{Spread.of(found)}"} for name, found in rates.items()
    ]
    report.figures["compared"] = rates


def _many(count: int, report: Report) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tables = [{"name": f"t{i}", "dim": 8} for i in range(count)]
        spec = ModelSpec.model_validate({"name": "m", "tables": tables})
        keys, rows = np.arange(100), np.ones((100, 8), np.float32)
        write_version(
            folder / "models", spec, 1, {t["name"]: (keys, rows) for t in tables}, mapped=False
        )
        first = _alone(_start, folder / "models", folder / "db", 0)
        after = _alone(_start, folder / "models", folder / "db", 0)
    report.values["tables_next_start_s"] = after["s"]
    report.tables[f"{count:,} tables of 100 rows"] = [
        {"": "load", "s": first["s"], "CPU s": first["cpu_s"]},
        {"": "next start", "s": after["s"], "CPU s": after["cpu_s"]},
    ]
    report.figures["many"] = {"tables": count, "load": first, "next_start": after}


def _write(root: Path, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.integers(-(2**63), 2**63 - 1, rows)
    spec = ModelSpec.model_validate({"name": "m", "tables": [{"name": "t", "dim": DIM}]})
    chunks = (
        (keys[i : i + _CHUNK], rng.random((len(keys[i : i + _CHUNK]), DIM), np.float32))
        for i in range(0, rows, _CHUNK)
    )
    write_version(root, spec, 1, {"t": chunks}, mapped=False)


def _load(folder: Path, name: str) -> dict[str, float]:
    shutil.rmtree(folder / name, ignore_errors=True)
    return _alone(_start, folder / "models", folder / name, 0)


def _alone(how: Callable[..., Any], *arguments: object) -> dict[str, float]:
    """Run in a new process: seconds, CPU seconds and additional MB of anonymous memory."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_measured, how, *arguments).result()


def _measured(how: Callable[..., Any], *arguments: object) -> dict[str, float]:
    before = _anonymous_mb()
    peak, stop = [before], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            peak.append(_anonymous_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    wall, cpu = time.monotonic(), time.process_time()
    how(*arguments)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    stop.set()
    watcher.join()
    return {"s": round(wall, 3), "cpu_s": round(cpu, 3), "extra_mb": max(peak) - before}


def _anonymous_mb() -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) / 1024


def _start(models: Path, db: Path, _rows: int) -> None:
    """Do the work of a node's start, up to the first answer."""
    version = Repository(models).open("m")
    tables = version.embedding_tables()
    store = RocksDbTier(db)
    store.open_tables(list(tables.values()))
    load_tables(version, tables, store, NoProgress())
    first = next(iter(tables.values()))
    keys, rows = version.tables[first.name].head(100)
    part = Part.make(first, keys)
    store.fetch([part], FetchContext())
    if not np.array_equal(part.out, rows):
        raise AssertionError("the store does not answer with the rows of the files")
    store.close()


def _load_as_hps(models: Path, db: Path, _rows: int) -> None:
    files = Repository(models).open("m").tables["t"]
    options = Options(raw_mode=True)
    options.optimize_level_style_compaction(512 << 20)
    options.increase_parallelism(2)
    store = Rdict(str(db), options)
    for keys, vectors in files.blocks(65_536):
        batch = WriteBatch(raw_mode=True)
        names = keys.view("V8").tolist()
        values = vectors.view(f"V{4 * DIM}").reshape(-1).tolist()
        for name, value in zip(names, values, strict=True):
            batch.put(name, value)
        store.write(batch)
        store.flush_wal(True)
    store.flush()
    store.close()


def _bare(_models: Path, db: Path, rows: int) -> None:
    names = np.arange(rows, dtype=">u8").view("V8").tolist()
    value = bytes(9 + 4 * DIM)
    store = Rdict(str(db), Options(raw_mode=True))
    writer = SstFileWriter(Options(raw_mode=True))
    writer.open(str(db / "rows.sst"))
    for name in names:
        writer[name] = value
    writer.finish()
    move = IngestExternalFileOptions()
    move.set_move_files(True)
    store.ingest_external_file([str(db / "rows.sst")], move)
    store.close()


BENCHMARK = Benchmark(
    name="model_load",
    title="From a model's files to a RocksDB that is ready to serve",
    run=run,
    bars=BARS,
    measured=("hps/models", "hps/tiers", "hps/types.py"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
