"""``kill -9`` during a publish, download, load, switch, label or rollback: each once, at a random moment.

`benchmarks/switch_crashes.py` does it 200 times."""

from __future__ import annotations

import logging

from tests.support.object_store import object_store
from tests.support.switch_crash_run import ACTIONS, SwitchCrashRun


def test_restart_serves_whole_versions_after_a_kill_at_any_moment(tmp_path, monkeypatch):
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        crash = SwitchCrashRun(tmp_path, store, seed=5)
        crash.run(2 * len(ACTIONS))
    assert dict(crash.killed) == dict.fromkeys(ACTIONS, 2)
