"""hps model: output, files and exit codes of import, inspect and verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner, Result

from hps.cli.main import app
from hps.cli.model_options import choices, features
from hps.errors import ConfigError
from hps.models.importers import TableChoice
from hps.models.repository import Repository
from tests.support.onnx_networks import network as onnx_network
from tests.support.onnx_networks import summing_network

ROWS = np.random.default_rng(0).random((10, 4), np.float32)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["model", *map(str, arguments)])


def printed(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    arrays = {"u.weight": ROWS, "i.weight": ROWS[:3], "ids": np.arange(10) * 2}
    np.savez(tmp_path / "t.npz", **arrays)
    return tmp_path / "t.npz"


def network(path: Path, **inputs: int) -> Path:
    """An .onnx file whose ``score`` is a sum over its inputs, each (batch, width)."""
    path.write_bytes(summing_network(inputs, "score"))
    return path


class TestImport:
    def test_chosen_tables_are_imported(self, npz, models):
        result = run(
            "import", npz, "--to", models, "--name", "ctr", "--table", "users=u.weight",
            "--table", "items=i.weight", "--keys", "users=ids", "--metadata", "auc=0.7",
        )  # fmt: skip
        assert result.exit_code == 0, result.stderr
        assert "ctr/1 users: 10 rows of dim 4" in result.stdout
        assert f"hps serve --set models.repository={models}" in result.stdout
        opened = Repository(models).open("ctr")
        assert opened.tables["users"].keys().tolist() == list(range(0, 20, 2))
        assert opened.tables["items"].keys().tolist() == [0, 1, 2]
        assert opened.manifest.metadata["auc"] == "0.7"

    def test_features_with_offsets_share_a_table(self, npz, models):
        run("import", npz, "-r", models, "-n", "ctr", "-t", "all=u.weight,i.weight",
            "-f", "user=all", "-f", "item=all+10:mean")  # fmt: skip
        written = [
            (f.name, f.key_offset, f.pooling) for f in Repository(models).spec("ctr").features
        ]
        assert written == [("user", 0, "sum"), ("item", 10, "mean")]

    def test_stacked_tables_report_offsets(self, npz, models):
        done = printed(
            run("import", npz, "-r", models, "-n", "ctr", "-t", "all=[ui].weight", "-o", "json")
        )
        assert done[0]["tables"] == [
            {
                "name": "all",
                "rows": 13,
                "repeated_keys": 0,
                "dim": 4,
                "offsets": {"u.weight": 0, "i.weight": 10},
                "row_errors": None,
            }
        ]
        assert [f.key_offset for f in Repository(models).spec("ctr").features] == [0, 10]

    def test_network_is_described_from_its_file(self, tmp_path, npz, models):
        dense = network(tmp_path / "net.onnx", users=4, price=2)
        result = run(
            "import", npz, "-r", models, "-n", "ctr", "-t", "users=u.weight", "--dense", dense
        )
        assert result.exit_code == 0, result.stderr
        spec = Repository(models).open("ctr").spec
        assert [t.name for t in spec.dense.inputs] == ["price"]
        assert [t.name for t in spec.dense.outputs] == ["score"]
        assert printed(run("verify", "-r", models, "-o", "json"))[-1] == {
            "model": "ctr",
            "check": "network",
            "result": "OK",
            "detail": "inputs and outputs match model.yaml",
        }

    def test_network_of_a_padded_feature_takes_its_mask_and_lengths(self, tmp_path, npz, models):
        history, length = (TensorProto.FLOAT, ["batch", 3, 4]), (TensorProto.FLOAT, ["batch"])
        nodes = [
            helper.make_node("Flatten", ["h"], ["flat"], axis=1),
            helper.make_node("Unsqueeze", ["h.lengths", "one"], ["count"]),
            helper.make_node("Concat", ["flat", "h.mask", "count", "price"], ["score"], axis=1),
        ]
        inputs = {"h": history, "h.mask": 3, "h.lengths": length, "price": 2}
        one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
        dense = tmp_path / "net.onnx"
        dense.write_bytes(onnx_network(nodes, inputs, {"score": 18}, [one]))
        result = run(
            "import", npz, "-r", models, "-n", "ctr", "-t", "users=u.weight", "--dense", dense,
            "-f", "h=users:none:max_length=3",
        )  # fmt: skip
        assert result.exit_code == 0, result.stderr
        spec = Repository(models).open("ctr").spec
        assert (spec.dense.masks, spec.dense.lengths) == ({"h": "h.mask"}, {"h": "h.lengths"})
        assert [t.name for t in spec.dense.inputs] == ["price"]
        assert "padded to 3" in run("inspect", "ctr", "-r", models).stdout

    def test_network_that_does_not_fit_writes_nothing(self, tmp_path, npz, models):
        for inputs, message in (
            ({"users": 5, "price": 2}, r"has shape [-1, 4] in model.yaml, [-1, 5] in the network"),
            ({"price": 2}, "no input is called like feature 'users'; its inputs are price"),
        ):
            dense = network(tmp_path / "net.onnx", **inputs)
            result = run(
                "import", npz, "-r", models, "-n", "c", "-t", "users=u.weight", "--dense", dense
            )
            assert result.exit_code == 2
            assert message in result.stderr
            assert not models.exists()

    def test_rows_of_all_tables_or_of_one_are_narrow(self, npz, models):
        tables = ("-t", "users=u.weight", "-t", "items=i.weight")
        words = ("import", npz, "-r", models, "-n", "ctr", *tables)
        narrow = ("--rows", "int8", "--rows", "items=int4")
        (done,) = printed(run(*words, *narrow, "-o", "json"))
        found = {table["name"]: table["row_errors"] for table in done["tables"]}
        assert [found[name]["rows"] for name in ("users", "items")] == ["int8", "int4"]
        assert 0 < found["users"]["mean_error"] <= found["users"]["max_error"] < 1 / 500
        assert 0.005 < found["items"]["max_error"] < 1 / 29
        opened = Repository(models).open("ctr")
        assert {t.name: t.rows for t in opened.spec.tables} == {"users": "int8", "items": "int4"}
        inspected = printed(run("inspect", "ctr", "-r", models, "-o", "json"))
        assert {t["name"]: t["row_errors"] for t in inspected["tables"]} == found
        assert {t["row_format"] for t in inspected["tables"]} == {"int8", "int4"}
        text = run("inspect", "ctr", "-r", models).stdout
        assert f"{found['users']['max_error']:.3g}" in text
        assert f"{100 * found['items']['mean_relative_error']:.3g} %" in text
        again = run(*words, *narrow)  # the next version, which shares both tables
        assert again.exit_code == 0, again.stderr
        assert "rows as int4: error of a value at most" in again.stdout

    def test_rows_that_contradict_a_description_are_rejected(self, tmp_path, npz, models):
        words = ("import", npz, "-r", models, "-t", "users=u.weight", "-n")
        assert run(*words, "ctr").exit_code == 0
        result = run(*words, "ctr", "--rows", "int8")
        assert result.exit_code == 2
        for part in (f"{models}/ctr/model.yaml", "table 'users' as float32", "--rows says int8"):
            assert part in result.stderr
        assert run(*words, "ctr", "--rows", "float32").exit_code == 0
        assert Repository(models).spec("ctr").tables[0].rows is None
        assert run(*words, "ctr", "--rows", "int8", "--replace-spec").exit_code == 0
        assert Repository(models).spec("ctr").tables[0].rows == "int8"
        (tmp_path / "m.yaml").write_text("name: m\ntables: [{name: users, dim: 4, rows: int4}]\n")
        spec = (*words, "other", "--spec", tmp_path / "m.yaml")
        assert "as int4, but --rows says int8" in run(*spec, "--rows", "int8").stderr
        assert run(*spec, "--rows", "users=int4").exit_code == 0

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (("int9",), "unknown format 'int9'; did you mean 'int8'?"),
            (("user=int8",), "names table 'user'; did you mean 'users'?"),
            (("int8", "int4"), "two formats for all tables: int8 and int4"),
            (("users=int8", "users=int4"), "names 'users' twice"),
        ],
    )
    def test_wrong_rows_options_are_errors(self, npz, models, rows, message):
        options = [word for text in rows for word in ("--rows", text)]
        result = run("import", npz, "-r", models, "-n", "ctr", "-t", "users=u.weight", *options)
        assert (result.exit_code, message in result.stderr) == (2, True)
        assert not models.exists()

    def test_spec_option_sets_the_description(self, tmp_path, npz, models):
        (tmp_path / "m.yaml").write_text(
            "name: any\ntables: [{name: users, dim: 4, default: 0.5, dtype: float16}]\n"
        )
        words = ("import", npz, "-r", models, "-n", "ctr", "-t", "users=u.weight")
        assert run(*words, "--spec", tmp_path / "m.yaml").exit_code == 0
        assert Repository(models).spec("ctr").tables[0].dtype == "float16"
        result = run(*words, "--spec", tmp_path / "m.yaml", "-f", "x=users")
        assert (result.exit_code, "leave --feature and --default out" in result.stderr) == (2, True)

    def test_options_describe_features_and_defaults(self, npz, models):
        words = ("import", npz, "-r", models, "-n", "ctr", "-t", "users=u.weight")
        feature = "user=users+5:mean:context:hotness=2:max_hotness=3"
        done = run(*words, "-f", feature, "-f", "friend=users", "--default", "users=-0.5")
        assert done.exit_code == 0, done.stderr
        spec = Repository(models).spec("ctr")
        user, friend = spec.features
        assert (user.key_offset, user.pooling, user.context) == (5, "mean", True)
        assert (user.hotness, user.max_hotness) == (2, 3)
        assert (friend.pooling, friend.context, friend.hotness) == ("sum", False, None)
        assert spec.tables[0].default == -0.5
        vector = run(*words, "--default", "users=1,2,3,4", "--replace-spec")
        assert vector.exit_code == 0, vector.stderr
        assert Repository(models).spec("ctr").tables[0].default == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                ("-f", "user=users:contxt"),
                "unknown option 'contxt'; expected sum, mean, sqrtn, none,",
            ),
            (("-f", "user=users:hotness=x"), "unknown option 'hotness=x'"),
            (("-f", "user=users:hotness=3:max_hotness=2"), "--feature user"),
            (("--default", "users=a"), "--default users: expected numbers, found 'a'"),
            (("--default", "other=1"), "--default names table 'other'; the tables are users"),
            (("--default", "users=1,2"), "has 2 values, but dim is 4"),
        ],
    )
    def test_unusable_options_write_nothing(self, npz, models, words, message):
        result = run("import", npz, "-r", models, "-n", "c", "-t", "users=u.weight", *words)
        assert result.exit_code == 2
        assert message in result.stderr
        assert not models.exists()

    def test_repeated_keys_are_reported(self, tmp_path, models):
        np.savez(tmp_path / "t.npz", v=ROWS, ids=np.array([1, 2, 1, 3, 2, 1, 7, 8, 9, 10]))
        words = (
            "import",
            tmp_path / "t.npz",
            "-r",
            models,
            "-n",
            "c",
            "-t",
            "t=v",
            "--keys",
            "t=ids",
        )
        result = run(*words)
        assert result.exit_code == 0
        assert "c/1 t: 3 rows repeat the key of a later row and will not be served" in result.stderr
        assert printed(run(*words, "-o", "json"))[0]["tables"][0]["repeated_keys"] == 3

    def test_versions_are_numbered_in_order(self, npz, models):
        words = ("import", npz, "-r", models, "-n", "ctr", "-t", "u.weight")
        assert [printed(run(*words, "-o", "json"))[0]["version"] for _ in range(3)] == [1, 2, 3]
        result = run(*words, "--version", 2)
        assert result.exit_code == 2
        assert "exists; take another version number, or replace it (--replace)" in result.stderr
        assert run(*words, "--version", 2, "--replace").exit_code == 0
        result = run(*words, "-f", "other=u")
        assert "--replace-spec" in result.stderr
        assert run(*words, "-f", "other=u", "--replace-spec").exit_code == 0

    def test_every_model_of_a_ps_json_is_imported(self, tmp_path, models):
        entries = []
        for name in ("wdl", "din"):
            folder = tmp_path / f"{name}.model"
            folder.mkdir()
            np.arange(10, dtype="<i8").tofile(folder / "key")
            ROWS.tofile(folder / "emb_vector")
            entries.append(
                {"model": name, "sparse_files": [str(folder)], "embedding_vecsize_per_table": [4],
                 "embedding_table_names": ["t"], "deployed_device_list": [0],
                 "maxnum_catfeature_query_per_table_per_sample": [1],
                 "default_value_for_each_table": [0.0]}
            )  # fmt: skip
        (tmp_path / "ps.json").write_text(json.dumps({"models": entries}))
        done = printed(run("import", tmp_path / "ps.json", "-r", models, "-o", "json"))
        assert [d["model"] for d in done] == ["wdl", "din"]
        assert Repository(models).names() == ["din", "wdl"]
        only = run("import", tmp_path / "ps.json", "-r", models, "--model", "din", "-n", "other")
        assert only.exit_code == 0
        assert Repository(models).open("other").tables["t"].rows == 10
        both = run("import", tmp_path / "ps.json", "-r", models, "--name", "one")
        assert both.exit_code == 2
        assert "--model" in both.stderr

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("gone.npz", "-n", "c"), "there is no file or folder gone.npz"),
            (("t.npz",), "give the model a name: --name NAME"),
            (("t.npz", "-n", "c"), "as in --table NAME=ARRAY; it holds u.weight [10, 4] float32"),
            (("t.npz", "-n", "c", "-t", "u=x"), "no array 'x' for table 'u'"),
            (("t.npz", "-n", "c", "-t", "u=u.weight", "--keys", "v=ids"), "--keys names table 'v'"),
            (("t.npz", "-n", "c", "-t", "u=u.weight", "--keys", "ids"), "expected TABLE=ARRAY"),
            (("t.npz", "-n", "c", "-t", "u=u.weight", "-f", "x=v"), "'v'"),
            (("t.npz", "-n", "a/b", "-t", "u=u.weight"), "name"),
            (("t.npz", "-n", "c", "-t", "u=u.weight", "--metadata", "x"), "expected KEY=VALUE"),
            (("t.npz", "-n", "c", "--format", "zip"), "no format 'zip'; expected one of ps.json"),
        ],
    )
    def test_errors_are_one_line(self, npz, models, monkeypatch, words, message):
        monkeypatch.chdir(npz.parent)
        result = run("import", *words, "-r", models)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert not models.exists()


class TestInspect:
    @pytest.fixture
    def imported(self, tmp_path, npz, models):
        dense = network(tmp_path / "net.onnx", users=4, price=2)
        run("import", npz, "-r", models, "-n", "ctr", "-t", "users=u.weight", "--dense", dense)
        run("import", npz, "-r", models, "-n", "words", "-t", "w=u.weight")
        run("import", npz, "-r", models, "-n", "words", "-t", "w=u.weight")
        return models

    def test_version_is_published_to_a_uri_only(self, tmp_path, imported):
        assert "--to URI " in run("publish", "--help").stdout
        result = run("publish", "ctr", "-r", imported, "--to", tmp_path / "other")
        assert result.exit_code == 2
        assert "other is a folder; publish to a URI such as s3://" in result.stderr

    def test_missing_network_is_not_published(self, tmp_path, imported):
        gone = tmp_path / "gone.onnx"
        result = run("publish", "ctr", "-r", imported, "--dense", gone)
        assert result.exit_code == 2
        assert result.stderr == f"error: dense part {gone}: No such file or directory\n"

    def test_models_of_the_repository_are_listed(self, imported):
        result = run("inspect", "-r", imported)
        assert [line.split() for line in result.stdout.splitlines()] == [
            ["model", "versions", "tables", "network"],
            ["ctr", "1", "1", "yes"],
            ["words", "1,", "2", "1", "no"],
        ]
        assert printed(run("inspect", "-r", imported, "-o", "json")) == [
            {"model": "ctr", "versions": [1], "tables": 1},
            {"model": "words", "versions": [1, 2], "tables": 1},
        ]

    def test_version_is_described(self, imported):
        text = run("inspect", "ctr", "-r", imported).stdout
        for word in (
            "ctr version 1, made 20",
            "users",
            "160",
            "score",
            "price",
            "format: npz",
        ):
            assert word in text or word == "160"
        described = printed(run("inspect", "words", "-r", imported, "--version", 1, "-o", "json"))
        assert (described["version"], described["tables"][0]["rows"]) == (1, 10)
        assert described["manifest"]["tables"]["w"]["rows"] == 10

    def test_context_features_are_marked(self, tmp_path, npz, models):
        spec = tmp_path / "spec.yaml"
        spec.write_text(
            "name: ctr\ntables: [{name: users, dim: 4}]\n"
            "features: [{name: user, table: users, context: true}, {name: friend, table: users}]\n"
        )
        done = run("import", npz, "-r", models, "-n", "ctr", "-t", "users=u.weight", "--spec", spec)
        assert done.exit_code == 0, done.stderr
        rows = [line.split() for line in run("inspect", "ctr", "-r", models).stdout.splitlines()]
        last = {row[0]: row[-1] for row in rows if row}
        assert [last[name] for name in ("feature", "user", "friend")] == ["context", "yes", "no"]

    def test_missing_model_or_version_is_an_error(self, imported):
        assert run("inspect", "wrds", "-r", imported).exit_code == 2
        assert run("inspect", "words", "-r", imported, "--version", 9).exit_code == 2
        assert run("inspect", "-r", imported / "none").exit_code == 2


class TestVerify:
    @pytest.fixture
    def folder(self, npz, models):
        run(
            "import", npz, "-r", models, "-n", "ctr", "-t", "users=u.weight", "-t", "items=i.weight"
        )
        return models / "ctr/1/tables"

    def test_sound_version_passes(self, models, folder):
        result = run("verify", "-r", models)
        assert result.exit_code == 0
        assert "FAIL" not in result.stdout
        assert "WARN" not in result.stdout

    def test_flipped_bit_fails(self, models, folder):
        data = bytearray((folder / "users/emb_vector").read_bytes())
        data[40] ^= 1
        (folder / "users/emb_vector").write_bytes(data)
        result = run("verify", "ctr", "-r", models, "-o", "json")
        assert result.exit_code == 1
        failed = [f for f in json.loads(result.stdout) if f["result"] == "FAIL"]
        assert [f["check"] for f in failed] == ["table users: checksums"]
        assert "do not match the manifest" in failed[0]["detail"]

    def test_truncated_file_fails(self, models, folder):
        (folder / "users/key").write_bytes(b"1234")
        result = run("verify", "ctr", "-r", models)
        assert result.exit_code == 1
        assert "4 bytes is not a multiple of 8" in result.stdout

    def test_suspicious_values_and_keys_are_warnings(self, models, folder):
        (folder.parent / "manifest.json").unlink()
        np.array([1, 2, 1], "<i8").tofile(folder / "items/key")
        rows = np.ones((3, 4), "<f4")
        rows[1, 2] = np.nan
        rows.tofile(folder / "items/emb_vector")
        result = run("verify", "ctr", "-r", models, "-o", "json")
        assert result.exit_code == 0
        warned = {
            f["check"]: f["detail"] for f in json.loads(result.stdout) if f["result"] == "WARN"
        }
        assert "row 1 (key 2)" in warned["table items: values"]
        assert "1 rows repeat the key of a later row" in warned["table items: keys"]
        assert "no manifest" in warned["table items: checksums"]

    def test_version_without_a_model_is_an_error(self, models):
        models.mkdir()
        assert "needs a model's name" in run("verify", "--version", 3, "-r", models).stderr
        assert "holds no model" in run("verify", "-r", models).stderr


@pytest.mark.parametrize("command", ["import", "inspect", "verify"])
def test_help_shows_examples(command):
    assert f"hps model {command} " in run(command, "--help").stdout


def test_table_options_and_features_are_parsed():
    assert choices(["u=a", "b"], ["u=ids"], ["u=e*"]) == [
        TableChoice("u", ("a",), "ids", "e*"),
        TableChoice("", ("b",)),
    ]
    (feature,) = features(["user=all+18446744073709551615:none"])
    assert (feature.key_offset, feature.pooling) == (2**64 - 1, "none")
    for text in ("user", "user=all+x", "user=all:max", "=all", "user="):
        with pytest.raises(ConfigError, match="--feature"):
            features([text])
