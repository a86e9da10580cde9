"""hps config validate: the models, networks and files that a configuration names."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from hps.cli.demo_data import FOLDER
from hps.cli.main import app
from tests.support.certificates import made

MODEL = FOLDER / "ctr" / "model.yaml"


def validate(file: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["config", "validate", str(file), *map(str, arguments)])


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The demo's repository without its manifest, so that only sizes are compared."""
    shutil.copytree(FOLDER / "ctr", tmp_path / "models" / "ctr")
    (tmp_path / "models" / "ctr" / "1" / "manifest.json").unlink()
    return tmp_path / "models"


@pytest.fixture
def config(tmp_path: Path, models: Path) -> Path:
    path = tmp_path / "hps.yaml"
    path.write_text(f"models: {{repository: {models}}}\n")
    return path


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def narrowed(model: Path) -> None:
    spec = yaml.safe_load((model / "model.yaml").read_text())
    spec["tables"][0] |= {"dim": 8, "default": 0}
    (model / "model.yaml").write_text(yaml.safe_dump(spec))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "dim": (narrowed, "the bytes would fit dim 16: is dim 8 wrong?"),
    "missing table": (lambda m: shutil.rmtree(m / "1/tables/ad"), "tables/ad is missing"),
    "missing keys": (lambda m: (m / "1/tables/ad/key").unlink(), "key is missing"),
    "truncated vectors": (lambda m: truncated(m / "1/tables/ad/emb_vector"), "truncated?"),
    "truncated keys": (lambda m: truncated(m / "1/tables/ad/key"), "is not a multiple of 8"),
    "truncated network": (lambda m: truncated(m / "1/dense.onnx"), "ONNX Runtime cannot load it"),
    "no network": (lambda m: (m / "1/dense.onnx").unlink(), "dense.onnx is missing"),
    "datatype": (
        lambda m: replaced(m / "model.yaml", "- name: depth", "- name: depth\n      datatype: INT64"),
        "'depth' is INT64 in model.yaml, FP32 in the network",
    ),
    "shape": (
        lambda m: replaced(m / "model.yaml", "- name: depth\n      shape: [-1, 1]",
                           "- name: depth\n      shape: [-1, 3]"),
        "'depth'",
    ),
    "no version": (lambda m: shutil.rmtree(m / "1"), "no version folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_validate_names_a_broken_model(config: Path, models: Path, case: str) -> None:
    assert validate(config).exit_code == 0
    broken, message = BROKEN[case]
    broken(models / "ctr")
    result = validate(config)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    result = validate(models / "ctr" / "model.yaml")
    if case == "no version":
        assert result.exit_code == 0
    elif case == "no network":
        assert "only a Triton can run it" in result.stderr
    else:
        assert (result.exit_code, message in result.stderr) == (2, True)


def test_validate_accepts_the_demo_model() -> None:
    result = validate(MODEL)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{MODEL}: ok (model description, ctr version 1)\n"


def test_validate_accepts_a_description_without_versions(tmp_path: Path) -> None:
    shutil.copy(MODEL, tmp_path / "model.yaml")
    assert "ok (model description)" in validate(tmp_path / "model.yaml").stdout
    (tmp_path / "model.yaml").write_text("name: m\ndense: {outputs: [{name: y, shape: [-1]}]}\n")
    result = validate(tmp_path / "model.yaml")
    assert "model.yaml: tables: is missing" in result.stderr


def test_validate_points_to_doctor(config: Path, models: Path) -> None:
    """A port in use and an unavailable Redis are not errors of the file."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = validate(
            config,
            "--set",
            f"server.http.port={port}",
            "--set",
            "tiers.redis.addresses=[127.0.0.1:1]",
        )
    assert result.exit_code == 0, result.output
    assert "ctr version 1" in result.stdout
    assert f"hps doctor --config {config}" in result.stderr
    report = json.loads(validate(config, "-o", "json").stdout)
    assert report["models"] == [{"model": "ctr", "version": 1}]
    shutil.rmtree(models)
    result = validate(config)
    assert result.exit_code == 0
    assert "models are not checked: there is no" in result.stderr


def test_validate_skips_networks_that_triton_runs(config: Path, models: Path) -> None:
    (models / "ctr" / "1" / "dense.onnx").unlink()
    triton = ("--set", "dense.triton.url=127.0.0.1:1")
    assert validate(config, *triton).exit_code == 0
    assert "dense.onnx is missing" in (
        validate(config, *triton, "--set", "dense.triton.fallback=true").stderr
    )
    # model.yaml itself is still checked.
    replaced(models / "ctr" / "model.yaml", "hotness: 1, context: true", "pooling: none")
    result = validate(config, *triton)
    assert "model.yaml must give its hotness" in result.stderr


def test_validate_needs_no_gpu(config: Path) -> None:
    assert validate(config, "--set", "dense.provider=cuda").exit_code == 0


def test_validate_reads_no_rows_of_large_tables(config: Path, models: Path) -> None:
    """Reading sparse files of 64 GB would take minutes."""
    rows = 1 << 30
    for name, width in (("key", 8), ("emb_vector", 64)):
        with (models / "ctr" / "1" / "tables" / "ad" / name).open("wb") as file:
            file.truncate(rows * width)
    assert validate(config).exit_code == 0


def test_validate_of_a_front_end_needs_no_rows(config: Path, models: Path) -> None:
    role = ("--set", "server.role=frontend", "--set", "lookup.nodes=[a:1]")
    shutil.rmtree(models / "ctr" / "1" / "tables")
    assert validate(config).exit_code == 2
    assert validate(config, *role).exit_code == 0
    (models / "ctr" / "1" / "dense.onnx").unlink()
    assert "dense.onnx is missing" in validate(config, *role).stderr


def test_validate_checks_the_tables_of_a_ps_json(tmp_path: Path) -> None:
    path = tmp_path / "ps.json"
    model = {"model": "m", "sparse_files": ["a", "b"], "embedding_vecsize_per_table": [4, 2]}
    path.write_text(json.dumps({"models": [model]}))
    result = validate(path)
    assert (result.exit_code, "models are not checked" in result.stderr) == (0, True)
    for name, dim in (("a", 4), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_bytes(bytes(8 * 5))
        (tmp_path / name / "emb_vector").write_bytes(bytes(4 * dim * 5))
    assert "m version 1" in validate(path).stdout
    truncated(tmp_path / "b" / "emb_vector")
    assert "truncated?" in validate(path).stderr
    shutil.rmtree(tmp_path / "b")
    assert "b is missing" in validate(path).stderr


def test_validate_checks_certificates_of_ports(config: Path, tmp_path: Path) -> None:
    one, other = made(tmp_path, "a"), made(tmp_path, "b")

    def given(key: Path) -> tuple[str, str]:
        return "--set", f"server.http.tls={{certificate_file: {one[1]}, key_file: {key}}}"

    assert validate(config, *given(one[0])).exit_code == 0
    result = validate(config, *given(other[0]))
    assert "server.http.tls" in result.stderr
    assert "the key does not match the certificate" in result.stderr
    result = validate(config, *given(tmp_path / "none.pem"))
    assert (result.exit_code, "none.pem does not exist here" in result.stderr) == (0, True)


def test_validate_checks_options_of_kafka(config: Path, tmp_path: Path) -> None:
    brokers = ("--set", "updates.kafka.brokers=127.0.0.1:1", "--set")
    result = validate(config, *brokers, "updates.kafka.options={no.such: 1}")
    assert "updates.kafka: No such configuration property" in result.stderr
    secret = tmp_path / "password"
    options = "updates.kafka.options_files={sasl.password: " + str(secret) + "}"
    result = validate(config, *brokers, options)
    assert result.exit_code == 0
    assert result.stderr.count(str(secret)) == 1
