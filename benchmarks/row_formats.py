"""Ranking quality and bytes of rows in narrow formats, on the clicks of KDD Cup 2012.

The model of `examples/ctr` is trained in float32 on 80 % of the impressions, with rows of dim 16 and of dim
64. A node then scores the other 20 % with all tables in one format. Bars: the largest change of the AUC, up
or down, over the dims and seeds, and the bytes of the stored rows of dim 64. A mapped file also has the keys,
its index and padding to 8 bytes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Bar, Benchmark, Options, Report, main
from examples.ctr.data import Samples, Split, read_csv, split
from examples.ctr.export import MODEL, publish, tables
from examples.ctr.training import DEFAULTS, train
from hps.config.model_schema import ModelSpec
from hps.models.mapped_file import MAPPED_FILE
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.row_format import ROW_FORMAT_NAMES
from hps.tiers.stored_rows import to_rows
from hps.tools.row_scores import RecordedRequests, RowScorer, auc
from hps.types import JaggedKeys, PredictRequest

BATCH, WIDE, ROWS = 1024, 64, 200_000
DIMS = (DEFAULTS.dim, WIDE)
BARS = (
    Bar("auc_int8", "int8: largest change of the AUC", at_most=0.001),
    Bar("auc_int4", "int4: largest change of the AUC", at_most=0.003),
    Bar("bytes_int8", "int8: bytes of rows / float32's, dim 64", at_most=0.3),
    Bar("bytes_int4", "int4: bytes of rows / float32's, dim 64", at_most=0.18),
)


def run(options: Options) -> Report:
    report = Report()
    measure_bytes(report, options.seed)
    file = shared_folder() / "kdd12" / "Click_prediction_small.csv"
    if not file.is_file():
        report.notes.append(f"Not measured: the AUC, since there is no {file.name}.")
        return report
    samples = read_csv(file)
    parts = split(len(samples))
    changes: dict[str, list[float]] = {name: [] for name in ROW_FORMAT_NAMES}
    lines: list[dict[str, Any]] = []
    for dim in DIMS:
        for seed in range(options.seed, options.seed + (1 if options.quick else 3)):
            found = measure_auc(samples, parts, dim, seed, 2 if options.quick else DEFAULTS.epochs)
            exact = found["float32"][0]
            line: dict[str, Any] = {"dim": dim, "seed": seed, "float32": f"{exact:.5f}"}
            for name, (value, difference) in found.items():
                changes[name].append(abs(value - exact))
                if name != "float32":
                    line[name] = f"{value - exact:+.5f}"
                    line[f"{name} score"] = f"{difference:.1e}"
            lines.append(line)
    report.tables["AUC, its change with all tables in a format, largest change of a score"] = lines
    for name in ("int8", "int4"):
        report.values[f"auc_{name}"] = max(changes[name])
    largest = [{"format": name, "AUC": f"{max(c):.5f}"} for name, c in changes.items()]
    report.tables["largest change of the AUC"] = largest
    return report


def shared_folder() -> Path:
    """The folder of real data sets: ``HPS_SHARED_DATA``, else ``../shared/data``."""
    shared = os.environ.get("HPS_SHARED_DATA")
    return Path(shared) if shared else Path(__file__).parents[2] / "shared" / "data"


def measure_auc(
    samples: Samples, parts: Split, dim: int, seed: int, epochs: int
) -> dict[str, tuple[float, float]]:
    """Train a model; return per format the AUC of the test split and the largest change of a score."""
    trained = train(samples, parts, replace(DEFAULTS, dim=dim, seed=seed, epochs=epochs))
    test = samples.take(parts.test)
    requests = [
        PredictRequest({f: JaggedKeys(k, len(batch)) for f, k in batch.keys.items()}, batch.inputs)
        for batch in test.batches(BATCH)
    ]
    recorded = RecordedRequests(requests, test.clicked > 0)
    with tempfile.TemporaryDirectory() as folder:
        publish(trained, Path(folder))
        version = Repository(Path(folder)).open(MODEL)
        scorer = RowScorer(version, tables(trained), recorded, "click")
        every = [table.name for table in version.spec.tables]
        scores = {name: scorer.scores(dict.fromkeys(every, name)) for name in ROW_FORMAT_NAMES}
    exact = scores["float32"]
    return {
        name: (auc(test.clicked > 0, found), float(np.abs(found - exact).max()))
        for name, found in scores.items()
    }


def measure_bytes(report: Report, seed: int) -> None:
    """The bytes of a row and of a whole mapped file, by format, and the errors of normal values."""
    vectors = np.random.default_rng(seed).standard_normal((ROWS, WIDE), np.float32)
    lines: list[dict[str, Any]] = []
    sizes: dict[str, int] = {}
    shares: dict[str, float] = {}
    for name in ROW_FORMAT_NAMES:
        table = {"name": "t", "dim": WIDE, "rows": name}
        spec = ModelSpec.model_validate({"name": "m", "tables": [table]})
        with tempfile.TemporaryDirectory() as folder:
            write_version(folder, spec, 1, {"t": (np.arange(ROWS), vectors)})
            version = Repository(Path(folder)).open("m")
            sizes[name] = (version.tables["t"].folder / MAPPED_FILE).stat().st_size
            entry = version.manifest.tables["t"] if version.manifest else None
            rows = to_rows(version.embedding_tables()["t"], vectors).nbytes
        errors, shares[name] = entry and entry.errors, rows / vectors.nbytes
        lines.append(
            {
                "format": name,
                "bytes of a row": rows // ROWS,
                "/ float32": shares[name],
                "mapped file": sizes[name],
                "file / float32": sizes[name] / sizes["float32"],
                "max error": errors.max_error if errors else 0.0,
                "of a row": errors.mean_relative_error if errors else 0.0,
            }
        )
    report.tables[f"bytes, {ROWS:,} rows of dim {WIDE}"] = lines
    for name in ("int8", "int4"):
        report.values[f"bytes_{name}"] = shares[name]


BENCHMARK = Benchmark(
    name="row_formats",
    title=__doc__.splitlines()[0],
    run=run,
    bars=BARS,
    measured=(
        *("hps/row_format.py", "hps/tiers/stored_rows.py", "hps/models/mapped_file.py"),
        *("hps/tools/row_scores.py", "hps/native/src", "hps/native/include", "examples/ctr"),
    ),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
