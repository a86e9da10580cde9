"""Metrics with Triton's names and meanings, for dashboards and autoscalers made for Triton.

Counts and times are those of the statistics extension, so they match those of perf_analyzer. A failed
request's reason follows from its status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hps.observability import metric_names as m
from hps.observability.metric_triton import TRITON
from hps.observability.metrics import MetricValues

# Every other status is OTHER: the request was invalid, or its deadline was exceeded.
_REASONS = {
    "429": "REJECTED",
    "503": "REJECTED",
    "RESOURCE_EXHAUSTED": "REJECTED",
    "UNAVAILABLE": "REJECTED",
    "499": "CANCELED",
    "CANCELLED": "CANCELED",
    "500": "BACKEND",
    "INTERNAL": "BACKEND",
}
_SUCCESSES = ("200", "OK")
# Triton's name, the key of `Statistics.numbers`, and the unit in nanoseconds.
_COUNTS_BY_METRIC = {
    "nv_inference_request_success": ("success_count", 1),
    "nv_inference_count": ("inferences", 1),
    "nv_inference_exec_count": ("executions", 1),
    "nv_inference_request_duration_us": ("success_ns", 1000),
    "nv_inference_queue_duration_us": ("queue_ns", 1000),
    "nv_inference_compute_input_duration_us": ("input_ns", 1000),
    "nv_inference_compute_infer_duration_us": ("infer_ns", 1000),
    "nv_inference_compute_output_duration_us": ("output_ns", 1000),
}
_GPU = {
    "nv_gpu_memory_used_bytes": m.GPU_MEMORY_USED,
    "nv_gpu_memory_total_bytes": m.GPU_MEMORY_TOTAL,
}


def triton_numbers(
    found: MetricValues,
    served: Mapping[str, tuple[str, str]],
    statistics: Callable[[], Mapping[str, Mapping[str, Any]]],
) -> MetricValues:
    """Compute Triton's metrics for the ``served`` names and versions.

    ``served`` and ``statistics`` have the keys of `Statistics`; ``found`` are hps's metrics."""
    values = MetricValues({spec.name: {} for spec in TRITON})
    for statistics_key, numbers in statistics().items():
        if statistics_key in served:
            for metric, (what, unit) in _COUNTS_BY_METRIC.items():
                values[metric][served[statistics_key]] = numbers[what] // unit
    waiting = found.get(m.QUEUE_REQUESTS, {})
    for name, version in served.values():
        values["nv_inference_pending_request_count"][name, version] = waiting.get((name,), 0)
    failures = values["nv_inference_request_failure"]
    for (_, _, name, version, code), (counts, _) in found.get(m.REQUEST_SECONDS, {}).items():
        if name and code not in _SUCCESSES:
            labels = name, version, _REASONS.get(code, "OTHER")
            failures[labels] = failures.get(labels, 0) + sum(counts)
    for theirs, ours in _GPU.items():
        values[theirs] = {(uuid,): size for (_, uuid), size in found.get(ours, {}).items()}
    return values
