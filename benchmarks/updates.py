"""Streamed rows a second that a node applies: decoding, the version check, RocksDB, the CPU cache.

A table of 10 million rows of dim 32 in RocksDB, a tenth of it in the CPU cache. Native messages of 1,000 rows
with random keys of the table, some of them older than the stored rows, are decoded and applied as the
ingestor of a node does, 8,000 rows a poll; Kafka itself is left out.

* the peer: a C++ program that sorts the same rows, reads the stored rows by `MultiGet`, compares versions,
  and writes by a `WriteBatch` through the log, over a copy of the same database with the same options. It
  decodes nothing and has no cache; it alternates with ours. It reads the version of every row, ours only
  where a row is older than its bucket's high-water mark (`hps/tiers/rocksdb/high_water.py`). It is built
  against Debian's librocksdb; without it the bar counts as unmeasured.

The bars judge rows per second of CPU time, over all threads of the process, with flushes and compactions, on
both sides, and rows per second of wall time. A table has our CPU time by part: each part alone, over the same
rows.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.measure import Spread, alternate, ratio, versions
from benchmarks.peers.environments import PeerMissing
from benchmarks.peers.rocksdb import Updates
from hps.observability.meters import UpdateMeter
from hps.observability.metrics import Metrics
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.rocksdb import LoadRecord, RocksDbTier
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray, make_version
from hps.updates.cache_writer import CacheWriter, PromotionSources
from hps.updates.codec import MessageAttributes, decode_native, encode_native
from hps.updates.ingestor import Ingestor
from hps.updates.source import UpdateBatch
from hps.updates.stream_positions import FedStore, StoreStreamPositions
from hps.updates.topics import TopicTables, table_name

ROWS, QUICK_ROWS = 10_000_000, 300_000
DIM = 32
UPDATES, QUICK_UPDATES = 400_000, 80_000
ROUNDS, QUICK_ROUNDS = 5, 3
MESSAGE, POLL = 1_000, 8_000
_MADE_MS = 1_700_000_000_000
_CHUNK = 1 << 16

_WORK = "decode + version check + RocksDB + cache"
BARS = (
    Bar("rows", f"{_WORK}: rows/s of CPU, ours / C++", at_least=0.7),
    Bar("wall", f"{_WORK}: rows/s, ours / C++", at_least=0.7),
)


@dataclass(frozen=True)
class Round:
    """The same rows as messages and as a file of the peer's records."""

    keys: KeyArray
    vectors: VectorArray
    stamps: VersionArray
    messages: list[bytes]
    file: Path


class UpdatePath:
    """The parts of a node that apply updates to one database: ingestor, store, cache and its writer."""

    def __init__(self, path: Path, table: EmbeddingTable, resident: KeyArray) -> None:
        self.table = table
        with ExitStack() as stack:
            self.store = RocksDbTier(path)
            stack.callback(self.store.close)
            self.cache = CpuCache({table: 2 * len(resident)})
            stack.callback(self.cache.close)
            rows = np.zeros((len(resident), table.dim), np.float32)
            self.cache.insert(table, resident, rows, np.ones(len(resident), np.uint64))
            writer = CacheWriter(self.cache, PromotionSources([self.store]), 1)
            stack.callback(writer.close)
            topics = TopicTables([table], lambda _model: True)
            self.ingestor = Ingestor(
                _Nothing(), topics.tables, StoreStreamPositions([FedStore("rocksdb", self.store)],
                topics.readers), writer, _Nothing(), UpdateMeter(Metrics()),
            )  # fmt: skip
            self._offset = 0
            self._resources = stack.pop_all()

    def apply(self, messages: list[bytes]) -> None:
        """Apply the messages of one poll."""
        self._offset += len(messages)
        position = StreamPosition("t", 0, self._offset)
        self.ingestor.apply(UpdateBatch(decode_native(messages).updates, [position]))

    def close(self) -> None:
        self._resources.close()


class _Nothing:
    """An empty update source, and an unused store of dead letters."""

    def poll(self, timeout_s: float) -> None: ...
    def commit(self, batch: UpdateBatch) -> None: ...
    def keep_alive(self) -> None: ...
    def rewind(self) -> None: ...
    def close(self) -> None: ...
    def keep(self, letters: Any) -> Any: ...
    def report(self) -> None: ...


def run(options: Options) -> Report:
    report = Report(figures={"versions": versions("numpy", "rocksdict")})
    rows = QUICK_ROWS if options.quick else ROWS
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        table = EmbeddingTable.make("t", DIM)
        keys = _load(folder / "ours", table, rows, options.seed)
        drawn = list(_rounds(folder, table, keys, options))
        sides: dict[str, Callable[[Round], tuple[float, float]]] = {}
        _read_once(folder)
        try:
            peer = stack.enter_context(Updates(folder / "theirs", table.id, 9 + 4 * DIM))
            sides["C++"] = lambda each: peer.run(each.file, POLL)[1:]
        except PeerMissing as error:
            print(f"C++ peer: {error}", file=sys.stderr)
        node = UpdatePath(folder / "ours", table, np.ascontiguousarray(keys[::10]))
        stack.callback(node.close)
        sides["ours"] = lambda each: _timed(lambda: _ours(node, each))
        turns = {side: iter(drawn) for side in sides}
        calls = {side: lambda s=side, f=call: f(next(turns[s])) for side, call in sides.items()}
        times = alternate(calls, len(drawn))  # type: ignore[arg-type] # bound now
        _report_rates(times, len(drawn[0].keys), report)
        report.tables["Our parts, µs of CPU a row"] = [_parts(node, drawn[-1])]
    if options.quick:
        report.notes.append(f"--quick: {QUICK_ROWS:,} rows.")
    return report


def _report_rates(times: dict[str, list[tuple[float, float]]], rows: int, report: Report) -> None:
    lines, cpu = [], {side: [c for c, _ in found[1:]] for side, found in times.items()}
    for side, found in times.items():
        lines.append(
            {
                "": side,
                "thousand rows/s of CPU": f"{Spread.of([rows / s / 1e3 for s in cpu[side]])}",
                "thousand rows/s": f"{Spread.of([rows / w / 1e3 for _, w in found[1:]])}",
            }
        )
    if "C++" in cpu:
        wall = {side: [w for _, w in found[1:]] for side, found in times.items()}
        for name, spent in (("rows", cpu), ("wall", wall)):
            of = ratio(spent["C++"], spent["ours"])
            report.values[name] = of.median
            report.notes.append(f"{name}: ours / C++ {of}")
    report.tables[f"{rows:,} updates a round, {POLL:,} a poll"] = lines
    report.figures["seconds"] = times


def _load(path: Path, table: EmbeddingTable, rows: int, seed: int) -> KeyArray:
    """Load ``rows`` rows into a new database, copy it to the folder ``theirs``; returns the keys."""
    random = np.random.default_rng(seed)
    keys = np.unique(random.integers(-(2**63), 2**63 - 1, rows))
    vectors = random.random((_CHUNK, table.dim), np.float32)
    store = RocksDbTier(path)
    try:
        codes = np.sort(store.codes(table, keys))
        chunks = (
            (codes[i : i + _CHUNK], vectors[: len(codes[i : i + _CHUNK])])
            for i in range(0, len(codes), _CHUNK)
        )
        store.bulk_load(table, chunks, LoadRecord("benchmark", len(keys)))
        store.checkpoint(path.parent / "theirs")
    finally:
        store.close()
    return random.permutation(keys)


def _read_once(folder: Path) -> None:
    """Read the table's files, which both sides share, into the operating system's page cache."""
    for file in (folder / "theirs").glob("*.sst"):
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass


def _rounds(
    folder: Path, table: EmbeddingTable, keys: KeyArray, options: Options
) -> Iterator[Round]:
    """Rounds of updates, one more than is judged: the first warms up."""
    random = np.random.default_rng(options.seed)
    count = QUICK_UPDATES if options.quick else UPDATES
    record = np.dtype([("key", ">u8"), ("version", "<u8"), ("flags", "u1"), ("row", "<f4", DIM)])
    nothing = (np.empty(0, np.int64), np.empty(0, np.uint64))
    for turn in range((QUICK_ROUNDS if options.quick else ROUNDS) + 1):
        chosen = keys[random.integers(0, len(keys), count)]
        vectors = random.random((count, DIM), np.float32)
        # Versions of successive rounds overlap by half, so that some updates are older than the stored rows.
        stamps = np.uint64(make_version(_MADE_MS + turn)) + random.integers(
            0, 2 << 20, count
        ).astype(np.uint64)
        messages = []
        for at in range(0, count, MESSAGE):
            part = slice(at, at + MESSAGE)
            changes = TableChanges(chosen[part], vectors[part], stamps[part], *nothing)
            messages += encode_native(
                table_name(table), changes, MessageAttributes(_MADE_MS), full=1 << 20
            )
        records = np.zeros(count, record)
        records["key"] = chosen.view(np.uint64) ^ np.uint64(1 << 63)
        records["version"], records["row"] = stamps, vectors
        file = folder / f"{turn}.updates"
        records.tofile(file)
        yield Round(chosen, vectors, stamps, messages, file)


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.monotonic()
    call()
    return time.process_time() - cpu, time.monotonic() - wall


def _ours(node: UpdatePath, each: Round) -> None:
    step = POLL // MESSAGE
    for at in range(0, len(each.messages), step):
        node.apply(each.messages[at : at + step])


def _parts(node: UpdatePath, each: Round) -> dict[str, float]:
    """CPU µs a row of each part alone; rows that are all too old show the cost of reading from RocksDB."""
    store, table, count = node.store, node.table, len(each.keys)
    step = POLL // MESSAGE
    newer = each.stamps + np.uint64(make_version(1))
    calls: dict[str, Callable[[slice], object]] = {
        "read versions": lambda p: store.insert(
            table, each.keys[p], each.vectors[p], np.ones(len(each.keys[p]), np.uint64)
        ),
        "read and write": lambda p: store.insert(table, each.keys[p], each.vectors[p], newer[p]),
        "cache": lambda p: node.cache.update(table, each.keys[p], each.vectors[p], newer[p]),
    }
    found: dict[str, float] = {}

    def decode() -> None:
        for at in range(0, len(each.messages), step):
            decode_native(each.messages[at : at + step])

    found["decode"] = 1e6 * _timed(decode)[0] / count
    for name, call in calls.items():

        def work(call: Callable[[slice], object] = call) -> None:
            for at in range(0, count, POLL):
                call(slice(at, at + POLL))

        found[name] = 1e6 * _timed(work)[0] / count
    return found


BENCHMARK = Benchmark(
    name="updates",
    title="Streamed rows a second into RocksDB and the CPU cache",
    run=run,
    bars=BARS,
    measured=("hps/native", "hps/tiers/rocksdb", "hps/tiers/cpu/cache.py", "hps/updates"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
