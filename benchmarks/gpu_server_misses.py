"""Predictions of a server whose GPU holds a share of the rows: the others are in the CPU cache."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.gpu_server_cells import Bench, Target
from benchmarks.gpu_server_scene import Reference, Scene

SHARES = (1.0, 0.95, 0.7)
"""Shares of each table's rows on the GPU; keys are uniform, so the rest are missing."""
MISS_CALLERS = (8, 64)
_KEYS = re.compile(r"^hps_tier_keys_total\{(.*)\} (\S+)$")

ServerOf = Callable[[float], AbstractContextManager[Target]]
"""Starts a server with a share of the rows on the GPU."""


def measure_misses(bench: Bench, scene: Scene, server_of: ServerOf) -> None:
    """REST predictions per share; ``missing`` is the share of keys of a cell that the GPU missed."""
    rows: list[dict[str, Any]] = []
    reference = Reference(scene)
    resident: dict[tuple[int, int], float] = {}  # of the first share, with every row on the GPU
    for share in SHARES:
        with server_of(share) as target:
            for batch in bench.extent.batches:
                for callers in MISS_CALLERS:
                    template = scene.template("rest", batch)
                    before = _counted(target)
                    measured = bench.measure(target, "rest", template, callers)
                    found, missed = (
                        now - then for now, then in zip(_counted(target), before, strict=True)
                    )
                    title = f"{share:.0%} of the rows on the GPU, batch {batch}, {callers} callers"
                    bench.check(title, template, measured.load, reference)
                    row = {"rows on the GPU": share, "batch": batch, "callers": callers}
                    row["missing"] = missed / ((found + missed) or 1.0)
                    rate = measured.load.per_second
                    full = resident.setdefault((batch, callers), rate)
                    rows.append(row | measured.row() | {"of all resident": rate / (full or 1.0)})
    bench.report.tables["REST predictions with rows missing on the GPU"] = rows


def _counted(target: Target) -> tuple[float, float]:
    """Keys that the GPU cache found and missed until now."""
    with urllib.request.urlopen(f"http://{target.admin}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return tier_keys(text)


def tier_keys(text: str) -> tuple[float, float]:
    """Return the keys that the GPU cache found and missed, from the text of metrics."""
    found = missed = 0.0
    for line in text.splitlines():
        match = _KEYS.match(line)
        if match and 'tier="gpu"' in match[1]:
            found += float(match[2]) if 'result="found"' in match[1] else 0.0
            missed += float(match[2]) if 'result="missed"' in match[1] else 0.0
    return found, missed
