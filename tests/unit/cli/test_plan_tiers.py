"""hps plan with Redis and with GPU caches: latencies of a calibration, and tiers that it does not have."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from hps.cli.main import app
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.config.yaml_text import parse_yaml
from hps.cuda import loader
from hps.errors import GpuUnavailable
from hps.models.version_writer import write_version
from hps.tools.plan import calibration
from hps.tools.plan.latency import Calibration

ROWS, SAMPLES = 2_000, 6_000
DIMS = {"user": 8, "ad": 16}
TABLES = ("--table", f"user={ROWS}x8", "--table", f"ad={ROWS}x16")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    spec = ModelSpec(
        name="ctr",
        tables=[TableSpec(name=name, dim=dim) for name, dim in DIMS.items()],
        features=[FeatureSpec(name=name, table=name, pooling="none") for name in DIMS],
    )
    tables = {n: (np.arange(ROWS), np.ones((ROWS, dim), np.float32)) for n, dim in DIMS.items()}
    write_version(root, spec, 1, tables, mapped=False)
    return root


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    random = np.random.default_rng(4)
    path = tmp_path_factory.mktemp("trace") / "keys.npz"
    np.savez(path, **{n: np.minimum(random.zipf(1.4, SAMPLES) - 1, ROWS - 1) for n in DIMS})
    return path


def run(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


REDIS = Calibration(4.0, (0.0, 4.0), (10.0, 5_000.0))


def test_redis_of_a_calibration_is_predicted(tmp_path, trace):
    file = tmp_path / "calibration.json"
    local = Calibration(4.0, (0.0, 4.0), (10.0, 50.0))
    replace(local, redis=REDIS).save(file)
    words = (trace, *TABLES, "--calibration", file, "--memory", 60_000, "-o", "json")
    plain = json.loads(run(*words).stdout)
    assert "Redis" not in [tier["tier"] for tier in plain["tiers"]]
    over_redis = json.loads(run(*words, "--redis", "cache:6379").stdout)
    assert over_redis["plan"]["p99_us"] > 20 * plain["plan"]["p99_us"]
    tiers = {tier["tier"]: tier for tier in over_redis["tiers"]}
    assert tiers["Redis"]["answers"] == pytest.approx(1 - over_redis["plan"]["hit_rate"])
    assert tiers["mapped files"]["answers"] == 0
    assert (tiers["Redis"]["rows"], over_redis["unknown_latency"]) == (2 * ROWS, {})


def test_redis_without_a_measurement_is_reported(tmp_path, trace):
    file = tmp_path / "calibration.json"
    Calibration(4.0, (0.0, 4.0), (10.0, 50.0)).save(file)
    words = (trace, *TABLES, "--calibration", file, "--redis", "cache:6379")
    done = run(*words)
    assert done.exit_code == 0, done.stderr
    message = " ".join(done.stderr.split())
    assert "Redis is not in the predicted latencies" in message
    assert "calibration.json does not have it" in message
    assert json.loads(run(*words, "-o", "json").stdout)["unknown_latency"].keys() == {"Redis"}


def test_redis_of_the_configuration_is_planned(tmp_path, trace, repository):
    config = tmp_path / "hps.yaml"
    config.write_text(
        f"models: {{repository: {repository}}}\n"
        "tiers: {rocksdb: {enabled: false}, redis: {addresses: ['cache:1']}}"
    )
    found = json.loads(
        run(trace, "--config", config, "--redis", "other:6379", "--no-latency", "-o", "json").stdout
    )
    assert [tier["tier"] for tier in found["tiers"]] == ["CPU cache", "Redis"]
    assert sum(tier["answers"] for tier in found["tiers"]) == pytest.approx(1)


GPU = Calibration(4.0, (0.0, 4.0), (5.0, 9.0))
HOST = Calibration(4.0, (0.0, 4.0), (10.0, 50.0))


def test_gpu_of_a_calibration_is_predicted(tmp_path, trace):
    file = tmp_path / "calibration.json"
    replace(HOST, gpu=GPU).save(file)
    words = (trace, *TABLES, "--calibration", file, "--memory", 60_000, "--gpu-hit-rate", 0.9)
    found = json.loads(run(*words, "-o", "json").stdout)
    plan, tiers = found["plan"], {tier["tier"]: tier for tier in found["tiers"]}
    assert (plan["on_gpu"], found["unknown_latency"]) == (True, {})
    assert plan["p50_us"] < 10
    assert 0.9 <= plan["gpu_hit_rate"] == tiers["GPU cache"]["answers"]
    assert plan["gpu_bytes"] == tiers["GPU cache"]["bytes"]
    fragment = parse_yaml(found["configuration"], "plan").data
    assert fragment["tiers"]["gpu"] == {"capacity_bytes": plan["gpu_bytes"]}
    done = run(*words, "--gpu-gib-price", 1000)
    assert "planned: p50 and p99 are of lookups whose vectors stay on the GPU" in done.stdout
    assert "USD" in done.stdout
    assert "not in the predicted latencies" not in done.stderr


def test_gpu_without_a_measurement_is_reported(tmp_path, trace):
    file = tmp_path / "calibration.json"
    HOST.save(file)
    done = run(trace, *TABLES, "--calibration", file, "--gpu-memory", 300_000)
    assert done.exit_code == 0, done.stderr
    assert "the GPU is not in the predicted latencies" in " ".join(done.stderr.split())
    assert "stay on the GPU" not in done.stdout


def test_gpu_of_the_configuration_is_predicted_beside_the_plan(tmp_path, trace, repository):
    config, file = tmp_path / "hps.yaml", tmp_path / "calibration.json"
    config.write_text(
        f"models: {{repository: {repository}}}\n"
        "tiers: {cpu_cache: {share: 0.5}, gpu: {use: required, share: 1.0}}"
    )
    replace(HOST, gpu=GPU).save(file)
    done = run(trace, "--config", config, "--calibration", file, "-o", "json")
    found = json.loads(done.stdout)
    current, plan = found["current"], found["plan"]
    assert (current["on_gpu"], plan["on_gpu"], plan["gpu_bytes"]) == (True, False, 0)
    assert current["gpu_hit_rate"] == pytest.approx(1)
    assert current["p50_us"] == pytest.approx(5, abs=0.5)
    words = ("--calibration", file, "--set", "tiers.gpu.use=off", "-o", "json")
    off = run(trace, "--config", config, *words)
    assert json.loads(off.stdout)["current"]["gpu_bytes"] == 0


@pytest.fixture
def measured(monkeypatch):
    """Replaces measurements by `HOST` and, where this machine has a GPU, by `GPU`."""

    def calibrate_gpu(loads, **options):
        raise GpuUnavailable("there is no GPU")

    monkeypatch.setattr(calibration, "calibrate", lambda loads, **options: HOST)
    monkeypatch.setattr(calibration, "calibrate_gpu", calibrate_gpu)
    return monkeypatch


def test_calibration_of_a_machine_with_a_gpu_has_it(tmp_path, trace, measured):
    file, words = tmp_path / "calibration.json", (trace, *TABLES, "--save-calibration")
    measured.setattr(loader, "missing_requirement", lambda: "there is no GPU")
    assert run(*words, file).exit_code == 0
    assert Calibration.load(file) == HOST
    measured.setattr(loader, "missing_requirement", lambda: None)
    measured.setattr(calibration, "calibrate_gpu", lambda loads, device: GPU)
    assert run(*words, file).exit_code == 0
    assert Calibration.load(file) == replace(HOST, gpu=GPU)


def test_machine_without_a_gpu_is_reported(trace, measured):
    done = run(trace, *TABLES, "--gpu-memory", 300_000)
    assert done.exit_code == 0, done.stderr
    message = "the GPU is not in the predicted latencies: there is no GPU"
    assert message in " ".join(done.stderr.split())
