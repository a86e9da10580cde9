"""The description of one metric, and the buckets of histograms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Sub-millisecond first: a lookup from memory takes tens of microseconds.
SECONDS_BUCKETS = (
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25,
    0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
# From a row within one machine to a stream that waited for a day.
AGE_BUCKETS = (
    5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0,
    86_400.0,
)  # fmt: skip
BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
# Probabilities, finer in the range of click rates; beyond 0 and 1, outputs of networks without a sigmoid.
SCORE_BUCKETS = (
    -10.0, -3.0, -1.0, 0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7,
    0.8, 0.9, 0.95, 0.98, 0.99, 1.0, 3.0, 10.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its name, its labels, a sentence on its meaning, a histogram's buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = SECONDS_BUCKETS
