"""Metrics with Triton's names."""

from hps.observability import metric_names as m
from hps.observability.metric_triton import TRITON
from hps.observability.metrics import MetricValues
from services.frontend.statistics import Statistics
from services.frontend.triton_metric_values import triton_numbers


def test_counts_durations_and_failure_reasons():
    statistics = Statistics()
    # In ns: parsed in 1 µs, queued for 5, run for 20, encoded in 3.
    statistics.succeeded(4, (0, 1_000, 26_000, 29_000), 5_000)
    # The next is in a batch whose execution another request has counted.
    statistics.succeeded(2, (0, 1_000, 26_000, 29_000), 5_000, iter(()))
    failed = {"503": 1, "UNAVAILABLE": 2, "499": 3, "INTERNAL": 4, "400": 5, "504": 6}
    seconds = {("http", "infer", "ctr", "7", code): ([n], 0.1) for code, n in failed.items()}
    seconds["http", "infer", "ctr", "7", "200"] = ([2], 0.1)
    seconds["http", "infer", "", "", "404"] = ([9], 0.1)
    found = MetricValues(
        {
            m.REQUEST_SECONDS: seconds,
            m.QUEUE_REQUESTS: {("ctr",): 3},
            m.GPU_MEMORY_USED: {("0", "GPU-1"): 5},
            m.GPU_MEMORY_TOTAL: {("0", "GPU-1"): 80},
        }
    )
    numbers = {"ctr/7": statistics.numbers(), "ctr/6": Statistics().numbers()}
    reported = triton_numbers(found, {"ctr/7": ("ctr", "7")}, lambda: numbers)
    assert reported.keys() == {spec.name for spec in TRITON}
    failures = reported.pop("nv_inference_request_failure")
    assert failures == {
        ("ctr", "7", "REJECTED"): 3,
        ("ctr", "7", "CANCELED"): 3,
        ("ctr", "7", "BACKEND"): 4,
        ("ctr", "7", "OTHER"): 11,
    }
    assert reported.pop("nv_gpu_memory_used_bytes") == {("GPU-1",): 5}
    assert reported.pop("nv_gpu_memory_total_bytes") == {("GPU-1",): 80}
    assert {name: values["ctr", "7"] for name, values in reported.items()} == {
        "nv_inference_request_success": 2,
        "nv_inference_count": 6,
        "nv_inference_exec_count": 1,
        "nv_inference_pending_request_count": 3,
        "nv_inference_request_duration_us": 58,
        "nv_inference_queue_duration_us": 10,
        "nv_inference_compute_input_duration_us": 2,
        "nv_inference_compute_infer_duration_us": 40,
        "nv_inference_compute_output_duration_us": 6,
    }
    assert all(len(values) == 1 for values in reported.values())
