"""hps plan of tables with mapped files: memory, the present configuration, and the node that it plans."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.cli.main import app
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.config.yaml_text import parse_yaml
from hps.models.mapped_file import MAPPED_FILE
from hps.models.version_writer import write_version
from hps.tools.plan.latency import Calibration

ROWS, SAMPLES = 20_000, 40_000
DIMS = {"user": 32, "ad": 16, "rare": 8}
SPEC = ModelSpec(
    name="ctr",
    tables=[TableSpec(name=name, dim=dim) for name, dim in DIMS.items()],
    features=[FeatureSpec(name=name, table=name, pooling="none") for name in DIMS],
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tables = {n: (np.arange(ROWS), np.ones((ROWS, dim), np.float32)) for n, dim in DIMS.items()}
    write_version(root, SPEC, 1, tables)
    return root


@pytest.fixture(scope="module")
def sizes(models):
    return {n: (models / "ctr/1/tables" / n / MAPPED_FILE).stat().st_size for n in DIMS}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Keys of user, nearly uniform, and ad, with skew; none of rare."""
    random = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("trace") / "keys.npz"
    ad = np.minimum(random.zipf(1.5, SAMPLES) - 1, ROWS - 1)
    np.savez(path, user=random.integers(0, ROWS, SAMPLES), ad=ad)
    return path


def run(*words):
    done = CliRunner().invoke(app, ["plan", *map(str, words), "--batch", "64"])
    assert done.exit_code == 0, done.stderr
    return done.stdout


def planned(*words):
    return json.loads(run(*words, "--no-latency", "-o", "json"))


def test_planned_configuration_is_what_a_node_does(tmp_path, models, sizes, trace):
    found = planned(trace, "--repository", models, "--hit-rate", 0.97)
    plan, tables = found["plan"], {each["name"]: each for each in found["tables"]}
    assert plan["in_memory"] == ["user"]
    assert plan["mapped_bytes"] == sizes["user"]
    assert plan["memory_bytes"] == plan["bytes"] + sizes["user"]
    assert tables["user"] | {"cache_rows": None, "hit_rate": 1.0} == tables["user"]
    assert 0 < tables["ad"]["cache_rows"] < ROWS
    fragment = parse_yaml(found["configuration"], "plan").data
    assert fragment["tiers"]["mapped"] == {"memory_bytes": sizes["user"]}
    assert "user" not in fragment["models"]["serve"]["ctr"]["tables"]
    fragment["models"]["repository"] = str(models)
    fragment["tiers"] |= {"rocksdb": {"path": str(tmp_path / "db")}, "gpu": {"use": "off"}}
    with hps.open(fragment) as node:
        cache = next(each for each in node.tiers if each.tier.info.name == "cpu")
        facts = cache.describe()
        assert (facts["mapped_tables"], facts["mapped_bytes"]) == (1, sizes["user"])
        capacity = {n: cache.capacity(table) for n, table in node.model("ctr").tables.items()}
    assert capacity == {**plan["rows"], "rare": 0}
    assert capacity["user"] == ROWS // 8


def test_small_memory_gets_caches_and_no_mapped_file(models, trace):
    found = planned(trace, "--repository", models, "--memory", 1_000_000)
    assert found["plan"]["in_memory"] == []
    assert found["plan"]["bytes"] <= 1_000_000
    # Else the node would read the files anyway.
    assert parse_yaml(found["configuration"], "plan").data["tiers"]["mapped"] == {"memory_bytes": 0}


def test_memory_for_all_files_is_used(models, sizes, trace):
    found = planned(trace, "--repository", models, "--memory", 6_000_000)
    assert found["plan"]["in_memory"] == ["user", "ad"]
    assert found["plan"]["memory_bytes"] <= 6_000_000
    tiers = {each["tier"]: each for each in found["tiers"]}
    assert tiers["mapped, in memory"]["bytes"] == sizes["user"] + sizes["ad"]
    assert tiers["mapped, in memory"]["answers"] == pytest.approx(1)
    assert sum(each["answers"] for each in found["tiers"]) == pytest.approx(1)


def test_present_configuration_reads_files_in_memory_as_a_start_does(
    tmp_path, models, sizes, trace
):
    config = tmp_path / "hps.yaml"
    config.write_text(f"models: {{repository: {models}}}")
    words = (trace, "--config", config, "--hit-rate", 0.5)

    def current(*changes):
        return planned(*words, *(word for each in changes for word in ("--set", each)))["current"]

    found = current()
    assert found["in_memory"] == ["user", "ad"]
    assert found["rows"] == {"user": ROWS // 8, "ad": ROWS // 8}
    assert (found["hit_rate"], found["mapped_bytes"]) == (1.0, sizes["user"] + sizes["ad"])
    some = current(f"tiers.mapped.memory_bytes={sizes['ad']}")
    assert some["in_memory"] == ["ad"]
    assert some["rows"] == {"user": ROWS, "ad": ROWS // 8}
    for change in ("tiers.mapped.memory_bytes=0", "tiers.mapped.enabled=false"):
        assert current(change)["rows"] == {"user": ROWS, "ad": ROWS}
        assert current(change)["in_memory"] == []
    assert current("tiers.rocksdb.layout=hps")["in_memory"] == []
    assert current("tiers.redis.addresses=[localhost:1]")["in_memory"] == []
    assert current("tiers.cpu_cache.capacity_bytes=0")["in_memory"] == []
    assert current("tiers.cpu_cache.enabled=false")["in_memory"] == []
    assert current("models.serve.ctr.tables.user.cache_rows=0")["in_memory"] == ["ad"]
    text = run(*words, "--no-latency")
    assert "configured now: tables read from mapped files in memory: user, ad" in text
    assert "planned: tables read" not in text


def test_mapped_files_are_shown(tmp_path, models, trace):
    plot, file = tmp_path / "curves.svg", tmp_path / "calibration.json"
    Calibration(128.0, (0.0, 128.0), (100.0, 2_000.0), mapped_us=60.0).save(file)
    text = run(trace, "-r", models, "--hit-rate", 1, "--calibration", file, "--plot", plot)
    assert "mapped, in memory" in text
    assert "planned: tables read from mapped files in memory: user, ad; they need no CPU" in text
    assert "0.06 ms" in text
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(plot.read_text())
    assert {"user: mapped", "ad: mapped"} <= {each.text for each in root.iter(f"{svg}text")}
    assert len(list(root.iter(f"{svg}rect"))) == 3  # one is the background


def test_tables_without_files_are_planned_with_mapped_ones(trace):
    tables = ("--table", f"user={ROWS}x32", "--table", f"ad={ROWS}x16")
    assert planned(trace, *tables, "--hit-rate", 1)["plan"]["in_memory"] == ["user", "ad"]
