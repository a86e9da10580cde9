"""Triton's metrics, which are exposed as well if `server.metrics.triton_names` is set."""

from __future__ import annotations

from hps.observability.metric_spec import MetricSpec

_OF_MODEL = ("model", "version")
TRITON: tuple[MetricSpec, ...] = (
    MetricSpec(
        "nv_inference_request_success", "counter", _OF_MODEL, "Requests that were answered."
    ),
    MetricSpec(
        "nv_inference_request_failure",
        "counter",
        (*_OF_MODEL, "reason"),
        "Requests that failed; reason=REJECTED (overloaded or not available), CANCELED, BACKEND (a fault of "
        "the model or the server), OTHER (of the request).",
    ),
    MetricSpec(
        "nv_inference_count",
        "counter",
        _OF_MODEL,
        "Samples that were answered, batches by their size.",
    ),
    MetricSpec(
        "nv_inference_exec_count",
        "counter",
        _OF_MODEL,
        "Executions of requests that were answered; those of a batch are one.",
    ),
    MetricSpec(
        "nv_inference_pending_request_count",
        "gauge",
        _OF_MODEL,
        "Requests that wait for their turn.",
    ),
    MetricSpec(
        "nv_inference_request_duration_us",
        "counter",
        _OF_MODEL,
        "Time of all answered requests from end to end, in microseconds.",
    ),
    MetricSpec(
        "nv_inference_queue_duration_us",
        "counter",
        _OF_MODEL,
        "Time that answered requests waited for their turn.",
    ),
    MetricSpec(
        "nv_inference_compute_input_duration_us",
        "counter",
        _OF_MODEL,
        "Time that reading the requests took.",
    ),
    MetricSpec(
        "nv_inference_compute_infer_duration_us",
        "counter",
        _OF_MODEL,
        "Time that lookups and networks took.",
    ),
    MetricSpec(
        "nv_inference_compute_output_duration_us",
        "counter",
        _OF_MODEL,
        "Time that writing the answers took.",
    ),
    MetricSpec(
        "nv_gpu_memory_total_bytes", "gauge", ("gpu_uuid",), "Memory of a GPU with a cache of ours."
    ),
    MetricSpec("nv_gpu_memory_used_bytes", "gauge", ("gpu_uuid",), "Memory of it that is taken."),
)
