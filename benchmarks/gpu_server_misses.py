"""Predictions of a server whose GPU holds a share of the rows: the others are in the CPU cache."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.gpu_server_cells import Bench, Target
from benchmarks.gpu_server_scene import Reference, Scene
from benchmarks.gpu_serving import NAMES

CASES = ((1.0, 0), (0.95, 0), (0.7, 0), (0.3, 3))
"""Shares of each table's rows on the GPU, and the keys' skew; uniform keys miss the rest of the rows."""
MISS_CALLERS = (8, 64)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_MISSED = (("tier", "gpu"), ("result", "missed"))

ServerOf = Callable[[float], AbstractContextManager[Target]]
"""Starts a server with a share of the rows on the GPU."""


def measure_misses(bench: Bench, scene: Scene, server_of: ServerOf) -> None:
    """REST predictions per share; ``missing``: the share of keys that the GPU missed."""
    rows: list[dict[str, Any]] = []
    reference = Reference(scene)
    resident: dict[tuple[int, int], float] = {}  # of the first case, with every row on the GPU
    for share, skew in CASES:
        with server_of(share) as target:
            for batch in bench.extent.batches:
                for callers in MISS_CALLERS:
                    template = scene.template("rest", batch, skew=skew)
                    before = _counted(target)
                    measured = bench.measure(target, "rest", template, callers)
                    missed, samples = (
                        now - then for now, then in zip(_counted(target), before, strict=True)
                    )
                    title = f"{share:.0%} of the rows on the GPU, batch {batch}, {callers} callers"
                    bench.check(title, template, measured.load, reference)
                    row: dict[str, Any] = {"rows on the GPU": share, "skew": skew, "batch": batch}
                    row["callers"], row["missing"] = (
                        callers,
                        missed / ((samples * len(NAMES)) or 1.0),
                    )
                    rate = measured.load.per_second
                    full = resident.setdefault((batch, callers), rate)
                    rows.append(row | measured.row() | {"of all resident": rate / (full or 1.0)})
    bench.report.tables["REST predictions with rows missing on the GPU"] = rows


def _counted(target: Target) -> tuple[float, float]:
    """Keys that the GPU cache missed until now, and samples."""
    with urllib.request.urlopen(f"http://{target.admin}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return missed_and_samples(text)


def missed_and_samples(text: str) -> tuple[float, float]:
    """Return the keys that the GPU cache missed, and the samples of all batches, from the text of metrics."""
    missed = samples = 0.0
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("hps_scheduler_samples_total"):
            samples += float(value)
        elif name.startswith("hps_tier_keys_total") and {*_MISSED} <= {*_LABEL.findall(name)}:
            missed += float(value)
    return missed, samples
