"""hps generate: models that can be served, and requests that they answer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.cli.main import app as main
from hps.config.model_schema import ModelSpec
from hps.errors import ConfigError
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.tools.generate.requests import GeneratedRequests, RequestRecipe, save
from hps.types import JaggedKeys


def run(*words):
    done = CliRunner().invoke(main, ["generate", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    small = ["--rows", 50, "--dim", 4]
    run("model", "ctr", "--repository", root, "--preset", "hugectr", *small)
    run("model", "words", "--repository", root, "--tables", 2, "--dense", 0, *small)
    spec = {
        "name": "bags",
        "tables": [{"name": "t", "dim": 2}],
        "features": [
            {"name": "some", "table": "t", "key_offset": -7},
            {"name": "two", "table": "t", "hotness": 2, "context": True},
        ],
    }
    rows = (np.arange(100, 120), np.ones((20, 2), np.float32))
    write_version(root, ModelSpec.model_validate(spec), 1, {"t": rows})
    return root


def test_keys_of_several_tables_are_drawn_once(tmp_path):
    spec = {
        "name": "m",
        "tables": [{"name": "deep", "dim": 2}, {"name": "wide", "dim": 1}],
        "features": [{"name": "ad", "table": ["deep", "wide"], "hotness": 2}],
    }
    tables = {
        name: (np.arange(5), np.ones((5, dim), np.float32))
        for name, dim in (("deep", 2), ("wide", 1))
    }
    write_version(tmp_path, ModelSpec.model_validate(spec), 1, tables)
    version = Repository(tmp_path).open("m")
    request = GeneratedRequests(version, RequestRecipe(batch=3)).one()
    assert {name: array.shape for name, array in request.items()} == {"ad": (3, 2)}
    by_table = GeneratedRequests(version, RequestRecipe(batch=3, form="tables")).one()
    assert by_table["NUMKEYS"].tolist() == [[6, 6]]


@pytest.mark.parametrize("options", [["--tables", 5], ["--dense", 4]])
def test_preset_rejects_other_sizes(tmp_path, options):
    words = ["generate", "model", "m", "--preset", "hugectr", "--repository", tmp_path, *options]
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == 2
    assert "--preset hugectr has 26 tables, and 13 dense numbers" in done.output


def test_a_preset_without_a_network(tmp_path):
    small = ["--rows", 5, "--dim", 2, "--dense", 0]
    run("model", "m", "--repository", tmp_path, "--preset", "hugectr", *small)
    version = Repository(tmp_path).open("m")
    assert (len(version.spec.tables), version.spec.dense) == (26, None)


def test_generated_model_is_served(models, tmp_path):
    made = GeneratedRequests(Repository(models).open("ctr"), RequestRecipe(batch=3))
    settings = {
        "models": {"repository": str(models), "serve": {"ctr": {}}},
        "tiers": {"rocksdb": {"path": str(tmp_path / "db")}},
    }
    with hps.open(settings) as node:
        assert len(node.models["ctr"].tables) == 26
        request = made.one()
        dense = {"dense": request.pop("dense")}
        assert dense["dense"].shape == (3, 13)
        answer = node.predict("ctr", request, dense)
        assert answer.outputs["score"].shape == (3, 1)
        assert answer.defaulted == 0


def test_equal_seeds_make_equal_requests(models):
    version = Repository(models).open("ctr")
    first, second, third = (
        GeneratedRequests(version, RequestRecipe(), seed).one() for seed in (1, 1, 2)
    )
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not all(np.array_equal(first[name], third[name]) for name in first)


def test_ragged_requests_and_offsets_of_keys(models):
    recipe = RequestRecipe(batch=40, hotness=3, ragged=True)
    request = GeneratedRequests(Repository(models).open("bags"), recipe).one()
    assert request.keys() == {"some", "some.offsets", "two"}
    counts = np.diff(request["some.offsets"])
    assert set(counts.tolist()) == {1, 2, 3}
    assert request["some.offsets"][-1] == len(request["some"])
    assert set(request["some"].tolist()) <= set(range(107, 127))  # the table's keys less the offset
    assert request["two"].shape == (40, 2)
    assert set(request["two"].reshape(-1).tolist()) <= set(range(100, 120))


def test_help_example_of_ragged_requests_runs(models, tmp_path):
    run("model", "open", "--repository", models, "--ragged", "--rows", 50, "--dim", 4)
    recipe = ["--batch", 64, "--hotness", 20, "--ragged", "--count", 1]
    run("requests", "open", "--repository", models, *recipe, "--out", tmp_path / "r.npz")
    with np.load(tmp_path / "r.npz") as arrays:
        counts = np.diff(arrays["0/f1.offsets"])
        assert counts.shape == (64,)
        assert 1 <= counts.min() < counts.max() <= 20
        request = {
            name: JaggedKeys(arrays[f"0/{name}"], 64, arrays[f"0/{name}.offsets"])
            for name in ("f0", "f1")
        }
        dense = {"dense": arrays["0/dense"]}
    settings = {
        "models": {"repository": str(models), "serve": {"open": {}}},
        "tiers": {"rocksdb": {"path": str(tmp_path / "db")}},
    }
    with hps.open(settings) as node:
        assert node.predict("open", request, dense).outputs["score"].shape == (64, 1)


def test_unknown_keys_have_no_row(models):
    request = GeneratedRequests(
        Repository(models).open("words"), RequestRecipe(batch=4000, unknown=0.25)
    ).one()
    strange = request["f0"] >= 50
    assert strange.mean() == pytest.approx(0.25, abs=0.03)


def test_hps_own_form(models):
    recipe = RequestRecipe("tables", batch=5)
    request = GeneratedRequests(Repository(models).open("words"), recipe).one()
    assert request["KEYS"].shape == (1, 10)
    assert request["NUMKEYS"].tolist() == [[5, 5]]
    assert request["NUMKEYS"].dtype == np.int32


def test_files(models, tmp_path):
    wanted = ["words", "--repository", models, "--count", 2]
    run("requests", *wanted, "--batch", 3, "--out", tmp_path / "r.json")
    steps = json.loads((tmp_path / "r.json").read_text())["data"]
    assert len(steps) == 6
    assert steps[0].keys() == {"f0", "f1"}
    assert steps[0]["f0"]["shape"] == [1]
    run("requests", *wanted, "--form", "tables", "--batch", 3, "--out", tmp_path / "k.json")
    steps = json.loads((tmp_path / "k.json").read_text())["data"]
    assert len(steps) == 2
    assert (steps[0]["KEYS"]["shape"], steps[0]["NUMKEYS"]["content"]) == ([6], [3, 3])
    run("requests", *wanted, "--batch", 3, "--out", tmp_path / "r.npz")
    with np.load(tmp_path / "r.npz") as arrays:
        assert arrays["1/f1"].shape == (3, 1)


def test_invalid_options_are_rejected(models, tmp_path):
    bags = Repository(models).open("bags")
    ragged = GeneratedRequests(bags, RequestRecipe(hotness=3, ragged=True, batch=2))
    with pytest.raises(ConfigError, match="perf_analyzer cannot send ragged"):
        save(tmp_path / "r.json", ragged.many(1), "features")
    with pytest.raises(ConfigError, match=r"expected a .json .* or an .npz"):
        save(tmp_path / "r.txt", ragged.many(1), "features")
    with pytest.raises(ConfigError, match="--unknown 2"):
        GeneratedRequests(bags, RequestRecipe(unknown=2))
    for option, recipe in {
        "--ragged": RequestRecipe(ragged=True),
        "--hotness": RequestRecipe("tables", hotness=2),
    }.items():
        with pytest.raises(ConfigError, match=f"{option} acts on features without a hotness, ctr"):
            GeneratedRequests(Repository(models).open("ctr"), recipe)
    done = CliRunner().invoke(
        main,
        ["generate", "model", "both", "--ragged", "--hotness", "2", "--repository", str(tmp_path)],
    )
    assert "leave --hotness out" in done.output
    with pytest.raises(ConfigError, match="--ragged is for requests by feature"):
        GeneratedRequests(bags, RequestRecipe("tables", ragged=True))
