"""hps plan: every format of a trace, outputs, and errors that name the remedy."""

import json
import lzma
import shutil
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from hps.cli.main import app
from hps.config import configuration_from
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.config.yaml_text import parse_yaml
from hps.models.mapped_file import MAPPED_FILE, write_mapped
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.tools.plan import chart
from hps.tools.plan.latency import Calibration

ROWS, SAMPLES = 2_000, 6_000
RANDOM = np.random.default_rng(4)
OFFSET = 10**15
TABLES = ("--table", f"user={ROWS}x8", "--table", f"ad={ROWS}x16")


def zipf(shape):
    return np.minimum(RANDOM.zipf(1.4, shape) - 1, ROWS - 1)


USER, ADS = zipf(SAMPLES), zipf((SAMPLES, 3))


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A model with tables user and ad; feature other shares the user's table by an offset."""
    root = tmp_path_factory.mktemp("models")
    spec = ModelSpec(
        name="ctr",
        tables=[TableSpec(name="user", dim=8), TableSpec(name="ad", dim=16)],
        features=[
            FeatureSpec(name="user", table="user"),
            FeatureSpec(name="ads", table="ad", hotness=3),
            FeatureSpec(name="other", table="user", key_offset=OFFSET),
        ],
    )
    keys = np.concatenate([np.arange(ROWS), OFFSET + np.arange(ROWS)])
    tables = {
        "user": (keys, np.zeros((2 * ROWS, 8), np.float32)),
        "ad": (np.arange(ROWS), np.zeros((ROWS, 16), np.float32)),
    }
    write_version(root, spec, 1, tables, mapped=False)
    return root


def run(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def planned(*words):
    done = run(*words, "--no-latency", "--output", "json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def write_trace(path):
    """The same trace in the format of the suffix."""
    columns = {"user": pa.array(USER), "ad": pa.array(ADS.tolist()), "price": pa.array(USER * 0.5)}
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path)
    elif path.suffix == ".npz":
        np.savez(path, user=USER, ad=ADS)
    elif path.suffix == ".jsonl":
        rows = zip(USER.tolist(), ADS.tolist(), strict=True)
        path.write_text("\n".join(json.dumps({"user": u, "ad": a}) for u, a in rows))
    else:
        separator = "," if path.suffix == ".csv" else "\t"
        rows = [f"{u}{separator}{' '.join(map(str, a))}" for u, a in zip(USER, ADS, strict=True)]
        path.write_text("\n".join([f"user{separator}ad", *rows]))
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("trace") / "keys.npz")


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tsv", ".jsonl", ".npz"])
def test_formats_agree(tmp_path, trace, suffix):
    words = (*TABLES, "--batch", 8, "--hit-rate", 0.8)
    found = planned(write_trace(tmp_path / f"keys{suffix}"), *words)
    assert found == planned(trace, *words)
    assert found["trace"] == {"requests": SAMPLES // 8, "keys": 4 * SAMPLES}
    assert found["plan"]["hit_rate"] >= 0.8


@pytest.mark.parametrize("suffix", [".npy", ".trace", ".trace.xz"])
def test_bare_keys_are_those_of_the_only_table(tmp_path, suffix):
    keys, path = USER - 2**40, tmp_path / f"keys{suffix}"
    raw = keys.astype(">i8").tobytes()
    if suffix == ".npy":
        np.save(path, keys)
    else:
        path.write_bytes(lzma.compress(raw) if suffix == ".trace.xz" else raw)
    found = planned(path, "--table", f"user={ROWS}x8")
    assert found["trace"] == {"requests": SAMPLES, "keys": SAMPLES}
    assert "user has keys alone" not in run(path, *TABLES).stderr
    assert "keys alone, and model model has user, ad" in run(path, *TABLES).stderr


def test_requests_of_a_model_are_read_by_feature(tmp_path, repository):
    path = tmp_path / "requests.npz"
    arrays = {}
    for number in range(200):
        start = 8 * number
        arrays[f"{number}/user"] = USER[start : start + 8]
        arrays[f"{number}/other"] = USER[start : start + 8]
        arrays[f"{number}/ads"] = ADS[start : start + 8]
    np.savez(path, **arrays)
    found = planned(path, "--repository", repository)
    assert found["trace"] == {"requests": 200, "keys": 200 * 8 * 5}
    user = found["tables"][0]
    assert user["keys"] == 200 * 8 * 2
    assert user["touched_rows"] == 2 * len(np.unique(USER[:1600]))
    assert user["unknown_share"] == 0


def test_generated_requests_are_a_trace(tmp_path, repository):
    out = tmp_path / "made.npz"
    words = ["generate", "requests", "ctr", "--out", out, "-r", repository, "--batch", 16]
    assert CliRunner().invoke(app, [*map(str, words)]).exit_code == 0
    assert planned(out, "--repository", repository)["trace"]["requests"] == 100


def test_files_follow_one_another(trace):
    once = planned(trace, *TABLES)["trace"]
    assert planned(trace, trace, *TABLES)["trace"] == {
        name: 2 * each for name, each in once.items()
    }


def test_plan_is_printed_and_its_yaml_is_a_configuration(tmp_path, trace, repository):
    out = tmp_path / "plan.yaml"
    done = run(trace, *TABLES, "--model", "ctr", "--memory", 60_000, "--no-latency", "--yaml", out)
    assert done.exit_code == 0, done.stderr
    assert "24,000 keys" in done.stdout
    assert "CPU cache" in done.stdout
    assert out.read_text().rstrip() in done.stdout
    settings = configuration_from(parse_yaml(out.read_text(), "plan").data, environ={}).settings
    cached = settings.models.serve["ctr"].tables
    assert settings.tiers.cpu_cache.capacity_bytes <= 60_000
    assert 0 < cached["user"].cache_rows < ROWS


def test_present_configuration_is_predicted_beside_the_plan(tmp_path, trace, repository):
    config = tmp_path / "hps.yaml"
    config.write_text(
        f"models: {{repository: {repository}}}\ntiers: {{cpu_cache: {{share: 0.01, eviction: fifo}}}}"
    )
    path = tmp_path / "keys.parquet"
    pq.write_table(pa.table({"user": USER, "ads": ADS.tolist()}), path)
    words = (path, "--config", config, "--hit-rate", 0.85)
    found = planned(*words)
    assert found["current"]["rows"] == {"user": 40, "ad": 20}
    assert found["current"]["hit_rate"] < 0.85
    assert {table["eviction"] for table in found["tables"]} == {"fifo"}
    assert "configured now" in run(*words, "--no-latency").stdout
    larger = planned(*words, "--set", "tiers.cpu_cache.share=0.1")["current"]
    assert larger["hit_rate"] > found["current"]["hit_rate"]


def test_stores_are_told_with_their_bytes(tmp_path, trace, repository):
    found = planned(trace, *TABLES, "--hit-rate", 0.8)["tiers"]
    assert [tier["tier"] for tier in found] == ["CPU cache", "mapped files"]
    assert sum(tier["answers"] for tier in found) == pytest.approx(1)
    path = tmp_path / "keys.parquet"
    pq.write_table(pa.table({"user": USER, "ads": ADS.tolist()}), path)
    _, rocksdb = planned(path, "--repository", repository)["tiers"]
    assert (rocksdb["tier"], rocksdb["bytes"]) == (
        "RocksDB",
        2 * ROWS * (32 + 35) + ROWS * (64 + 35),
    )
    root = shutil.copytree(repository, tmp_path / "models")
    user = root / "ctr" / "1" / "tables" / "user"
    files = Repository(root).open("ctr").tables["user"]
    write_mapped(files, user / MAPPED_FILE)
    stores = {tier["tier"]: tier for tier in planned(path, "--repository", root)["tiers"]}
    assert stores["mapped files"]["bytes"] == (user / MAPPED_FILE).stat().st_size
    assert (stores["mapped files"]["rows"], stores["RocksDB"]["rows"]) == (2 * ROWS, ROWS)


def test_calibration_is_reused(tmp_path, trace):
    file = tmp_path / "calibration.json"
    Calibration(4.0, (0.0, 4.0), (10.0, 50.0)).save(file)
    words = (trace, *TABLES, "--calibration", file, "--p99-ms", 0.03, "--requests-per-s", 100_000)
    done = run(*words, "--core-price", 0.05, "--gib-price", 0.01)
    assert done.exit_code == 0, done.stderr
    assert "USD" in done.stdout
    found = json.loads(run(*words, "-o", "json").stdout)["plan"]
    assert found["p99_us"] <= 30
    assert found["cores"] >= 2
    missed = run(trace, *TABLES, "--calibration", file, "--p99-ms", 0.001)
    assert (missed.exit_code, "no cache meets the target of p99" in missed.stderr) == (2, True)


def test_plot_is_svg(tmp_path, trace):
    path = tmp_path / "curves.svg"
    assert run(trace, *TABLES, "--no-latency", "--plot", path).exit_code == 0
    root = ElementTree.fromstring(path.read_text())
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"user", "ad", "100 %"} <= set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    assert chart.size_label(2_500) == "2.5 kB"


@pytest.mark.parametrize("option", ["--plot", "--yaml", "--save-calibration", "--save-trace"])
def test_file_that_cannot_be_written_is_reported_before_the_work(tmp_path, trace, option):
    path = tmp_path / "gone/out.svg"
    done = run(trace, *TABLES, option, path)
    assert done.exit_code == 2
    assert f"error: {option} {path}: {path.parent} is not a folder to write into" in done.stderr


def test_png_without_matplotlib_names_the_extra(tmp_path, trace, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    done = run(trace, *TABLES, "--no-latency", "--plot", tmp_path / "curves.png")
    assert (done.exit_code, "pip install 'hps-server[plot]'" in done.stderr) == (2, True)
    done = run(trace, *TABLES, "--no-latency", "--plot", tmp_path / "curves.pdf")
    assert "name it .svg or .png" in done.stderr


def test_keys_without_rows_are_reported(tmp_path, repository):
    path = tmp_path / "keys.parquet"
    pq.write_table(pa.table({"user": np.where(np.arange(SAMPLES) % 4, USER, -1 - USER)}), path)
    done = run(path, "--repository", repository, "--no-latency")
    assert "% of the keys of table user have no row" in done.stderr
    assert "the trace has no keys of ad" in done.stderr
    pq.write_table(pa.table({"user": -1 - USER}), path)
    done = run(path, "--repository", repository, "--no-latency")
    assert (done.exit_code, "no key of the trace has a row in table user" in done.stderr) == (
        1,
        True,
    )


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        ({"usr": USER}, "no feature or table 'usr'"),
        ({"user": USER * 0.5}, "not integer keys"),
        ({"user": USER[:0]}, "the trace is empty"),
        ({"user": USER[:500]}, "the trace has 500 keys, too few to plan by"),
        ({"user": np.arange(ROWS + 1)}, "2,001 different keys of table user, which has 2,000 rows"),
        ({"0/KEYS": USER}, "--form features"),
        ({"x/user": USER}, "NUMBER/TENSOR"),
    ],
)
def test_wrong_arrays_are_rejected(tmp_path, array, reason):
    np.savez(tmp_path / "keys.npz", **array)
    done = run(tmp_path / "keys.npz", *TABLES, "--no-latency")
    assert (done.exit_code, reason in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("keys.csv", "price\n1\n", "no column has the name of a feature or table"),
        ("keys.csv", "user\n1.5\n", "'1.5' is not a whole number"),
        ("keys.csv", "user\n99999999999999999999\n", "is not a whole number from -2^63"),
        ("keys.npz", "no archive", "not an .npz"),
        ("keys.parquet", "no parquet", "keys.parquet"),
        ("keys.trace.xz", "not compressed", "keys.trace.xz"),
        ("keys.trace", "123", "no multiple of 8"),
        ("keys.bin", "", "unknown format"),
        ("none.npz", None, "there is no file"),
    ],
)
def test_wrong_files_are_rejected(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_text(content)
    done = run(tmp_path / name, "--table", f"user={ROWS}x8", "--no-latency")
    assert done.exit_code in (1, 2)
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "say where the tables are described"),
        ((*TABLES, "--repository", "models"), "say where the tables are described"),
        ((*TABLES, "--no-latency", "--p99-ms", 1), "--p99-ms needs latencies"),
        ((*TABLES, "--no-latency", "--calibration", "x"), "--no-latency measures nothing"),
        ((*TABLES, "--no-latency", "--set", "a=b"), "--set changes a configuration"),
        ((*TABLES, "--no-latency", "--redis", "cache"), "addresses"),
    ],
)
def test_contradictory_options_are_rejected(trace, words, reason):
    done = run(trace, *words)
    assert (done.exit_code, reason in done.stderr) == (2, True), done.stderr


def test_unknown_model_has_a_hint(trace, repository):
    done = run(trace, "--repository", repository, "--model", "ctx")
    assert (done.exit_code, "did you mean" in done.stderr) == (2, True), done.stderr
