"""``kill -9`` during a publish, download, load, switch, label or rollback, each at a random moment.

With and without workers; `benchmarks/switch_crashes.py` does it 200 times without."""

from __future__ import annotations

import logging

import pytest

from hps.native import COMPILED
from tests.support.object_store import object_store
from tests.support.switch_crash_run import ACTIONS, SwitchCrashRun


@pytest.mark.parametrize(("workers", "times"), [(0, 2), (2, 1)])
def test_restart_serves_whole_versions_after_a_kill_at_any_moment(
    tmp_path, monkeypatch, workers, times
):
    if workers and not COMPILED:
        pytest.skip("a shared cache needs the native core")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        crash = SwitchCrashRun(tmp_path, store, 5, f"workers-{workers}", workers)
        crash.run(times * len(ACTIONS))
    assert dict(crash.killed) == dict.fromkeys(ACTIONS, times)
