"""Rows of fewer bytes in the CPU cache and in mapped files, relative to float32 rows and to the peers' bags.

A million rows (``--quick``: 200,000) with any int64 as keys, all in memory; sums of 20 rows (26 × 64 bags),
rows as they are stored, and rows decoded to float32; keys Zipf-distributed with s = 0.85 over rows in random
order; one thread. CPU time per key, ratios by round, their median. Bags of the peers search for no key:
FBGEMM's ``IntNBitTableBatchedEmbeddingBags`` with weights of the same format, and PyTorch's ``EmbeddingBag``
with float32 weights, both as installed (``make bench-peers``).

The bytes of 8- and 4-bit rows are compared with FBGEMM's, and the decoded values too."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import HELPERS, Bar, Benchmark, Options, Report, main
from benchmarks.cpu_scene import cpu_ns
from benchmarks.measure import Spread, alternate, ratio, versions, zipf_keys
from benchmarks.peers.embedding_bags import EmbeddingBags, running
from benchmarks.peers.environments import PeerMissing, require
from hps.models.mapped_file import MappedOptions, write_mapped
from hps.models.tables import open_table
from hps.native import COMPILED, LayeredTable
from hps.native.mapped_format import open_mapped
from hps.row_format import ROW_FORMAT_NAMES, row_format
from hps.tiers.base import Bags
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.stored_rows import to_rows, to_vectors
from hps.types import EmbeddingTable

ROWS, QUICK_ROWS = 1_000_000, 200_000
BAGS, HOTNESS, BATCHES, ROUNDS = 26 * 64, 20, 30, 5
BAG = BAGS * HOTNESS
FORMATS = "float32", "float16", "int8", "int4"
DIMS = (32, 64, 128)

BARS = (
    Bar("pooled_128", "dim 128, sums of 20: keys/s, int8 / float32 rows", at_least=2),
    Bar("raw_128", "dim 128, rows as stored: keys/s, int8 / float32", at_least=2),
    Bar("mapped_128", "dim 128, sums of 20, mapped file: int8 / float32 rows", at_least=2),
    Bar(
        "bag_32", "dim 32, sums of 20: keys/s, int8 rows / PyTorch's bag on row numbers", at_least=1
    ),
    Bar("fbgemm_32", "dim 32, sums of 20: keys/s, int8 rows / FBGEMM's of int8", at_least=1),
    Bar("fbgemm_128", "dim 128, sums of 20: keys/s, int8 rows / FBGEMM's of int8", at_least=1),
    Bar("bytes_int8", "dim 64: bytes of a row, int8 / float32", at_most=0.3),
    Bar("bytes_int4", "dim 64: bytes of a row, int4 / float32", at_most=0.18),
    Bar("same_bytes", "rows of 8 and 4 bits with other bytes or values than FBGEMM's", at_most=0),
)


@dataclass(frozen=True)
class Scene:
    """The same vectors in a cache and a mapped file, as rows of one format."""

    table: EmbeddingTable
    cache: CpuCache
    mapped: Any
    keys: NDArray[np.int64]

    @staticmethod
    def make(folder: Path, name: str, keys: NDArray[np.int64], dim: int) -> Scene:
        table = EmbeddingTable.make(name, dim, rows=name)
        cache = CpuCache({table: len(keys)})
        step = 1 << 16
        for start in range(0, len(keys), step):
            some = keys[start : start + step]
            rows = to_rows(table, vectors_of(start, len(some), dim))
            cache.insert(table, some, rows, np.ones(len(some), np.uint64))
        path = folder / name
        files = open_table(folder, "t", dim, None)
        write_mapped(files, path, MappedOptions(row_format(name)))
        mapped = LayeredTable(open_mapped(path, 1, 1).table, None, 1)
        return Scene(table, cache, mapped, keys)

    def sides(self, numbers: NDArray[np.int64]) -> dict[str, Callable[[], float]]:
        """Measurements over ``numbers (batches, n)`` of rows, which are checked first."""
        keys = self.keys[numbers]
        pooled = np.empty((BAGS, self.table.dim), np.float32)
        stored = np.empty((BAG, self.table.row_width), self.table.row_dtype)
        vectors = np.empty((BAG, self.table.dim), np.float32)

        def pool(batch: int) -> None:
            bags = Bags(self.table, keys[batch], pooled)
            if not self.cache.gather([], [bags]) or bags.missing is not None:
                raise RuntimeError("a row is missing")

        def pool_mapped(batch: int) -> None:
            if self.mapped.pool_bags(keys[batch], None, None, None, pooled) is not None:
                raise RuntimeError("a row is missing")

        def gather(out: NDArray[Any], batch: int) -> None:
            if not self.cache.gather([(self.table, keys[batch], out)]):
                raise RuntimeError("a row is missing")

        works = {
            "sums": pool,
            "mapped sums": pool_mapped,
            "as stored": partial(gather, stored),
            "as float32": partial(gather, vectors),
        }
        self._check(numbers[0], works, pooled, stored, vectors)
        return {
            f"{self.table.name}, {what}": partial(cpu_ns, work, BATCHES, BAG)
            for what, work in works.items()
        }

    def _check(
        self,
        numbers: NDArray[np.int64],
        works: dict[str, Callable[[int], None]],
        pooled: NDArray[Any],
        stored: NDArray[Any],
        vectors: NDArray[Any],
    ) -> None:
        rows = to_rows(self.table, picked(numbers, self.table.dim))
        expected = to_vectors(self.table, rows).reshape(BAGS, HOTNESS, -1)
        sums = expected[:, 0].copy()
        for i in range(1, HOTNESS):
            sums += expected[:, i]
        for what, work in works.items():
            pooled[...] = 0
            work(0)
            if "sums" in what and pooled.tobytes() != sums.tobytes():
                raise RuntimeError(f"{self.table.name}, {what}: other bits than the definition's")
        if stored.tobytes() != rows.tobytes() or vectors.tobytes() != expected.tobytes():
            raise RuntimeError(f"{self.table.name}: other rows")


def vectors_of(start: int, n: int, dim: int) -> NDArray[np.float32]:
    """The vectors of the rows ``start … start + n - 1``."""
    return picked(np.arange(start, start + n), dim)


def picked(numbers: NDArray[np.int64], dim: int) -> NDArray[np.float32]:
    """The vectors (n, dim) of rows by their numbers: values that all rows share, in another order."""
    values = np.random.default_rng(dim).standard_normal(4096).astype(np.float32)
    return values[(numbers[:, None] * 37 + np.arange(dim)) % 4096]


def run(options: Options) -> Report:
    if not COMPILED:
        raise SystemExit("the benchmark needs the native core; make setup builds it")
    count = QUICK_ROWS if options.quick else ROWS
    report = Report(figures={"versions": versions("numpy")})
    report.values |= {
        f"bytes_{name}": row_format(name).row_bytes(64) / row_format("float32").row_bytes(64)
        for name in ("int8", "int4")
    }
    random = np.random.default_rng(options.seed)
    with ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        bags = None
        try:
            python = require("fbgemm").python
        except PeerMissing as missing:
            report.notes.append(str(missing))
        else:
            bags = resources.enter_context(running(python, folder, huge_pages=False))
        for dim in DIMS:
            _one_dim(folder, dim, count, random, bags, report)
    report.tables["bytes of a row"] = [
        {"dim": dim} | {name: row_format(name).row_bytes(dim) for name in ROW_FORMAT_NAMES}
        for dim in DIMS
    ]
    return report


def _one_dim(
    folder: Path,
    dim: int,
    count: int,
    random: np.random.Generator,
    bags: EmbeddingBags | None,
    report: Report,
) -> None:
    keys = random.integers(-(2**63), 2**63 - 1, count)
    keys.tofile(folder / "key")
    vectors = vectors_of(0, count, dim)
    vectors.tofile(folder / "emb_vector")
    scenes = {name: Scene.make(folder, name, keys, dim) for name in FORMATS}
    numbers = zipf_keys(random, count, (BATCHES, BAG))
    sides = {name: side for scene in scenes.values() for name, side in scene.sides(numbers).items()}
    if bags is not None:
        found = bags.formats(folder / "emb_vector", dim)
        bags.keys(numbers, HOTNESS)
        sides |= {name: partial(bags.time, name) for name in ("embedding_bag", *found)}
        report.values["same_bytes"] = report.values.get("same_bytes", 0) + sum(
            _differing(scenes[name].table, vectors, folder / f"{name}.npy")
            for name in ("int8", "int4")
        )
    took = alternate(sides, ROUNDS)
    report.figures[f"dim {dim}"] = took
    whats = ("sums", "mapped sums", "as stored", "as float32")
    lines = [
        {"": name} | {what: f"{Spread.of(took[f'{name}, {what}']):.1f}" for what in whats}
        for name in FORMATS
    ]
    peers = [name for name in took if "," not in name]
    lines += [{"": name, "sums": f"{Spread.of(took[name]):.1f}"} for name in peers]
    report.tables[f"{count:,} rows of dim {dim}: ns of CPU per key"] = lines

    def faster(one: str, other: str) -> float:
        return ratio(took[other], took[one]).median

    if dim == 128:
        report.values["pooled_128"] = faster("int8, sums", "float32, sums")
        report.values["raw_128"] = faster("int8, as stored", "float32, as stored")
        report.values["mapped_128"] = faster("int8, mapped sums", "float32, mapped sums")
    if peers and dim == 32:
        report.values["bag_32"] = faster("int8, sums", "embedding_bag")
    if peers and dim in (32, 128):
        report.values[f"fbgemm_{dim}"] = faster("int8, sums", "fbgemm_int8")


def _differing(table: EmbeddingTable, vectors: NDArray[np.float32], path: Path) -> int:
    """The rows whose bytes, or decoded values, are not those that FBGEMM left in ``path``."""
    theirs, values = np.load(path), np.load(path.with_suffix(".values.npy"))
    some = vectors[: len(theirs)]
    ours = to_rows(table, some)
    other = (ours != theirs).any(axis=1) | (to_vectors(table, theirs) != values).any(axis=1)
    return int(np.count_nonzero(other))


BENCHMARK = Benchmark(
    name="cpu_rows",
    title="Rows of fewer bytes on the host",
    run=run,
    bars=BARS,
    measured=("hps",),
    helpers=(*HELPERS, "benchmarks/cpu_scene.py", "benchmarks/peers/embedding_bags.py"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
