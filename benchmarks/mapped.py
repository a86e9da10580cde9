"""Cost of a row in a mapped table: in the page cache and cold, beside known records and RocksDB.

A table of ten million rows (``--rows``; ``--quick``: one million) of random even keys; batches of 26 × 1,024
keys, all present, uniform and Zipf-distributed with s = 0.85; one thread. Dim 32 is judged; the others (8,
64 and 128, of which the last two have fewer rows) show how the cost follows the row.

* mapped: `MappedTable.gather`; mapped fetch: with versions and sources, as stores answer;
* the floor: records with known positions from the same file, with prefetch, the same instructions;
* aligned: rows of an array in huge pages with known numbers: no key beside the row, no page walks;
* RocksDB: `RocksDbTier.fetch` of the same rows, files in the operating system's cache.

Sides alternate; the figure is CPU time of the calling thread per key, and ratios are taken round by round.
Cold: the files' pages are dropped, the index is read, and then the records of random keys are fetched, with
their pages read side by side first (`populate`) or as they are touched. Reads are pages that this process
read (/proc/self/io), by key. Absent keys: 10⁸ odd keys, a third of them next to a present one.

Peers publish their index alone: NeighborHash reports 1.11 times the time of a random access to memory, in
huge pages. Beside it: rows of 8 bytes in a mapped table and in the CPU cache, with huge pages and without,
relative to a random access to an array of such rows in huge pages.

With ``--large N``: a table of N rows of dim 32 beside its floor; 10⁸ take 14 GB of memory and 27 of disk.

Nodes: `benchmarks/mapped_nodes.py`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import HELPERS, Bar, Benchmark, Options, Report, main
from benchmarks.cpu_scene import aligned, cpu_ns
from benchmarks.mapped_nodes import NODE_BARS, measure_nodes
from benchmarks.measure import Spread, alternate, ratio, zipf_keys
from hps.models.mapped_file import MappedReport, write_mapped
from hps.models.tables import open_table
from hps.native import COMPILED, _core
from hps.native.mapped_format import MappedFile, open_mapped
from hps.tiers.base import FetchContext, Part
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.cpu.cache_memory import CacheMemory
from hps.tiers.rocksdb import LoadRecord, RocksDbTier
from hps.types import EmbeddingTable, Source

ROWS, QUICK_ROWS, BATCH = 10_000_000, 1_000_000, 26 * 1024
BATCHES, ROUNDS = 30, 7
OTHER_DIMS = {8: 1.0, 64: 0.5, 128: 0.25}  # with the share of the rows
COLD_KEYS, PROBES = 20_000, 100_000_000
_CHUNK = 1 << 16

BARS = (
    Bar("floor_uniform", "dim 32, uniform: mapped / floor, CPU", at_most=1.3),
    Bar("floor_zipf", "dim 32, Zipf 0.85: mapped / floor, CPU", at_most=1.3),
    Bar("rocksdb_uniform", "dim 32, uniform: keys/s, mapped fetch / RocksDB", at_least=10),
    Bar("rocksdb_zipf", "dim 32, Zipf 0.85: keys/s, mapped fetch / RocksDB", at_least=10),
    Bar("index_bits", "bits of index a key", at_most=4),
    Bar("cold_reads", "cold: pages read a key", at_most=1.1),
    Bar("absent", "absent keys answered, of 10⁸", at_most=0),
    *NODE_BARS,
)


@dataclass(frozen=True)
class Scene:
    """A mapped file, and the keys of its rows (n,) in the order of the portable files."""

    keys: NDArray[np.int64]
    dim: int
    folder: Path
    report: MappedReport
    seconds: float

    @staticmethod
    def make(folder: Path, rows: int, dim: int, random: np.random.Generator) -> Scene:
        folder.mkdir()
        keys = random.integers(-(2**62), 2**62, rows) * 2
        keys.tofile(folder / "key")
        with (folder / "emb_vector").open("wb") as out:
            for start in range(0, rows, _CHUNK):
                vectors_of(start, min(_CHUNK, rows - start), dim).tofile(out)
        began = time.perf_counter()
        report = write_mapped(open_table(folder, "t", dim, None), folder / "mapped")
        seconds = time.perf_counter() - began
        (folder / "emb_vector").unlink()
        return Scene(keys, dim, folder, report, seconds)

    def open(self) -> MappedFile:
        return open_mapped(self.folder / "mapped", 1, int(Source.ROCKSDB))


def vectors_of(start: int, n: int, dim: int) -> NDArray[np.float32]:
    rows = (np.arange(start, start + n) % 1000)[:, None] + np.arange(dim)
    return rows.astype(np.float32)


def numbers_of(rows: int, kind: str, random: np.random.Generator) -> NDArray[np.int64]:
    """Row numbers (batches, batch)."""
    if kind == "uniform":
        return random.integers(0, rows, (BATCHES, BATCH))
    return zipf_keys(random, rows, (BATCHES, BATCH))


def sides(
    scene: Scene,
    numbers: NDArray[np.int64],
    rocksdb: RocksDb | None = None,
    rows: NDArray[Any] | None = None,
) -> dict[str, Callable[[], float]]:
    """Every side's measurement over ``numbers (batches, batch)`` of rows; ``rows`` are those of *aligned*."""
    file, dim = scene.open(), scene.dim
    table = file.table
    table.load(0, file.header.bytes)  # as nodes do
    keys = scene.keys[numbers]
    positions = np.stack([table.positions(each) for each in keys])
    out, everything = aligned(BATCH, dim), np.arange(BATCH)
    versions, source = np.zeros(BATCH, np.uint64), np.zeros(BATCH, np.uint8)

    def gather(batch: int) -> None:
        if not table.gather(keys[batch], out):
            raise RuntimeError("a row is missing")

    def fetch(batch: int) -> None:
        table.fetch(keys[batch], everything, out, versions, source)

    gather(0)
    if not (out[:, 0] == numbers[0] % 1000).all():
        raise RuntimeError("wrong rows")
    works: dict[str, Callable[[int], object]] = {
        "floor": lambda b: table.copy_records(positions[b], out),
        "mapped": gather,
        "mapped fetch": fetch,
    }
    if rows is not None:
        works["aligned"] = lambda b: _core.copy_rows(rows, numbers[b], out)
    if rocksdb is not None:
        works["RocksDB"] = lambda b: rocksdb.fetch(keys[b], out)
    few = min(4, BATCHES)
    return {
        name: partial(cpu_ns, work, few if name == "RocksDB" else BATCHES, BATCH)
        for name, work in works.items()
    }


@dataclass(frozen=True)
class RocksDb:
    """The rows of a scene in a RocksDB."""

    tier: RocksDbTier
    table: EmbeddingTable
    path: Path

    @staticmethod
    def load(path: Path, scene: Scene) -> RocksDb:
        tier, table = RocksDbTier(path), EmbeddingTable.make("t", scene.dim)
        codes = tier.codes(table, scene.keys)
        order = np.argsort(codes)

        def chunks() -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
            for start in range(0, len(order), _CHUNK):
                some = order[start : start + _CHUNK]
                rows = (some % 1000)[:, None] + np.arange(table.dim)
                yield codes[some], rows.astype(np.float32)

        tier.open_tables([table])
        tier.bulk_load(table, chunks(), LoadRecord("benchmark", len(codes)))
        for file in path.glob("*.sst"):
            file.read_bytes()
        return RocksDb(tier, table, path)

    def fetch(self, keys: NDArray[np.int64], out: NDArray[Any]) -> None:
        part = Part.make(self.table, keys, out)
        self.tier.fetch([part], FetchContext())
        if len(part.missing):
            raise RuntimeError("a row is missing")


def run(options: Options) -> Report:
    if not COMPILED:
        raise SystemExit("the benchmark needs the native core; make setup builds it")
    rows = int(options.extra.get("rows") or (QUICK_ROWS if options.quick else ROWS))
    report, random = Report(), np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory(dir=options.extra.get("folder")) as name:
        for dim, share in {32: 1.0, **({} if options.quick else OTHER_DIMS)}.items():
            _one_dim(Path(name) / f"dim-{dim}", int(rows * share), dim, random, report)
    _index_alone(rows // 2, random, report)
    if large := options.extra.get("large"):
        _large(int(large), options, random, report)
    measure_nodes(rows // 100, options, report)
    if rows != ROWS:
        report.notes.append(f"{rows:,} rows.")
    return report


def _one_dim(
    folder: Path, rows: int, dim: int, random: np.random.Generator, report: Report
) -> None:
    scene = Scene.make(folder, rows, dim, random)
    bits = scene.report.index_bytes * 8 / rows
    array = aligned(rows, dim)
    for start in range(0, rows, _CHUNK):
        array[start : start + _CHUNK] = vectors_of(start, min(_CHUNK, rows - start), dim)
    rocksdb = RocksDb.load(folder / "db", scene) if dim == 32 else None
    title = f"{rows:,} rows of dim {dim}: {bits:.2f} bits a key, written in {scene.seconds:.1f} s"
    lines: list[Mapping[str, Any]] = []
    report.tables[title] = lines
    for kind in ("uniform", "zipf"):
        times = alternate(sides(scene, numbers_of(rows, kind, random), rocksdb, array), ROUNDS)
        report.figures[f"{dim} {kind}"] = times
        over = ratio(times["mapped"], times["floor"])
        line: dict[str, Any] = {"": kind}
        line |= {f"{side}, ns": f"{Spread.of(found)}" for side, found in times.items()}
        lines.append(line | {"mapped / floor": f"{over}"})
        if rocksdb is not None:
            report.values[f"floor_{kind}"] = over.median
            faster = ratio(times["RocksDB"], times["mapped fetch"])
            report.values[f"rocksdb_{kind}"] = faster.median
    if rocksdb is not None:
        report.values["index_bits"] = bits
        report.values["absent"] = _answered_absent(scene, random)
        del array
        _build_time(scene, report)
        _cold(scene, rocksdb, random, report)
        rocksdb.tier.close()
    shutil.rmtree(folder)


def _large(rows: int, options: Options, random: np.random.Generator, report: Report) -> None:
    """A table that is larger than the others: report its ratio to the floor."""
    with tempfile.TemporaryDirectory(dir=options.extra.get("folder")) as name:
        scene = Scene.make(Path(name) / "large", rows, 32, random)
        bits = scene.report.index_bytes * 8 / rows
        title = f"{rows:,} rows of dim 32: {bits:.2f} bits a key, written in {scene.seconds:.1f} s"
        lines: list[Mapping[str, Any]] = []
        report.tables[title] = lines
        for kind in ("uniform", "zipf"):
            times = alternate(sides(scene, numbers_of(rows, kind, random)), ROUNDS)
            over = ratio(times["mapped"], times["floor"])
            line: dict[str, Any] = {"": kind} | {
                f"{side}, ns": f"{Spread.of(n)}" for side, n in times.items()
            }
            lines.append(line | {"mapped / floor": f"{over}"})


def _answered_absent(scene: Scene, random: np.random.Generator) -> float:
    """Look odd keys up, of which the table has none; return the number of answers."""
    answered, table = 0, scene.open().table
    for _ in range(0, PROBES, 1 << 20):
        keys = random.integers(-(2**62), 2**62, 1 << 20) * 2 + 1
        keys[::3] = random.choice(scene.keys, len(keys[::3])) ^ 1
        answered += int((table.positions(keys) >= 0).sum())
    return answered


def _build_time(scene: Scene, report: Report) -> None:
    """Time the search for the pilots of one part, on one thread."""
    hashes = np.sort(_core.index_hashes(scene.keys[: 1 << 18], 0))
    n = len(hashes)
    buckets = -(-n // 3)
    began = time.thread_time_ns()
    if _core.build_index_part(hashes, 0, buckets, buckets, n + n // 99 + 4) is None:
        raise RuntimeError("no index was found")
    report.figures["build, ns a key on one thread"] = (time.thread_time_ns() - began) / n


def drop_pages(path: Path) -> None:
    """Drop the pages of a file, which no process must have mapped, from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def bytes_read() -> int:
    """Bytes that this process had read from disks."""
    (line,) = (x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("read_b"))
    return int(line.split()[1])


def _cold(scene: Scene, rocksdb: RocksDb, random: np.random.Generator, report: Report) -> None:
    """Fetch random keys from files that are not in memory."""
    keys = random.choice(scene.keys, COLD_KEYS, replace=False)
    out, path = aligned(COLD_KEYS, 32), scene.folder / "mapped"
    page = os.sysconf("SC_PAGE_SIZE")
    lines: list[Mapping[str, Any]] = []
    for side in ("pages side by side", "pages as touched", "RocksDB"):
        drop_pages(path)
        for file in rocksdb.path.glob("*.sst"):
            drop_pages(file)
        mapped = scene.open()
        with path.open("rb") as index:  # which a node reads at its start
            index.seek(int(mapped.header.fields["parts"]))
            index.read()
        resident = mapped.resident()
        before, began = bytes_read(), time.perf_counter()
        if side == "RocksDB":
            rocksdb.fetch(keys, out)
        else:
            if side == "pages side by side":
                mapped.table.populate(keys)
            mapped.table.gather(keys, out)
        seconds, read = time.perf_counter() - began, (bytes_read() - before) / page / len(keys)
        lines.append(
            {
                "": side,
                "µs a key": f"{seconds / len(keys) * 1e6:.1f}",
                "pages read a key": f"{read:.2f}",
            }
        )
        if side == "pages side by side" and resident < 0.1:
            report.values["cold_reads"] = read
        del mapped
    report.tables[f"Cold: {COLD_KEYS:,} random keys of {len(scene.keys):,}"] = lines


def _index_alone(rows: int, random: np.random.Generator, report: Report) -> None:
    """Rows of 8 bytes, so that little but the index is read, relative to a random access."""
    numbers, out = numbers_of(rows, "uniform", random), aligned(BATCH, 2)
    array = aligned(rows, 2)
    array[:] = vectors_of(0, rows, 2)
    works: dict[str, Callable[[int], object]] = {
        "random access": lambda b: _core.copy_rows(array, numbers[b], out)
    }
    with tempfile.TemporaryDirectory() as name:
        scene = Scene.make(Path(name) / "dim-2", rows, 2, random)
        keys = scene.keys[numbers]
        mapped = scene.open().table
        works["mapped table"] = lambda b: mapped.gather(keys[b], out)
        for pages in ("try", "off"):
            table = EmbeddingTable.make("t", 2)
            cache = CpuCache({table: rows}, memory=CacheMemory(huge_pages=pages))
            for start in range(0, rows, _CHUNK):
                some = scene.keys[start : start + _CHUNK]
                cache.insert(
                    table, some, array[start : start + _CHUNK], np.ones(len(some), np.uint64)
                )
            works[f"CPU cache, huge pages {pages}"] = partial(
                lambda cache, table, b: cache.gather([(table, keys[b], out)]), cache, table
            )
        sides = {name: partial(cpu_ns, work, BATCHES, BATCH) for name, work in works.items()}
        times = alternate(sides, ROUNDS)
    report.figures["index alone"] = times
    report.tables[f"{rows:,} rows of 8 bytes (NeighborHash publishes 1.11)"] = [
        {
            "": side,
            "ns": f"{Spread.of(found)}",
            "/ random access": f"{ratio(found, times['random access'])}",
        }
        for side, found in times.items()
    ]


BENCHMARK = Benchmark(
    name="mapped",
    title="Mapped tables beside known records and RocksDB",
    run=run,
    bars=BARS,
    measured=("hps/native", "hps/models/mapped_file.py", "hps/tiers/rocksdb"),
    helpers=(*HELPERS, "benchmarks/mapped_nodes.py"),
    arguments={
        "--rows": {"type": int, "metavar": "N", "help": f"rows (default {ROWS:,})"},
        "--large": {
            "type": int,
            "metavar": "N",
            "help": "rows of a larger table, for example 10^8",
        },
        "--folder": {
            "metavar": "PATH",
            "help": "for the files, on a disk (default: the temporary one)",
        },
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
