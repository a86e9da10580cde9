"""Alternating runs, their spread and ratios, and a description of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of several runs."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        spec = spec or ".3g"
        return f"{self.median:{spec}} ({self.low:{spec}}…{self.high:{spec}})"


def alternate(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every side once per round; the order rotates, so that no side is always first."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(sides[name]())
    return results


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours / theirs round by round: a disturbance of a whole round cancels out."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def zipf_keys(
    random: np.random.Generator, rows: int, shape: tuple[int, ...], s: float = 0.85
) -> NDArray[np.int64]:
    """Keys ``0 … rows - 1``, the k-th most frequent with a probability ∝ ``k ** -s``; the ranks of
    keys are random, so that frequent keys are not adjacent."""
    cumulated = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -s)
    ranks = np.searchsorted(cumulated, random.random(shape) * cumulated[-1], side="right")
    return random.permutation(rows)[np.minimum(ranks, rows - 1)]


def machine() -> dict[str, Any]:
    """Properties of the machine that figures depend on, none of which identifies it."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of the installed packages among these."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
