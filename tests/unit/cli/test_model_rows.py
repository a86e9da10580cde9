"""hps model rows: figures of every format, scores of recorded requests, and the choice for a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

import hps
from hps.cli.main import app
from hps.config.model_schema import ModelSpec
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.row_format import ROW_FORMAT_NAMES, row_format
from hps.types import JaggedKeys
from tests.support.onnx_networks import summing_network

RANDOM = np.random.default_rng(5)
ROWS, SAMPLES = 300, 400
USERS = RANDOM.normal(size=(ROWS, 4)).astype(np.float32)
ITEMS = (RANDOM.normal(size=(ROWS, 6)) / 50).astype(np.float32)
OFFSET = 2**64 - 100
"""Of the feature `item`: its table has the keys -100 to 199."""


def spec(**users: Any) -> ModelSpec:
    dense = {"inputs": [{"name": "price", "shape": [-1, 1]}]}
    dense["outputs"] = [{"name": "score", "shape": [-1, 1]}]
    return ModelSpec.model_validate(
        {
            "name": "ctr",
            "tables": [{"name": "users", "dim": 4, **users}, {"name": "items", "dim": 6}],
            "features": [
                {"name": "user", "table": "users"},
                {"name": "item", "table": "items", "key_offset": OFFSET},
            ],
            "dense": dense,
        }
    )


@pytest.fixture
def models(tmp_path: Path) -> Path:
    keys = np.arange(ROWS)
    tables = {"users": (keys, USERS), "items": (keys - 100, ITEMS)}
    network = summing_network({"user": 4, "item": 6, "price": 1}, "score")
    write_version(tmp_path / "models", spec(), 1, tables, dense=network)
    return tmp_path / "models"


def samples() -> dict[str, Any]:
    """Columns; a sample's label is 1 with the probability of its score, a few keys have no row."""
    user, item = RANDOM.integers(0, ROWS + 10, (2, SAMPLES))
    price = RANDOM.normal(size=SAMPLES).astype(np.float32)
    rows = np.concatenate([USERS, np.zeros((10, 4), np.float32)])
    score = rows[user].sum(axis=1) + price
    label = (score + RANDOM.normal(size=SAMPLES) > 0).astype(np.int64)
    return {"user": user, "item": item, "price": price, "click": label}


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    pq.write_table(pa.table(samples()), tmp_path / "requests.parquet")
    return tmp_path / "requests.parquet"


def run(models: Path, *arguments: object) -> Result:
    return CliRunner().invoke(
        app, ["model", "rows", "ctr", "-r", str(models), *map(str, arguments)]
    )


def printed(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def formats(table: Any) -> dict[str, Any]:
    return {each["rows"]: each for each in table["formats"]}


def test_figures_of_every_format(models):
    users, items = printed(run(models, "-o", "json"))["tables"]
    assert list(formats(users)) == list(ROW_FORMAT_NAMES)
    assert (users["current"], users["rows"], users["dim"]) == ("float32", ROWS, 4)
    for name, each in formats(items).items():
        assert each["bytes"] == ROWS * row_format(name).row_bytes(6)
        assert each["scores"] is None
    errors = {name: each["errors"]["max_error"] for name, each in formats(users).items()}
    assert errors["float32"] == 0 < errors["float16"] < errors["bfloat16"] < errors["int4"]
    write_version(models, spec(rows="int8"), 2, {"users": (np.arange(ROWS), USERS),
        "items": (np.arange(ROWS) - 100, ITEMS)}, dense=b"", replace_spec=True)  # fmt: skip
    entry = Repository(models).open("ctr", 2).manifest.tables["users"]
    measured = entry.conversion.model_dump(exclude={"rows"})
    assert measured == pytest.approx(formats(users)["int8"]["errors"])


def test_scores_are_those_of_a_node_with_such_rows(tmp_path, models, requests):
    words = ("--requests", requests, "--labels", "click", "--batch-size", 64, "-o", "json")
    report = printed(run(models, *words))
    assert (report["samples"], report["output"]) == (SAMPLES, "score")
    read = pq.read_table(requests)
    columns = {name: read[name].to_numpy() for name in read.column_names}

    def scores(rows: str) -> np.ndarray:
        root = tmp_path / rows
        keys, tables = np.arange(ROWS), {"users": (np.arange(ROWS), USERS)}
        tables["items"] = (keys - 100, ITEMS)
        dense = Repository(models).open("ctr").dense
        write_version(root, spec(rows=rows), 1, tables, dense=dense)
        settings = {"models": {"repository": str(root)}, "tiers": {"rocksdb": {"enabled": False}}}
        features = {name: JaggedKeys(columns[name], SAMPLES) for name in ("user", "item")}
        with hps.open(settings) as node:
            found = node.predict("ctr", features, {"price": columns["price"][:, None]})
        return found.outputs["score"].reshape(-1).astype(np.float64)

    exact, narrow = scores("float32"), scores("int4")
    users = formats(report["tables"][0])
    difference = np.abs(narrow - exact)
    assert users["int4"]["scores"]["max_difference"] == pytest.approx(difference.max())
    assert users["int4"]["scores"]["mean_difference"] == pytest.approx(difference.mean())
    clicks = columns["click"] == 1
    assert report["auc"] == pytest.approx(pairs(exact, clicks))
    assert users["int4"]["scores"]["auc"] == pytest.approx(pairs(narrow, clicks))
    assert users["float32"]["scores"]["auc_loss"] == 0


def pairs(scores: np.ndarray, positive: np.ndarray) -> float:
    """The AUC by its definition: the share of pairs that are in order."""
    above = scores[positive][:, None] - scores[~positive]
    return float(((above > 0) + 0.5 * (above == 0)).mean())


def test_budget_chooses_the_narrowest_formats_that_keep_it(models, requests):
    words = ("--requests", requests, "--labels", "click", "-o", "json", "--auc-budget")
    every = printed(run(models, *words, 1))
    assert [table["chosen"] for table in every["tables"]] == ["int4", "int4"]
    users = formats(every["tables"][0])
    allowed = users["int8"]["scores"]["auc_loss"]
    assert users["int4"]["scores"]["auc_loss"] != allowed
    narrow = printed(run(models, *words, 0))
    assert narrow["combined"]["auc_loss"] <= 0
    for table in narrow["tables"]:
        assert formats(table)[table["chosen"]]["scores"]["auc_loss"] <= 0


def test_text_shows_the_choice_as_options_of_import(models, requests):
    words = ("--requests", requests, "--labels", "click", "--auc-budget", 1)
    text = run(models, *words).stdout
    assert f"{SAMPLES} samples, output score; AUC with float32 rows 0." in text
    assert "ctr/1 users: 300 rows of dim 4, now float32" in text
    assert "For an AUC loss of at most 1: --rows int4\n" in text
    assert "AUC" not in run(models).stdout


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_requests_may_be_text(tmp_path, models, suffix):
    columns = samples()
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    lines = [dict(zip(columns, row, strict=True)) for row in values]
    path = tmp_path / f"r.{suffix}"
    if suffix == "csv":
        text = [",".join(columns), *(",".join(map(str, line.values())) for line in lines)]
    else:
        text = [json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    report = printed(run(models, "--requests", path, "--labels", "click", "-o", "json"))
    assert report["samples"] == SAMPLES


def test_scores_without_labels(models, requests):
    report = printed(run(models, "--requests", requests, "-o", "json"))
    found = formats(report["tables"][0])["int4"]["scores"]
    assert found["max_difference"] > 0
    assert found["auc"] is report["auc"] is None


def test_wrong_options_are_errors(tmp_path, models, requests):
    pq.write_table(pa.table(samples() | {"click": np.full(SAMPLES, 2)}), tmp_path / "two.parquet")
    pq.write_table(pa.table(samples() | {"click": np.ones(SAMPLES)}), tmp_path / "same.parquet")
    cases = {
        ("--labels", "click"): "need --requests",
        ("--requests", requests, "--auc-budget", "0.1"): "needs --requests FILE and --labels",
        ("--requests", requests, "--labels", "clicks"): "has no column clicks",
        ("--requests", requests, "--score", "other"): "no output 'other'; it has score",
        ("--requests", tmp_path / "two.parquet", "--labels", "click"): "the value 2; labels are 0",
        ("--requests", tmp_path / "same.parquet", "--labels", "click"): "all labels are the same",
    }
    for words, message in cases.items():
        result = run(models, *words)
        assert result.exit_code in (1, 2)  # 1: the file; 2: the options
        assert message in result.stderr


def test_formats_that_cannot_hold_a_row_are_not_chosen(tmp_path, requests):
    keys, large = np.arange(ROWS), USERS.copy()
    large[7] = [1e6, -1e6, 1, 2]
    tables = {"users": (keys, large), "items": (keys - 100, ITEMS)}
    network = summing_network({"user": 4, "item": 6, "price": 1}, "score")
    write_version(tmp_path / "large", spec(), 1, tables, dense=network)
    words = ("--requests", requests, "--labels", "click", "--auc-budget", 1, "-o", "json")
    users = printed(run(tmp_path / "large", *words))["tables"][0]
    found = {name: each["errors"]["not_finite_rows"] for name, each in formats(users).items()}
    assert found["float16"] == found["int8"] == found["int4"] == 1
    assert found["bfloat16"] == found["float8_e4m3"] == 0
    assert users["chosen"] == "float8_e4m3"
