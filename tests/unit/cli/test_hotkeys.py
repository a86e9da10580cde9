"""hps hotkeys from a snapshot: filters, limits and errors."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from hps.cli.hotkeys import from_snapshot
from hps.cli.main import app
from hps.errors import BadRequest, NotFound
from hps.updates.hot_key_snapshot import write_hot_keys


@pytest.fixture
def path(tmp_path):
    scores = np.array([255, 9], np.uint8)
    tables = {"m/1/a": (np.array([-5, 6]), scores), "n/2/b": (np.array([7, 8]), scores)}
    write_hot_keys(tmp_path / "hot", tables)
    return tmp_path / "hot"


def test_snapshot_is_filtered_by_model_table_and_limit(path):
    assert [entry["table"] for entry in from_snapshot(path, None, None, 9)] == ["a", "b"]
    only = [{"model": "n", "table": "b", "keys": [7], "scores": [255]}]
    assert from_snapshot(path, "n", None, 1) == from_snapshot(path, "n", "b", 1) == only


def test_snapshot_is_printed(path):
    done = CliRunner().invoke(app, ["hotkeys", "m", "--snapshot", str(path)])
    assert (done.exit_code, "-5" in done.stdout, "255" in done.stdout) == (0, True, True)
    done = CliRunner().invoke(app, ["hotkeys", "--snapshot", str(path), "--output", "json"])
    assert json.loads(done.stdout)[1]["keys"] == [7, 8]


def test_equal_highest_scores_are_explained(path):
    done = CliRunner().invoke(app, ["hotkeys", "--snapshot", str(path)])
    assert done.stderr == ""
    write_hot_keys(path, {"m/1/a": (np.array([5, 6]), np.array([255, 255], np.uint8))})
    done = CliRunner().invoke(app, ["hotkeys", "--snapshot", str(path)])
    assert "all keys shown of m/a have the highest score" in done.stderr
    assert CliRunner().invoke(app, ["hotkeys", "--snapshot", str(path), "-o", "json"]).stderr == ""


def test_missing_table_names_the_existing_ones(path, tmp_path):
    with pytest.raises(NotFound, match="m/1/a, n/2/b"):
        from_snapshot(path, "m", "b", 1)
    with pytest.raises(NotFound, match="can't be read"):
        from_snapshot(tmp_path / "none", None, None, 1)
    path.write_bytes(b"other")
    with pytest.raises(BadRequest, match="not a hot key snapshot"):
        from_snapshot(path, None, None, 1)
