"""A node's representation, forks and close."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec
from hps.errors import Unavailable
from hps.models.version_writer import write_version
from tests.support.waiting import PATIENT_GUARD

FORKED = """
import os, sys, warnings
import hps

warnings.simplefilter("ignore")  # of forking beside threads, which is the point
with hps.open({"models": {"repository": sys.argv[1]}}) as node:
    node.lookup("m", {"t": [7]})
    child = os.fork()
    if child == 0:
        try:
            node.lookup("m", {"t": [-1]})
        except hps.HpsError as error:
            print(type(error).__name__, error, flush=True)
        node.close()
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
    print(node.lookup("m", {"t": [8]}).vectors["t"].tolist(), flush=True)
"""

CLOSED_UNDER_LOOKUPS = """
import sys, threading
import numpy as np
import hps

settings = {"models": {"repository": sys.argv[1]}, "tiers": {"rocksdb": {"path": sys.argv[2]}}}
keys = {"wide": np.arange(16_000)}
for _ in range(3):
    node, ended, started = hps.open(settings), [], threading.Barrier(3)

    def ask():
        started.wait()
        try:
            while True:
                assert (node.lookup("m", keys, by_table=True).vectors["wide"] == 1).all()
        except hps.HpsError as error:
            ended.append(f"{type(error).__name__} {error}")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait()
    node.lookup("m", keys, by_table=True)
    node.close()
    for thread in threads:
        thread.join()
    print(*ended, sep="\\n")
"""


def repository(folder: Path) -> Path:
    spec = ModelSpec.model_validate({"name": "m", "tables": [{"name": "t", "dim": 1}]})
    keys = np.arange(10)
    write_version(folder / "models", spec, 1, {"t": (keys, keys[:, None].astype(np.float32))})
    return folder / "models"


def test_repr_shows_models_and_tiers(tmp_path: Path) -> None:
    settings = {
        "models": {"repository": repository(tmp_path)},
        "tiers": {"rocksdb": {"path": tmp_path / "rocksdb", "guard": PATIENT_GUARD}},
    }
    with hps.open(settings) as node:
        assert repr(node) == "<hps.Node: m/1; cpu > rocksdb>"


def test_fork_gets_an_error_and_leaves_the_node_open(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, repository(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    error, status, answer = done.stdout.splitlines()
    assert error.startswith("Unavailable this process was forked from the one that opened the node")
    assert (status, answer) == ("0", "[[8.0]]")


def test_lookups_during_close_raise_unavailable(tmp_path: Path) -> None:
    spec = ModelSpec.model_validate({"name": "m", "tables": [{"name": "wide", "dim": 64}]})
    rows = np.ones((16_000, 64), np.float32)
    write_version(tmp_path / "models", spec, 1, {"wide": (np.arange(16_000), rows)})
    done = subprocess.run(
        [sys.executable, "-c", CLOSED_UNDER_LOOKUPS, tmp_path / "models", tmp_path / "rocksdb"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shutting_down = "Unavailable the server is shutting down; ask another replica"
    assert done.stdout.splitlines() == [shutting_down] * 6


def test_closed_node_rejects_lookups_instead_of_answering_defaults(tmp_path: Path) -> None:
    policy = {"miss_policy": {"kind": "default_then_promote"}}
    spec = ModelSpec.model_validate({"name": "m", "tables": [{"name": "t", "dim": 1, **policy}]})
    keys = np.arange(10)
    write_version(tmp_path / "models", spec, 1, {"t": (keys, keys[:, None].astype(np.float32))})
    with hps.open({"models": {"repository": tmp_path / "models"}}) as node:
        node.lookup("m", {"t": [7]})
    with pytest.raises(Unavailable, match="shutting down"):
        node.lookup("m", {"t": [7]})
