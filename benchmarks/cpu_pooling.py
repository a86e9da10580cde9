"""Sums of rows, and two threads, against embedding bags on dense row numbers; part of `cpu_cache`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Bar, Report
from benchmarks.cpu_scene import Scene, aligned, cpu_ns, rounds
from benchmarks.measure import Spread, alternate, ratio, zipf_keys
from benchmarks.peers.embedding_bags import EmbeddingBags, running
from benchmarks.peers.environments import PeerMissing, require
from hps.tiers.base import Bags

HUGE = ", huge pages"
SIDES = ("embedding_bag", "fbgemm")
BAGS = 26 * 64  # of 20 keys; of one key there are 16 times as many

POOLING_BARS = tuple(
    Bar(
        f"bag_{hotness}_{dim}",
        f"dim {dim}, sums of {hotness}, Zipf 0.85: PyTorch's bag on row numbers / hps",
        at_least=least,
    )
    for dim in (32, 128)
    for hotness, least in ((1, 0.6), (20, 0.75))
)


class Peers:
    """FBGEMM's and PyTorch's bags as they are installed, and with huge pages: a process each."""

    def __init__(self, installed: EmbeddingBags, huge: EmbeddingBags) -> None:
        self._processes = {"": installed, HUGE: huge}

    def table(self, rows: int, dim: int) -> None:
        for each in self._processes.values():
            each.table(rows, dim)

    def sides(
        self,
        names: Sequence[str],
        numbers: NDArray[np.int64],
        hotness: int,
        total: float,
        threads: int = 1,
    ) -> dict[str, Callable[[], float]]:
        """Measurements over ``numbers (batches, n)`` of rows.

        Raises RuntimeError unless every side's result for the first batch adds up to ``total``."""
        sides: dict[str, Callable[[], float]] = {}
        for pages, each in self._processes.items():
            sums = each.keys(numbers, hotness)
            for name in names:
                if sums[name] != total:
                    raise RuntimeError(f"{name}{pages} has other rows")
                sides[name + pages] = partial(each.time, name, threads)
        return sides


@contextmanager
def peers(report: Report) -> Iterator[Peers | None]:
    """Start the peers; yields None, and adds a note, if they are not set up."""
    try:
        python = require("fbgemm").python
    except PeerMissing as missing:
        report.notes.append(str(missing))
        yield None
        return
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        running(python, Path(one), huge_pages=False) as installed,
        running(python, Path(other), huge_pages=True) as huge,
    ):
        yield Peers(installed, huge)


def compare_pooling(
    scene: Scene,
    report: Report,
    random: np.random.Generator,
    bags: Peers | None,
    *,
    quick: bool,
) -> None:
    """Time per key of fused sums of one row and of 20, for all distributions."""
    dim, count = scene.table.dim, len(scene.keys)
    rows = []
    spreads: tuple[float, ...] = (0.85,) if quick else (0.85, 1.05, 0.0)
    for s in spreads:
        for hotness in (1, 20):
            n = BAGS * 16 if hotness == 1 else BAGS * hotness
            numbers = zipf_keys(random, count, ((500_000 if quick else 3_000_000) // n, n), s)
            took = alternate(_sides(scene, numbers, hotness, bags), rounds(s, quick=quick))
            row = {"bags": f"{n // hotness:,} of {hotness}", "Zipf s": s or "uniform"}
            row |= {name: f"{Spread.of(times):.1f}" for name, times in took.items()}
            if bags is not None:
                over = ratio(took["embedding_bag"], took["hps"])
                row["bag / hps"] = f"{over:.2f}"
                row["bag / hps" + HUGE] = f"{ratio(took['embedding_bag' + HUGE], took['hps']):.2f}"
                if s == 0.85:
                    report.values[f"bag_{hotness}_{dim}"] = over.median
            rows.append(row)
            report.figures[f"pooled, dim {dim}, hotness {hotness}, s={s}"] = took
    report.tables[f"{count:,} rows, dim {dim}, sums: ns of CPU per key"] = rows


def _sides(
    scene: Scene, numbers: NDArray[np.int64], hotness: int, bags: Peers | None
) -> dict[str, Callable[[], float]]:
    batches, n = numbers.shape
    keys = scene.keys[numbers]
    out = aligned(n // hotness, scene.table.dim)

    def hps(batch: int) -> None:
        ours = Bags(scene.table, keys[batch], out)
        if not scene.cache.gather([], [ours]) or ours.missing is not None:
            raise RuntimeError("a row is missing")

    hps(0)
    sides = {"hps": partial(cpu_ns, hps, batches, n)}
    if bags is not None:
        sides |= bags.sides(SIDES, numbers, hotness, out.astype(np.float64).sum())
    return sides


def compare_threads(report: Report, random: np.random.Generator) -> None:
    """Two threads: wall time per key, 26 × 1,024 keys, dim 32, Zipf 0.85, rows and sums of 20."""
    if len(os.sched_getaffinity(0)) < 2:
        report.notes.append("One core: two threads were not measured.")
        return
    scene = Scene.make(5_000_000, 32, random, threads=2)
    with peers(report) as bags:
        if bags is not None:
            bags.table(len(scene.keys), 32)
        report.tables["dim 32, two threads: ns of wall time per key"] = [
            _threads(scene, report, random, bags, hotness) for hotness in (1, 20)
        ]


def _threads(
    scene: Scene,
    report: Report,
    random: np.random.Generator,
    bags: Peers | None,
    hotness: int,
) -> dict[str, str]:
    n = BAGS * 16 if hotness == 1 else BAGS * hotness
    numbers = zipf_keys(random, len(scene.keys), (4_000_000 // n, n))
    batches, out = scene.keys[numbers], aligned(n // hotness, 32)

    def read(keys: NDArray[np.int64]) -> None:
        if hotness == 1:
            scene.cache.gather([(scene.table, keys, out)])
        else:
            scene.cache.gather([], [Bags(scene.table, keys, out)])

    def hps() -> float:
        start = time.perf_counter_ns()
        for keys in batches:
            read(keys)
        return (time.perf_counter_ns() - start) / batches.size

    sides: dict[str, Callable[[], float]] = {"hps": hps}
    if bags is not None:
        read(batches[0])
        sides |= bags.sides(SIDES, numbers, hotness, out.astype(np.float64).sum(), threads=2)
    took = alternate(sides, 5)
    report.figures[f"two threads, hotness {hotness}"] = took
    return {"": "rows" if hotness == 1 else "sums of 20"} | {
        name: f"{Spread.of(times):.1f}" for name, times in took.items()
    }
