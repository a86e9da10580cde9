"""deploy/triton is what its README's command writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from hps.cli.triton import app

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/triton"


def files(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".gitkeep"  # versions of ensembles are empty folders
    }


def test_example_equals_the_exported_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (FOLDER / "README.md").read_text().replace("\\\n", "")
    (command,) = re.findall("^hps triton export .*$", text, re.MULTILINE)
    words = shlex.split(command)[2:]
    words[words.index("--out") + 1] = str(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert files(FOLDER / "models") == files(tmp_path)
    assert {"config.pbtxt", "model.py", "model.onnx"} == {path.name for path in files(tmp_path)}
