"""A node killed at any moment of a change of versions serves a whole version after its restart.

A node serves a model from an object store (moto). A publisher, or the node during a download, load, switch,
label or rollback, is killed with ``kill -9`` at a random moment, 200 times in all. Then the node starts again
on the same folders, and nothing is repaired by hand: it must serve what it served before the change or, if
that was answered, after it; and of every served version each row bit by bit, with the network of the same
version. `tests/integration/test_switch_crashes.py` does the same with a few kills."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Bar, Benchmark, Options, Report, main

KILLS, QUICK_KILLS, KILLS_A_SEED = 200, 12, 50

BARS = (
    Bar("kills", "kills", at_least=KILLS),
    Bar("whole", "share of the seeds after whose kills every version was whole", at_least=1.0),
    Bar("in_flight", "share of the kills before the change was answered", at_least=0.25),
)


def run(options: Options) -> Report:
    """Kill in several runs, each with its seed and folders."""
    from tests.support.object_store import object_store
    from tests.support.switch_crash_run import ACTIONS, SwitchCrashRun

    werkzeug = logging.getLogger("werkzeug")
    werkzeug.setLevel(logging.ERROR)
    werkzeug.addFilter(_is_no_killed_upload)
    report = Report()
    total = QUICK_KILLS if options.quick else KILLS
    each = min(total, KILLS_A_SEED)
    runs, faults = [], 0
    with object_store() as store:
        os.environ.update(store.environment)
        for seed in range(options.seed, options.seed + total // each):
            with tempfile.TemporaryDirectory() as folder:
                crash = SwitchCrashRun(Path(folder), store, seed, prefix=f"seed-{seed}")
                try:
                    crash.run(each)
                except AssertionError as error:
                    faults += 1
                    report.notes.append(f"seed {seed}: {str(error)[:500]}")
            runs.append(crash)
            print(f"seed {seed}: {crash.killed.total()} kills", file=sys.stderr)
    rows: list[dict[str, Any]] = [
        {
            "killed during": action,
            "kills": sum(each.killed[action] for each in runs),
            "before the answer": sum(each.in_flight[action] for each in runs),
            "change kept": sum(each.changed[action] for each in runs),
        }
        for action in ACTIONS
    ]
    report.tables["kills"] = rows
    kills = sum(each.killed.total() for each in runs)
    report.values = {
        "kills": kills,
        "whole": 1 - faults / len(runs),
        "in_flight": sum(each.in_flight.total() for each in runs) / max(1, kills),
    }
    return report


def _is_no_killed_upload(record: logging.LogRecord) -> bool:
    """False for the error that werkzeug logs, with a traceback, about the upload of a killed publisher."""
    return "OSError: Invalid chunk header" not in record.getMessage()


BENCHMARK = Benchmark(
    name="switch_crashes",
    title="A node killed during a change of versions serves whole versions",
    run=run,
    bars=BARS,
    measured=(
        *("hps/node", "hps/models", "hps/tiers/rocksdb", "hps/tiers/mapped"),
        *("tests/support/switch_crash_run.py", "tests/support/object_store.py"),
    ),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
