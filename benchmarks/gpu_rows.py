"""Narrow rows in the GPU cache: sums, fetches and decoding fetches, against gathers by known row numbers.

Every table has all of its rows resident, as a node plans it if it fits. The keys of each call are fresh and
random. Reads are timed by CUDA events around the product's own launch, as in `benchmarks/gpu_cache.py`.
*Pooled* is sums of 20 rows in float32, *raw* a fetch of rows as they are stored, *decoded* a fetch of float32
vectors. Two floors are sought among many shapes in the same run: the gather of float32 rows, and the gather
that decodes the same narrow rows (``gpu_rows.cu``). Results are compared with the host's to the bit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.gpu import AMPLE, CALL, NOW, DeviceClock, FilledTable
from benchmarks.measure import versions
from hps.cuda.loader import KernelStruct, cupy, missing_requirement, options
from hps.lookup.pooling import pool
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.plan import GpuTableRequest, plan_gpu
from hps.tiers.stored_rows import to_vectors
from hps.types import EmbeddingTable, JaggedKeys

ROWS, QUICK_ROWS = 4 << 20, 1 << 20
HOTNESS = 20
DIMS = 64, 128
FORMATS = "float32", "float16", "int8", "int4"
CHECKED = 1 << 16
"""Keys whose rows are compared with the host's."""
PAYLOAD = {"int8": 0.3, "int4": 0.18}
NARROW = {("int8", 128): 2.5, ("int8", 64): 1.5, ("float16", 128): 1.7}
SOURCE = Path(__file__).with_suffix(".cu")
ARGS = np.dtype(
    [
        *((name, np.uint64) for name in ("rows", "numbers", "out")),
        *((name, np.uint32) for name in ("n", "stride")),
    ]
)
SHAPES = [(rows, block) for rows in (1, 2, 4, 8, 16) for block in (128, 256, 512)]

BARS = (
    *(
        Bar(
            f"{what}_{rows}_{dim}",
            f"{text}, {rows}, dim {dim} / gather of float32 rows",
            at_least=ratio,
        )
        for (rows, dim), ratio in NARROW.items()
        for what, text in [("pooled", "sums of 20"), ("raw", "rows as they are stored")]
    ),
    *(
        Bar(
            f"decoded_{rows}_{dim}",
            f"float32 vectors / decoding gather, {rows}, dim {dim}",
            at_least=0.9,
        )
        for rows in FORMATS[1:]
        for dim in DIMS
    ),
    *(
        Bar(f"payload_{rows}_{dim}", f"bytes of a row, {rows}, dim {dim} / float32", at_most=most)
        for rows, most in PAYLOAD.items()
        for dim in DIMS
    ),
    Bar("wrong", "vectors and rows that differ from the host's", at_most=0),
)


@dataclass
class NarrowTable:
    """A cache of one table with the keys from 0 to ``held - 1``; ``rows`` are those of the first ones."""

    cache: GpuCache
    table: EmbeddingTable
    held: int
    rows: Any
    clock: DeviceClock

    @staticmethod
    def make(dim: int, row_format: str, held: int) -> NarrowTable:
        table = EmbeddingTable.make("bench", dim, rows=row_format)
        cache, cp, first = GpuCache({}), cupy(), None
        plan = plan_gpu({table: GpuTableRequest(held)}, capacity_bytes=AMPLE)[table]
        cache.add_table(table, plan.rows, load=plan.load)
        for start in range(0, held, CALL):
            keys = cp.arange(start, min(start + CALL, held))
            rows = random_rows(table, len(keys))
            first = rows[:CHECKED].get() if first is None else first
            cache.insert(table, keys, rows, cp.full(len(keys), NOW, np.uint64))
        filled = NarrowTable(cache, table, held, first, DeviceClock())
        filled.settle()
        return filled

    def keys(self, n: int) -> Any:
        return cupy().random.randint(0, self.held, n, np.int64)

    def settle(self) -> None:
        """Give every row the current stamp."""
        cp = cupy()
        out, misses = self._rows(CALL), cp.zeros(4 + CALL, np.uint32)
        for start in range(0, self.held, CALL):
            keys = cp.arange(start, min(start + CALL, self.held))
            self.cache.direct.fetch(self.cache.held(self.table), keys, out, misses)
        cp.cuda.get_current_stream().synchronize()

    def raw_time(self) -> float:
        """Seconds of a fetch of `CALL` rows as they are stored."""
        cp, held = cupy(), self.cache.held(self.table)
        out, misses = self._rows(CALL), cp.zeros(4 + CALL, np.uint32)

        def prepare() -> Any:
            misses[:4] = 0
            return self.keys(CALL)

        return self.clock.median(
            prepare, lambda keys: self.cache.direct.fetch(held, keys, out, misses)
        )

    def pooled_time(self, hotness: int) -> float:
        """Seconds of a pooling of all keys of a call, ``hotness`` a bag."""
        stream, n = cupy().cuda.get_current_stream(), CALL // hotness * hotness
        prepared, _ = self._pooling(n, hotness)
        return self.clock.median(
            partial(self.keys, n), lambda keys: prepared.launch(stream, {0: keys.data.ptr})
        )

    def gather_time(self) -> tuple[float, tuple[int, int]]:
        """Seconds of the fastest decoding gather by row numbers, and its shape."""
        cp, held, dim = cupy(), self.cache.held(self.table), self.table.dim
        code = self.table.row_format.code
        names = {shape: f"decode<{code}, {dim}, {shape[0]}, {shape[1]}>" for shape in SHAPES}
        module = cp.RawModule(
            code=SOURCE.read_text(),
            options=tuple(options()),
            name_expressions=tuple(names.values()),
            backend="nvrtc",
        )
        out, args = cp.empty((CALL, dim), np.float32), KernelStruct(ARGS)
        args["rows"], args["out"], args["stride"] = (
            held.pointers[1],
            out.data.ptr,
            held.shape.stride,
        )
        stream = cp.cuda.get_current_stream()

        def launch(function: Any, blocks: int, block: int, numbers: Any) -> None:
            args["numbers"], args["n"] = numbers.data.ptr, len(numbers)
            cp.cuda.driver.launchKernel(
                *(function.kernel.ptr, blocks, 1, 1, block, 1, 1, 0), *(stream.ptr, args.at, 0)
            )

        times = []
        for (rows, block), name in names.items():
            blocks = -(-CALL // (block * 4 // dim * rows))
            work = partial(launch, module.get_function(name), blocks, block)
            times.append((self.clock.median(self._numbers, work), (rows, block)))
        return min(times)

    def wrong(self) -> int:
        """Return how many rows and vectors differ from the host's."""
        cp, n = cupy(), CHECKED // HOTNESS * HOTNESS
        keys = cp.random.randint(0, len(self.rows), n, np.int64)
        out, misses = self._rows(n), cp.zeros(4 + n, np.uint32)
        self.cache.direct.fetch(self.cache.held(self.table), keys, out, misses)
        stored = self.rows[keys.get()]
        wrong = int((out.get().view(np.uint8) != stored.view(np.uint8)).sum()) + int(misses[0])
        vectors = to_vectors(self.table, stored, dtype=np.float32)
        for hotness in (1, 3, HOTNESS):
            some = n // hotness * hotness
            prepared, pooled = self._pooling(some, hotness)
            stream = cp.cuda.get_current_stream()
            prepared.launch(stream, {0: keys.data.ptr})
            stream.synchronize()
            bags = JaggedKeys(np.zeros(some, np.int64), some // hotness)
            expected = vectors[:some] if hotness == 1 else pool(vectors[:some], bags, "sum")
            wrong += int((pooled.get().view(np.uint32) != expected.view(np.uint32)).sum())
            wrong += prepared.missing()
        return wrong

    def close(self) -> None:
        self.cache.close()
        cupy().get_default_memory_pool().free_all_blocks()
        cupy().get_default_pinned_memory_pool().free_all_blocks()

    def _rows(self, n: int) -> Any:
        return cupy().empty((n, self.table.row_width), self.table.row_dtype)

    def _numbers(self) -> Any:
        return cupy().random.randint(0, self.held, CALL, np.uint32)

    def _pooling(self, n: int, hotness: int) -> tuple[Any, Any]:
        out = cupy().empty((n // hotness, self.table.dim), np.float32)
        return self.cache.prepare([(self.table, n, hotness, "sum", out)]), out


def random_rows(table: EmbeddingTable, n: int) -> Any:
    """Return ``(n, row_width)`` on the device; scaled formats have random codes."""
    cp = cupy()
    if table.row_format.is_plain:
        return cp.random.random((n, table.dim), np.float32).astype(table.row_dtype)
    rows = cp.random.randint(0, 256, (n, table.row_width), np.uint8)
    scales = cp.random.random((n, 2), np.float32).astype(np.float16)
    rows[:, -4:] = scales.view(np.uint8)
    return rows


def rate(seconds: float) -> float:
    return CALL / seconds / 1e9


def measure(report: Report, dim: int, held: int) -> None:
    plain = FilledTable.planned(dim, held)
    plain.settle()
    seconds, shape = plain.floor_time(CALL)
    plain.close()
    floor, rows = rate(seconds), []
    report.figures[f"float32 gather, dim {dim}, B rows/s"] = floor
    report.figures[f"its threads x rows, dim {dim}"] = f"{shape.threads} x {shape.rows}"
    for row_format in FORMATS:
        narrow = NarrowTable.make(dim, row_format, held)
        report.values["wrong"] = report.values.get("wrong", 0) + narrow.wrong()
        pooled, raw = rate(narrow.pooled_time(HOTNESS)), rate(narrow.raw_time())
        decoded = rate(narrow.pooled_time(1))
        took, shape_of_gather = narrow.gather_time()
        gathered = rate(took)
        name, size = f"{row_format}_{dim}", narrow.table.row_bytes
        narrow.close()
        measured = {"pooled": pooled / floor, "raw": raw / floor, "decoded": decoded / gathered}
        measured["payload"] = size / (4 * dim)
        judged = {f"{what}_{name}": value for what, value in measured.items()}
        report.values |= {bar.name: judged[bar.name] for bar in BARS if bar.name in judged}
        rows.append(
            {
                "rows": row_format,
                "bytes": size,
                "pooled B/s": pooled,
                "/ floor": pooled / floor,
                "raw B/s": raw,
                "raw / floor": raw / floor,
                "decoded B/s": decoded,
                "decoding gather B/s": gathered,
                "decoded / gather": decoded / gathered,
                "gather's rows x block": f"{shape_of_gather[0]} x {shape_of_gather[1]}",
            }
        )
    report.tables[
        f"dim {dim}, {CALL:,} keys, {held >> 20} M rows, float32 gather {floor:.2f} B/s"
    ] = rows


def run(options: Options) -> Report:
    cp = cupy()
    cp.random.seed(options.seed)
    report = Report()
    report.figures["device"] = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    report.figures["versions"] = versions("numpy", "cupy-cuda12x", "cupy-cuda13x")
    for dim in DIMS:
        measure(report, dim, QUICK_ROWS if options.quick else ROWS)
    return report


BENCHMARK = Benchmark(
    name="gpu_rows",
    title="Narrow rows in the GPU cache against gathers by row number",
    run=run,
    bars=BARS,
    measured=("hps/cuda", "hps/tiers/gpu"),
    helpers=(
        *("benchmarks/common.py", "benchmarks/measure.py", "benchmarks/gpu.py"),
        *("benchmarks/gpu_gather.py", "benchmarks/gpu_gather.cu", "benchmarks/gpu_rows.cu"),
    ),
    missing_requirement=missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
