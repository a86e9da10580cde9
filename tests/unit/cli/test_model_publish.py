"""`hps model publish --dense`: a version with another network, if it fits the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hps.cli.main import app
from hps.config.model_schema import ModelSpec
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from tests.support.onnx_networks import summing_network

WIDTHS = {"user": 4, "price": 1}
SPEC = ModelSpec.model_validate(
    {
        "name": "clicks",
        "tables": [{"name": "user", "dim": 4}],
        "dense": {
            "inputs": [{"name": "price", "shape": [-1, 1]}],
            "outputs": [{"name": "ctr", "shape": [-1, 1]}],
        },
    }
)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    rows = np.arange(10), np.ones((10, 4), np.float32)
    folder = tmp_path / "models"
    write_version(folder, SPEC, 1, {"user": rows}, dense=summing_network(WIDTHS, "ctr"))
    return folder


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"user": 5, "price": 1}, r"has shape [-1, 4] in model.yaml, [-1, 5] in the network"),
        ({"price": 1}, "'user'"),
        ({"user": 4}, "'price'"),
    ],
)
def test_network_that_does_not_fit_is_not_published(
    tmp_path: Path, models: Path, inputs: dict[str, int], message: str
) -> None:
    dense = tmp_path / "new.onnx"
    dense.write_bytes(summing_network(inputs, "ctr"))
    for more in ([], ["--to", "s3://bucket/models"]):  # the check comes before the upload
        words = ["model", "publish", "clicks", "-r", str(models), "--dense", str(dense), *more]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert message in result.stderr
    assert sorted(each.name for each in (models / "clicks").iterdir()) == ["1", "model.yaml"]


def test_network_that_fits_is_published(tmp_path: Path, models: Path) -> None:
    dense = tmp_path / "new.onnx"
    dense.write_bytes(summing_network(WIDTHS, "ctr"))
    words = ["model", "publish", "clicks", "-r", str(models), "--dense", str(dense)]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert Repository(models).open("clicks").version == 2
