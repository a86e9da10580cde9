"""Triton's metrics, which are exposed as well if `server.metrics.triton_names` is set."""

from __future__ import annotations

from hps.observability.metric_spec import MetricSpec

_OF_MODEL = ("model", "version")
TRITON: tuple[MetricSpec, ...] = (
    MetricSpec("nv_inference_request_success", "counter", _OF_MODEL, "Answered requests."),
    MetricSpec(
        "nv_inference_request_failure",
        "counter",
        (*_OF_MODEL, "reason"),
        "Failed requests; reason=REJECTED (overloaded or unavailable), CANCELED, BACKEND (error of the "
        "model or the server), OTHER (error of the request).",
    ),
    MetricSpec(
        "nv_inference_count",
        "counter",
        _OF_MODEL,
        "Answered samples; a batch counts with its size.",
    ),
    MetricSpec(
        "nv_inference_exec_count",
        "counter",
        _OF_MODEL,
        "Executions of answered requests; a batch counts as one.",
    ),
    MetricSpec(
        "nv_inference_pending_request_count",
        "gauge",
        _OF_MODEL,
        "Queued requests.",
    ),
    MetricSpec(
        "nv_inference_request_duration_us",
        "counter",
        _OF_MODEL,
        "End-to-end time of all answered requests, in microseconds.",
    ),
    MetricSpec(
        "nv_inference_queue_duration_us",
        "counter",
        _OF_MODEL,
        "Time that answered requests were queued.",
    ),
    MetricSpec(
        "nv_inference_compute_input_duration_us",
        "counter",
        _OF_MODEL,
        "Time of decoding the requests.",
    ),
    MetricSpec(
        "nv_inference_compute_infer_duration_us",
        "counter",
        _OF_MODEL,
        "Time of lookups and networks.",
    ),
    MetricSpec(
        "nv_inference_compute_output_duration_us",
        "counter",
        _OF_MODEL,
        "Time of encoding the answers.",
    ),
    MetricSpec(
        "nv_gpu_memory_total_bytes",
        "gauge",
        ("gpu_uuid",),
        "Memory of a GPU with a cache of this server.",
    ),
    MetricSpec("nv_gpu_memory_used_bytes", "gauge", ("gpu_uuid",), "Memory of it in use."),
)
