"""Metrics of traffic rules; `hps.observability.metric_table` includes them."""

from __future__ import annotations

from hps.observability import metric_names as m
from hps.observability.metric_spec import MetricSpec

ROLLBACK_REASONS = ("errors", "latency", "scores")

_VERSION = ("model", "version")
_DIFFERENCES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)

TRAFFIC = (
    MetricSpec(
        m.MODEL_AUTOMATIC_ROLLBACKS,
        "counter",
        ("model", "reason"),
        "Versions from which the node itself took the requests; reason=errors, latency or scores.",
    ),
    MetricSpec(
        m.SHADOW_REQUESTS,
        "counter",
        (*_VERSION, "result"),
        "Requests mirrored to this version; result=compared, dropped (the process is busy), failed, or "
        "live_failed: the request itself failed.",
    ),
    MetricSpec(
        m.SHADOW_ROWS, "counter", _VERSION, "Rows of answers compared: samples, or vectors."
    ),
    MetricSpec(
        m.SHADOW_DIFFERING_ROWS,
        "counter",
        _VERSION,
        "Rows of these with a value that differs by more than the tolerance.",
    ),
    MetricSpec(
        m.SHADOW_MAX_DIFFERENCE,
        "histogram",
        _VERSION,
        "Largest absolute difference between the answers to one request.",
        _DIFFERENCES,
    ),
    MetricSpec(
        m.SHADOW_MEAN_DIFFERENCE,
        "histogram",
        _VERSION,
        "Mean absolute difference between the answers to one request.",
        _DIFFERENCES,
    ),
    MetricSpec(
        m.SHADOW_SECONDS,
        "histogram",
        _VERSION,
        "Time in which this version answered mirrored requests.",
    ),
)
