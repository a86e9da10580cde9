"""hps config: show, validate, schema, convert; exit codes, speed, and no secret anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from hps.cli.main import app
from hps.config import load_config, load_model_spec

SECRET = "hunter2hunter2hunter2"
PS_JSON = {
    "persistent_db": {"type": "rocks_db", "path": "/var/hps/rocksdb"},
    "models": [
        {
            "model": "wdl",
            "sparse_files": ["t0"],
            "embedding_vecsize_per_table": [4],
            "refresh_delay": 30.0,
        }
    ],
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["config", *map(str, arguments)])


SERVERS = "onnxruntime", "fastapi", "uvicorn", "rocksdict", "pyarrow", "grpc", "tritonclient"


def program(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that prints the modules of ``SERVERS`` that it has imported."""
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print(sorted({{*{SERVERS}}} & {{*sys.modules}})))\n"
        "from hps.cli.main import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if not k.upper().startswith("HPS")},
    )


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "hps.yaml"
    path.write_text(
        "server: {http: {port: 9000}}\n"
        f"auth: {{mode: api_key, keys: [{{name: web, role: read, key: {SECRET}}}]}}\n"
    )
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text("sever: {}\nserver: {http: {port: x, host: 0.0.0.0}}\n")
    return path


@pytest.fixture
def ps_json(tmp_path: Path) -> Path:
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(PS_JSON))
    return path


# -- show ----------------------------------------------------------------------------------------


def test_show_prints_values_and_origins(good: Path) -> None:
    result = run("show", "--config", good, "--set", "server.admin.port=9002")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["server.http.port", "9000", f"{good}:1"] in rows
    assert ["server.admin.port", "9002", "--set"] in rows
    assert ["server.http.host", "127.0.0.1", "default"] in rows
    assert ["tiers.cpu_cache.share", "null", "default"] in rows


def test_show_without_a_file_prints_defaults() -> None:
    result = run("show")
    assert result.exit_code == 0
    assert "server.http.port" in result.stdout


def test_show_prints_json(good: Path) -> None:
    shown = json.loads(run("show", "-c", good, "-o", "json").stdout)
    assert shown["file"] == str(good)
    assert shown["settings"]["server"]["http"]["port"] == 9000
    assert shown["origins"]["server.http.port"] == f"{good}:1"


@pytest.mark.parametrize("output", ["table", "json"])
def test_show_hides_secrets(good: Path, output: str) -> None:
    text = run("show", "-c", good, "-o", output).output
    assert SECRET not in text
    assert "********" in text
    assert "web" in text


def test_show_of_a_ps_json_names_its_keys(ps_json: Path) -> None:
    result = run("show", "-c", ps_json)
    assert f"{ps_json}: persistent_db.path" in result.stdout
    assert "wdl" in result.stdout
    assert "models[0].refresh_delay" in result.stderr


def test_show_of_an_invalid_file_fails(bad: Path) -> None:
    assert run("show", "-c", bad).exit_code == 2


# -- validate ------------------------------------------------------------------------------------


def test_validate_accepts_a_valid_file(good: Path) -> None:
    result = run("validate", good)
    assert (result.exit_code, result.stdout) == (0, f"{good}: ok (configuration)\n")


def test_validate_prints_one_line_per_error(bad: Path) -> None:
    result = run("validate", bad, "--set", "server.drain_s=x")
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith(f"error: {bad}:1: sever: unknown key; did you mean 'server'?")
    assert lines[1].startswith(f"error: {bad}:2: server.http.port: expected a whole number")
    assert lines[2].startswith("error: --set: server.drain_s: expected a number")
    assert lines[3] == f"{bad}: 3 errors"


def test_validate_prints_json(bad: Path, ps_json: Path) -> None:
    result = run("validate", bad, "--output", "json")
    report = json.loads(result.stdout)
    assert result.exit_code == 2
    assert (report["ok"], len(report["errors"])) == (False, 2)
    report = json.loads(run("validate", ps_json, "--output", "json").stdout)
    assert (report["ok"], report["kind"], len(report["warnings"])) == (True, "HPS's ps.json", 2)
    assert "models are not checked" in report["warnings"][1]


def test_validate_rejects_a_reachable_port_without_auth_mode(tmp_path: Path) -> None:
    path = tmp_path / "open.yaml"
    path.write_text("server: {http: {host: 0.0.0.0}}\n")
    result = run("validate", path)
    assert result.exit_code == 2
    assert "auth.mode must be set" in result.stderr
    assert run("validate", path, "--set", "auth.mode=off").exit_code == 0


@pytest.mark.parametrize(
    ("name", "text", "kind", "code"),
    [
        ("model.yaml", "name: m\ntables: [{name: t, dim: 1}]\n", "model description", 0),
        ("model.yaml", "name: m\ntables: [{name: t, dim: 0}]\n", "model description", 2),
        ("keys.yaml", f"- {{name: a, role: read, key: {SECRET}}}\n", "API keys", 0),
        ("keys.yaml", f"- {{name: a, role: rod, key: {SECRET}}}\n", "API keys", 2),
        ("empty.yaml", "", "configuration", 0),
        ("broken.yaml", "a: [", "configuration", 2),
        ("ps.json", "{", "HPS's ps.json", 2),
    ],
)
def test_validate_detects_the_kind_of_a_file(
    tmp_path: Path, name: str, text: str, kind: str, code: int
) -> None:
    path = tmp_path / name
    path.write_text(text)
    result = run("validate", path, "-o", "json")
    assert result.exit_code == code
    assert json.loads(result.stdout)["kind"] == kind
    assert SECRET not in result.output
    assert (run("validate", path, "--set", "auth.mode=off").exit_code == 0) == (
        code == 0 and kind == "configuration"
    )


def test_validate_warns_of_a_missing_key_file(tmp_path: Path) -> None:
    path = tmp_path / "hps.yaml"
    path.write_text("auth: {mode: api_key, keys_file: keys.yaml}\n")
    result = run("validate", path)
    assert result.exit_code == 0
    assert "the server will not start without it" in result.stderr
    (tmp_path / "keys.yaml").write_text("- {name: a}\n")
    assert run("validate", path).exit_code == 2


# -- schema and convert --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "key"),
    [((), "server"), (("settings",), "auth"), (("model",), "tables"), (("api-key",), "role")],
)
def test_schema_is_json_schema(arguments: tuple[str, ...], key: str) -> None:
    schema = json.loads(run("schema", *arguments).stdout)
    assert key in schema["properties"]


def test_convert_prints_hps_yaml_and_model_yaml(ps_json: Path) -> None:
    result = run("convert", ps_json)
    assert result.exit_code == 0
    settings, model = yaml.safe_load_all(result.stdout)
    assert settings["tiers"]["rocksdb"]["layout"] == "hps"
    assert model["name"] == "wdl"
    assert "# hps.yaml\n" in result.stdout
    assert "# models/wdl/model.yaml\n" in result.stdout
    assert "refresh_delay" in result.stderr


def test_converted_files_configure_the_same_server(ps_json: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    assert run("convert", ps_json, "--into", folder).exit_code == 0
    before, after = load_config(ps_json, environ={}), load_config(folder / "hps.yaml", environ={})
    assert after.settings.tiers == before.settings.tiers
    assert after.settings.models.repository == folder / "models"
    assert load_model_spec(folder / "models/wdl/model.yaml") == before.legacy[0].spec
    again = run("convert", ps_json, "--into", folder)
    assert again.exit_code == 2
    assert "exists already" in again.stderr


# -- as a program --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("config", "validate"), ("serve", "--config")])
def test_invalid_configuration_fails_quickly(bad: Path, command: tuple[str, ...]) -> None:
    """The error comes before a server's packages are loaded, which takes most of the 3 s."""
    done = program(*command, bad)
    assert done.returncode == 2
    assert "server.http.port: expected a whole number from 0 to 65535" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.endswith("[]\n")


def test_reading_a_configuration_imports_no_heavy_module(good: Path) -> None:
    code = (
        "import sys, hps.config, hps.config.auth, hps.config.validation\n"
        "hps.config.validation.validate_file(__import__('pathlib').Path(sys.argv[1]))\n"
        "heavy = {'onnxruntime', 'fastapi', 'starlette', 'uvicorn', 'rocksdict', 'pyarrow', 'grpc',\n"
        "         'tritonclient', 'numpy', 'prometheus_client', 'rich', 'typer'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(good)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
