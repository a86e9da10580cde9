"""The GPU server's benchmark beside Triton, run on the CPU alone: a real Triton, a real perf_analyzer."""

from __future__ import annotations

import pytest

from benchmarks.common import Options
from benchmarks.gpu_server_peers import run
from hps.native import COMPILED

pytestmark = [
    pytest.mark.alone,  # pins processes to cores
    pytest.mark.usefixtures("triton_ready", "perf_analyzer_ready"),
    pytest.mark.skipif(not COMPILED, reason="a shared cache needs the native core"),
]


def test_quick_run_measures_both_servers_and_both_generators():
    report = run(Options(quick=True, extra={"workers": 1}))
    assert report.notes == []
    assert report.values["wrong"] == 0
    for server in ("ours", "Triton"):
        rows = report.tables[f"predictions, {server}"]
        assert len(rows) == 8
        assert not [row for row in rows if not row["requests/s"] or row["errors"]]
    for row in report.tables["load generators, the same server"]:
        assert row["native /s"] > 0
        assert row["perf_analyzer /s"] > 0
    assert report.values["counted_rest"] <= 0.01
    assert report.values["counted_grpc"] <= 0.01
