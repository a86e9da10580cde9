"""Filling of a static GPU table: the start of a node whose one table lies completely on the device.

The version has the served form of its rows, which the node reads from mapped files; they are in the page
cache. The CPU cache is not filled. A start without the GPU tells what the fill adds; every row of a sample
is compared with the files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.common import Bar, Report
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.models.version_writer import write_version

ROWS, QUICK_ROWS, DIM, SAMPLE = 10_000_000, 1_000_000, 32, 100_000

BARS = (
    Bar(
        "static_fill_s", f"start of a node that fills a static table, {ROWS:,} rows, s", at_most=5.0
    ),
)


def write_static_model(folder: Path, rows: int) -> np.ndarray[Any, Any]:
    """Write a model of one table and return its vectors; row i has the key i."""
    spec = ModelSpec(
        name="m",
        max_batch_size=SAMPLE,
        tables=[TableSpec(name="t", dim=DIM)],
        features=[FeatureSpec(name="t", table="t", hotness=1)],
    )
    vectors = np.random.default_rng(3).random((rows, DIM), np.float32)
    write_version(folder, spec, 1, {"t": (np.arange(rows), vectors)})
    return vectors


def timed_start(folder: Path, name: str, gpu: dict[str, Any]) -> tuple[Any, float]:
    tiers = {"gpu": gpu, "cpu_cache": {"warm": False}, "rocksdb": {"path": str(folder / name)}}
    started = time.perf_counter()
    node = hps.open({"models": {"repository": str(folder / "models")}, "tiers": tiers})
    return node, time.perf_counter() - started


def measure_fill(report: Report, folder: Path, seed: int, *, quick: bool) -> None:
    rows = QUICK_ROWS if quick else ROWS
    vectors = write_static_model(folder / "models", rows)
    times: dict[str, list[float]] = {"without the GPU": [], "static table": []}
    static = {"use": "required", "capacity_bytes": 4 * rows * DIM * 4, "static": True}
    keys = np.random.default_rng(seed).integers(0, rows, SAMPLE)
    for turn in range(3):
        for name, gpu in (("without the GPU", {"use": "off"}), ("static table", static)):
            node, took = timed_start(folder, f"db{turn}{name[:1]}", gpu)
            times[name].append(took)
            with node:
                np.testing.assert_array_equal(
                    node.lookup("m", {"t": keys}).vectors["t"], vectors[keys]
                )
    report.values["static_fill_s"] = max(times["static table"])
    report.tables["start of a node, one table, s"] = [
        {"node": name, "rows": rows, "median": float(np.median(took)), "longest": max(took)}
        for name, took in times.items()
    ]
