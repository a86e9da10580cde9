"""The GPU soak's server part, run on the CPU: update files, killed workers, checked answers."""

from __future__ import annotations

import pytest

from benchmarks.common import Report
from benchmarks.gpu_soak_server import ServerSoak, soak_server

pytestmark = pytest.mark.alone  # pins processes to cores


@pytest.mark.parametrize("spoil", [False, True], ids=["right rows", "wrong rows"])
def test_server_part_judges_the_rows_that_the_server_answers(spoil):
    report = Report()
    plan = ServerSoak(
        seconds=5, workers=2, kill_every_s=1.5, batch=64, callers=4, gpu=False, spoil=spoil
    )
    soak_server(report, plan)
    assert report.values["killed"] >= 1
    assert report.values["server_keys"] > 0
    assert report.figures["server"]["update files"] > 26
    assert report.values["stale"] == 0
    assert (report.values["wrong"] > 0) == spoil
