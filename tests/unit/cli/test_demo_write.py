"""``hps demo --write``: the demo's model in a repository, and a request for it."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner, Result

from hps.cli.demo_data import FOLDER, load_demo
from hps.cli.main import app
from hps.models.repository import Repository


def write(folder: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["demo", "--write", str(folder), *more])


def files(folder: Path) -> dict[Path, bytes]:
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_model_is_written_and_a_request_is_printed(tmp_path: Path) -> None:
    done = write(tmp_path / "models", "--port", "9000")
    assert done.exit_code == 0
    assert files(tmp_path / "models/ctr") == files(FOLDER / "ctr")
    assert [each.name for each in (tmp_path / "models").iterdir()] == ["ctr"]
    assert "curl -s http://127.0.0.1:9000/v2/models/ctr/infer -d '{" in done.stdout
    score = re.search(r"click for this request is (\S+)\.\n", done.stdout)
    assert score is not None
    assert float(score[1]) == round(float(load_demo().scores["click"][0]), 6)


def test_second_write_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path)
    spec = tmp_path / "ctr/model.yaml"
    spec.write_text(spec.read_text() + "# of mine\n")
    assert write(tmp_path).exit_code == 0
    assert spec.read_text().endswith("# of mine\n")


def test_repository_with_other_models_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/model.yaml").write_text("name: mine\n")
    done = write(tmp_path)
    assert (done.exit_code, Repository(tmp_path).names()) == (0, ["mine"])
    assert "the demo's was not copied: mine" in done.stdout


def test_unwritable_repository_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = write(tmp_path / "file")
    assert done.exit_code == 2
    assert done.output.startswith(f"error: cannot write the demo's model into {tmp_path / 'file'}")
    assert done.output.count("\n") == 1
