"""The nodes of `benchmarks.mapped`.

One that reads mapped files on the fast path, and one whose CPU cache holds all rows, with the same
generated model: 26 tables of dim 32, features of one key. Lookups and predictions of 64 samples, uniform
keys, in one thread; time, in alternation.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.common import Bar, Options, Report
from benchmarks.measure import Spread, alternate, ratio
from hps.tools.generate.model import model_spec, write_model

NODE_TABLES, NODE_SAMPLES = 26, 64
NODE_TIERS: dict[str, dict[str, Any]] = {
    "mapped": {},
    "CPU cache": {"mapped": {"memory_bytes": 0}, "cpu_cache": {"share": 1.0}},
}
NODE_BARS = (
    Bar("node_lookups", "a node's lookups: time, mapped / CPU cache", at_most=1.1),
    Bar("node_predictions", "a node's predictions: time, mapped / CPU cache", at_most=1.1),
)


def measure_nodes(rows: int, options: Options, report: Report) -> None:
    """Compare a node with mapped files on the fast path with one whose CPU cache has all rows."""
    random, rounds = np.random.default_rng(options.seed), 5 if options.quick else 25
    with tempfile.TemporaryDirectory(dir=options.extra.get("folder")) as name, ExitStack() as nodes:
        spec = model_spec("m", NODE_TABLES, 32, 1, 4, NODE_SAMPLES)
        write_model(Path(name) / "models", spec, rows, options.seed, lambda _rows: None)
        keys = random.integers(0, rows, (100, NODE_TABLES, NODE_SAMPLES, 1))
        dense = {"dense": np.ones((NODE_SAMPLES, 4), np.float32)}
        works: dict[str, dict[str, Callable[[], float]]] = {"lookups": {}, "predictions": {}}
        for side, tiers in NODE_TIERS.items():
            node = nodes.enter_context(
                hps.open(
                    {
                        "models": {"repository": f"{name}/models"},
                        "tiers": {**tiers, "rocksdb": {"path": f"{name}/{side}"}},
                    }
                )
            )
            features = [{f"f{t}": batch[t] for t in range(NODE_TABLES)} for batch in keys]
            works["lookups"][side] = partial(
                _seconds, lambda each, node: node.lookup("m", each), features, node
            )
            works["predictions"][side] = partial(
                _seconds, lambda each, node: node.predict("m", each, dense), features, node
            )
        found = {kind: alternate(sides, rounds) for kind, sides in works.items()}
    report.figures["nodes"] = found
    lines = report.tables[f"A node, µs a call: 26 tables of {rows:,} rows, 64 samples"] = []
    for kind, times in found.items():
        over = ratio(times["mapped"], times["CPU cache"])
        report.values[f"node_{kind}"] = over.median
        line = {"": kind} | {side: f"{Spread.of(each)}" for side, each in times.items()}
        lines.append(line | {"mapped / CPU cache": f"{over}"})


def _seconds(work: Callable[[Any, Any], object], requests: list[Any], node: Any) -> float:
    """Microseconds a call."""
    began = time.perf_counter()
    for each in requests:
        work(each, node)
    return (time.perf_counter() - began) / len(requests) * 1e6
