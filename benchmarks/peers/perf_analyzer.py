"""NVIDIA's perf_analyzer, run against any Open Inference Protocol server."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.environments import require

Tensors = Mapping[str, NDArray[Any]]


def perf_analyzer(
    address: str,
    model: str,
    steps: Sequence[tuple[Tensors, Tensors]],
    *arguments: str,
    protocol: str = "http",
    requests: int | None = 200,
    concurrency: int = 4,
    timeout_s: float = 240.0,
) -> dict[str, float]:
    """Run it once and return the row of its report: throughput and latencies by column name.

    ``steps`` are the requests it cycles through (none: random numbers), each with the outputs it
    compares bit by bit (none: not compared). When the model batches, the arrays have no batch
    dimension. perf_analyzer cannot compare an output with another variable dimension.

    With ``requests`` it stops after that many, and measures its time only coarsely. With None it measures
    in time windows, set by ``arguments``: the answers within each over its length.

    Raises PeerMissing when it is not set up, and RuntimeError with its output when it fails, a wrong
    answer included.
    """
    peer = require("perf_analyzer")
    libraries = f"{peer.site / 'nvidia/cuda_runtime/lib'}:{peer.folder / 'lib'}"
    libraries += f":{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.csv")
        command = [
            str(peer.folder / "bin/perf_analyzer"),
            "-m",
            model,
            "-u",
            address,
            "-i",
            protocol,
        ]
        command += ["--concurrency-range", str(concurrency)]
        command += [] if requests is None else ["--request-count", str(requests)]
        # It would repeat until its figures are stable, which they never are on a busy machine.
        command += ["--stability-percentage", "999"]
        command += ["-f", str(report), *_input_data(Path(folder), steps), *arguments]
        done = subprocess.run(
            command,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        output = done.stdout + done.stderr
        if done.returncode or "Failed" in output or not report.exists():
            raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{output}")
        row = next(csv.DictReader(report.read_text().splitlines()))
    return {name: float(value) for name, value in row.items() if value}


def _input_data(folder: Path, steps: Sequence[tuple[Tensors, Tensors]]) -> list[str]:
    """Write the steps as perf_analyzer reads them; returns the arguments that name them."""
    if not steps:
        return []
    document = {
        "data": [_step(inputs) for inputs, _ in steps],
        "validation_data": [_step(outputs) for _, outputs in steps],
    }
    if not any(document["validation_data"]):
        del document["validation_data"]
    (folder / "data.json").write_text(json.dumps(document))
    return ["--input-data", str(folder / "data.json")]


def _step(tensors: Tensors) -> dict[str, Any]:
    # tolist() widens float32 to float64, whose digits read back as the same float32.
    return {
        name: {"content": np.ravel(value).tolist(), "shape": list(value.shape)}
        for name, value in tensors.items()
    }
