"""Metrics of downloads from remote model repositories; `hps.observability.metric_table` includes them."""

from __future__ import annotations

from hps.observability import metric_names as m
from hps.observability.metric_spec import MetricSpec

DOWNLOADS = (
    MetricSpec(
        m.DOWNLOAD_BYTES,
        "counter",
        ("model",),
        "Bytes that this process downloaded from a remote model repository.",
    ),
    MetricSpec(
        m.DOWNLOAD_SECONDS,
        "counter",
        ("model",),
        "Seconds that these downloads took, failed ones included.",
    ),
    MetricSpec(
        m.DOWNLOAD_FAILURES,
        "counter",
        ("model",),
        "Downloads from a remote model repository that failed.",
    ),
)
