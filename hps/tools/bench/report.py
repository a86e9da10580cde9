"""The report of a run, and its file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hps import __version__
from hps.errors import ConfigError
from hps.tools.bench.histogram import LatencyHistogram
from hps.tools.bench.run import BenchResult

FORMAT = "hps-bench-2"
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
_LAYOUT = "hdr-1024-ns"
# A Python process that is busier than this measures late.
BUSY = 0.85


def report(outcome: BenchResult, load: Mapping[str, Any]) -> dict[str, Any]:
    """Build the report; ``load`` describes the server and the requests that were sent."""
    whole = LatencyHistogram.summed(outcome.slices)
    seconds = outcome.seconds
    per_s = outcome.answered / seconds if seconds else 0.0
    return {
        "format": FORMAT,
        "hps": __version__,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **load,
        "seconds": seconds,
        "requests": whole.total,
        "errors": {kind: {"count": n, "first": text} for kind, (n, text) in outcome.errors.items()},
        "requests_per_s": per_s,
        "samples_per_s": per_s * load["batch"],
        "latency_s": quantiles(whole) | {"mean": whole.mean, "max": whole.quantile(1.0)},
        "late_s": quantiles(outcome.late) | {"max": outcome.late.quantile(1.0)},
        "found_no_place": outcome.full,
        "own_cpu": outcome.own_cpu,
        "interrupted": outcome.interrupted,
        "histograms": {
            "layout": _LAYOUT,
            "seconds": outcome.spans,
            "slices": [sorted(each.counts.items()) for each in outcome.slices],
        },
    }


def quantiles(histogram: LatencyHistogram) -> dict[str, float | None]:
    """Quantiles in seconds; None for a quantile with too few durations."""
    total = histogram.total
    return {
        name: histogram.quantile(share) if total * (1 - share) >= 1 else None
        for name, share in QUANTILES.items()
    }


def errors_of(report: Mapping[str, Any]) -> int:
    return sum(each["count"] for each in report["errors"].values())


def save(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report. Raises ConfigError."""
    try:
        path.write_text(json.dumps(report) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--json {path}: {error.strerror}; name a file that can be written"
        ) from None


def load(path: Path) -> dict[str, Any]:
    """Read a report that `save` wrote. Raises ConfigError."""
    try:
        report = json.loads(path.read_text())
        if report["format"] != FORMAT or report["histograms"]["layout"] != _LAYOUT:
            raise ValueError(f"its format is {report['format']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--compare {path}: {error}; hps bench --json FILE of this version writes such files"
        ) from None
    return dict(report)


def slices_of(report: Mapping[str, Any]) -> list[tuple[float, LatencyHistogram]]:
    """The slices that the run reached: duration in seconds, and latencies."""
    found = report["histograms"]
    return [
        (float(seconds), LatencyHistogram({int(n): int(c) for n, c in each}))
        for seconds, each in zip(found["seconds"], found["slices"], strict=True)
        if seconds
    ]
