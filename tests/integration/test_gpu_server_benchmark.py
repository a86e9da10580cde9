"""The GPU server's benchmark, run on the CPU alone: real servers, both protocols, all answers right."""

from __future__ import annotations

import pytest

from benchmarks.common import Options
from benchmarks.gpu_server import run

pytestmark = pytest.mark.alone  # pins processes to cores


def test_quick_run_measures_the_cpu_server():
    report = run(Options(quick=True, extra={"workers": 1, "parts": "cpu,lookups"}))
    assert report.notes == []
    assert report.values == {}
    cells = report.tables["predictions, CPU"]
    assert {(row["protocol"], row["batch"], row["callers"]) for row in cells} == {
        (protocol, batch, callers)
        for protocol in ("rest", "grpc")
        for batch in (1, 64)
        for callers in (1, 8)
    }
    assert not [row for row in cells if not row["requests/s"] or row["errors"]]
    for row in report.tables["lookups of 26 × 64 keys, CPU"]:
        assert row["requests/s"] > 0
        assert row["loopback /s"] > row["requests/s"] / 2
