"""What is told of a run, and kept of it in a file."""

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
# A process in Python that is busier than this is late with what it measures.
BUSY = 0.85


def report(outcome: BenchResult, asked: Mapping[str, Any]) -> dict[str, Any]:
    """``asked``: what was sent to whom, and how."""
    whole = LatencyHistogram.summed(outcome.slices)
    seconds = outcome.seconds
    per_s = outcome.answered / seconds if seconds else 0.0
    return {
        "format": FORMAT,
        "hps": __version__,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **asked,
        "seconds": seconds,
        "requests": whole.total,
        "errors": {kind: {"count": n, "first": text} for kind, (n, text) in outcome.errors.items()},
        "requests_per_s": per_s,
        "samples_per_s": per_s * asked["batch"],
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
    """Seconds; of quantiles that so few durations do not tell, None."""
    total = histogram.total
    return {
        name: histogram.quantile(share) if total * (1 - share) >= 1 else None
        for name, share in QUANTILES.items()
    }


def errors_of(told: Mapping[str, Any]) -> int:
    return sum(each["count"] for each in told["errors"].values())


def save(path: Path, told: Mapping[str, Any]) -> None:
    """Raises ConfigError."""
    try:
        path.write_text(json.dumps(told) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--json {path}: {error.strerror}; name a file that can be written"
        ) from None


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote. Raises ConfigError."""
    try:
        told = json.loads(path.read_text())
        if told["format"] != FORMAT or told["histograms"]["layout"] != _LAYOUT:
            raise ValueError(f"its format is {told['format']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--compare {path}: {error}; hps bench --json FILE of this version writes such files"
        ) from None
    return dict(told)


def slices_of(told: Mapping[str, Any]) -> list[tuple[float, LatencyHistogram]]:
    """The slices that the run reached: how long each lasted, seconds, and its latencies."""
    found = told["histograms"]
    return [
        (float(seconds), LatencyHistogram({int(n): int(c) for n, c in each}))
        for seconds, each in zip(found["seconds"], found["slices"], strict=True)
        if seconds
    ]
