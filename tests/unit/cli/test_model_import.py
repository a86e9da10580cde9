"""`hps model import --watermark`: stream offsets in the manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from hps.cli.main import app
from hps.models.repository import Repository


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    np.savez(tmp_path / "m.npz", **{"u.weight": np.ones((10, 4), np.float32)})
    return tmp_path / "m.npz"


def import_(npz: Path, *options: str) -> Result:
    words = ["model", "import", npz, "-r", npz.parent / "models", "-n", "m", "-t", "u=u.weight"]
    return CliRunner().invoke(app, [*map(str, words), *options])


def test_manifest_has_the_watermark(npz: Path) -> None:
    result = import_(npz, "--watermark", "rows/0=5", "--watermark", "rows/1=7")
    assert result.exit_code == 0, result.stderr
    manifest = Repository(npz.parent / "models").open("m").manifest
    assert manifest is not None
    assert manifest.watermark == {"rows": {"0": 5, "1": 7}}
    assert manifest.origin("u").watermark == {"rows": {"0": 5, "1": 7}}


def test_unusable_watermark_writes_nothing(npz: Path) -> None:
    result = import_(npz, "--watermark", "rows=5")
    assert result.exit_code == 2
    assert "--watermark rows=5: expected TOPIC/PARTITION=OFFSET" in result.stderr
    assert not (npz.parent / "models").exists()
