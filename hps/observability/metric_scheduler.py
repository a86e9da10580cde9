"""Metrics of the batch scheduler of a node's GPUs; `hps.observability.metric_table` includes them."""

from __future__ import annotations

from hps.observability import metric_names as m
from hps.observability.metric_spec import MetricSpec

SCHEDULER = (
    MetricSpec(
        m.SCHEDULER_REQUESTS,
        "counter",
        ("model", "version"),
        "Predictions that the batch scheduler of the GPUs received, from all processes.",
    ),
    MetricSpec(
        m.SCHEDULER_SAMPLES,
        "counter",
        ("model", "version"),
        "Samples of these predictions; divided by hps_scheduler_batches_total: the mean size of a batch.",
    ),
    MetricSpec(
        m.SCHEDULER_SLOW,
        "counter",
        ("model", "version"),
        "Predictions that took the slow path, outside the lanes: rows were missing in memory, or the "
        "request has no columns of fixed width.",
    ),
    MetricSpec(
        m.SCHEDULER_EXPIRED,
        "counter",
        ("model", "version"),
        "Predictions whose deadline passed before all of their samples were in a batch.",
    ),
    MetricSpec(
        m.SCHEDULER_BATCHES,
        "counter",
        ("model", "version"),
        "Batches that the batch scheduler formed.",
    ),
    MetricSpec(
        m.SCHEDULER_INCOMPLETE,
        "counter",
        ("model", "version"),
        "Batches with rows missing on the GPU, which were read from host memory.",
    ),
    MetricSpec(
        m.SCHEDULER_FAILED,
        "counter",
        ("model", "version"),
        "Batches that failed on the GPU, with all their requests.",
    ),
    MetricSpec(
        m.SCHEDULER_DEVICE_SECONDS,
        "counter",
        ("model", "version"),
        "Time from launch to end, summed over the batches of all lanes. Its rate is the mean number of "
        "batches that run at a time.",
    ),
)
