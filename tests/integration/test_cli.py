"""The command line as its users run it: processes, pipes, files and signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

import hps
from benchmarks.peers.hps_server import Hps
from hps.client import Client
from tests.support.forked_hps import Ended, commands

Command = Callable[..., Ended]
COMMAND = [sys.executable, "-m", "hps.cli.main"]
REQUEST = {
    "user": [3],
    "item": [1, -2, 500],
    "history": [[1, 2], [], [-3]],
    "dense": [[1, 2, 3], [0.5, 0, 0], [0, 0, 0]],
}


@pytest.fixture(scope="module")
def hps_command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Runs one ``hps`` command to its end, by words; see `Commands.run`."""
    with commands(tmp_path_factory.mktemp("commands")) as made:
        yield made.run


def write_config(folder: Path, repository: Path, **more: Any) -> Path:
    settings = {
        "models": {"repository": str(repository)},
        "tiers": {"rocksdb": {"path": str(folder / "rocksdb")}, "cpu_cache": {"share": 0.2}},
        "server": {"http": {"port": 0}, "grpc": {"port": 0}, "admin": {"port": 0}},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(settings | more))
    return path


@pytest.fixture(scope="module")
def config(small_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose node is opened by one command at a time."""
    return write_config(tmp_path_factory.mktemp("here"), small_repository)


@pytest.fixture
def urls(small_server: Hps) -> tuple[str, str]:
    return f"http://{small_server.address}", f"http://{small_server.admin}"


@contextlib.contextmanager
def serving(config: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """``hps serve`` and the JSON line that it printed when it was ready."""
    with subprocess.Popen(
        [*COMMAND, "serve", "--config", str(config), "--output", "json", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            yield process, json.loads(line)
        finally:
            process.kill()
            process.communicate()


def expected(config: Path) -> dict[str, np.ndarray]:
    with hps.open(config) as node:
        history = np.array([1, 2, -3])
        from hps.types import JaggedKeys

        jagged = JaggedKeys(history, 3, np.array([0, 2, 2, 3]))
        features = {"user": REQUEST["user"], "item": REQUEST["item"], "history": jagged}
        dense = {"dense": np.array(REQUEST["dense"], np.float32)}
        return node.predict("clicks", features, dense).outputs


def test_every_form_of_a_request_gives_the_same_scores(
    config: Path, urls: tuple[str, str], hps_command: Command
) -> None:
    want = expected(config)
    text = json.dumps(REQUEST)
    flags = [f"--input={name}={json.dumps(value)}" for name, value in REQUEST.items()]
    server = ["--server", urls[0], "--output", "json"]
    here = ["--config", config, "--output", "json"]
    ways = [
        hps_command("predict", "clicks", "--json", text, *server),
        hps_command("predict", "clicks", "--json", "-", *server, stdin=text),
        hps_command("predict", "clicks", *flags, *server),
        hps_command("predict", "clicks", "--json", text, *here),
        hps_command("predict", "clicks", "--json", text, "--server", urls[1], "--output", "json"),
    ]
    for done in ways:
        assert done.code == 0, done.err
        for name, value in want.items():
            got = np.array(done.json["outputs"][name], np.float32)
            np.testing.assert_allclose(got, value, rtol=0, atol=1e-6)
        assert done.json["defaulted"] == 1  # item 500
        assert done.json["degraded"] == []


def test_top_k_keeps_the_best(config: Path, urls: tuple[str, str], hps_command: Command) -> None:
    want = expected(config)["score"].reshape(-1)
    for way in (["--server", urls[0]], ["--config", config]):
        done = hps_command(
            "predict", "clicks", "--json", json.dumps(REQUEST), "--top-k", "2", "-o", "json", *way
        )
        assert done.json["outputs"]["top_k_index"] == np.argsort(-want)[:2].tolist(), done.err


def test_explain_shows_vectors_sources_and_dense_inputs(
    config: Path, urls: tuple[str, str], hps_command: Command
) -> None:
    ask = ("predict", "clicks", "--json", json.dumps(REQUEST), "--explain")
    for way in (["--server", urls[0]], ["--config", config]):
        report = hps_command(*ask, "-o", "json", *way).json
        item = report["features"]["item"]
        assert item["keys"] == REQUEST["item"]
        assert item["sources"][2] == "default"
        assert set(item["sources"][:2]) <= {"cpu", "rocksdb"}
        assert item["vectors"] == [[1, 1.125], [-2, -1.875], [1, 2]]
        history = report["features"]["history"]
        assert history["offsets"] == [0, 2, 2, 3]
        assert history["vectors"] == [[1.5, 1.625], [0, 0], [-3, -2.875]]
        assert report["dense"] == {"dense": REQUEST["dense"]}
        assert item["network_input"] == (None if way[0] == "--server" else "item")
    shown = hps_command(*ask, "--server", urls[0]).out
    assert "feature history" in shown
    assert "500 (default)" in shown
    assert "network input" not in shown
    assert "dense input dense" in shown


def test_model_without_a_network_answers_vectors(
    config: Path, urls: tuple[str, str], hps_command: Command
) -> None:
    for way in (["--server", urls[0]], ["--config", config]):
        done = hps_command("predict", "words", "--input", "word=1,2,-4", "-o", "json", *way)
        assert done.code == 0, done.err
        vectors = np.array(done.json["outputs"]["word"])
        assert vectors[:, 0].tolist() == [1, 2, 0]
        assert done.json["defaulted"] == 1


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pa.Table]:
    """300 samples as Parquet, CSV and JSONL, with jagged histories and keys beyond 2^63."""
    folder = tmp_path_factory.mktemp("samples")
    random = np.random.default_rng(3)
    table = pa.table(
        {
            "note": ["x"] * 300,
            "user": random.integers(0, 120, 300),
            "item": random.integers(-60, 60, 300).astype(np.int64).view(np.uint64),
            "history": [random.integers(0, 50, n).tolist() for n in random.integers(0, 4, 300)],
            "dense": random.normal(size=(300, 3)).astype(np.float32).tolist(),
        }
    )
    parquet.write_table(table, folder / "samples.parquet")
    rows = table.to_pylist()
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        f"{r['note']},{r['user']},{r['item']},{' '.join(map(str, r['history']))},"
        f"{' '.join(map(repr, r['dense']))}\n"
        for r in rows
    ]
    (folder / "samples.csv").write_text("note,user,item,history,dense\n" + "".join(lines))
    return folder, table


def test_files_of_every_format_give_the_same_scores(
    samples: tuple[Path, pa.Table],
    config: Path,
    urls: tuple[str, str],
    tmp_path: Path,
    hps_command: Command,
) -> None:
    folder, table = samples
    from hps.types import JaggedKeys

    bags = table["history"].to_pylist()
    ends = np.cumsum([0] + [len(bag) for bag in bags])
    flat = np.array([key for bag in bags for key in bag], np.int64)
    features = {
        "user": table["user"].to_numpy(),
        "item": table["item"].to_numpy(),
        "history": JaggedKeys(flat, 300, ends),
    }
    dense = {"dense": np.array(table["dense"].to_pylist(), np.float32)}
    with hps.open(config) as node:
        parts = []
        for start in range(0, 300, 60):  # max_batch_size is 64
            part = slice(start, start + 60)
            bag = ends[start : start + 61]
            chosen = {name: features[name][part] for name in ("user", "item")}
            chosen["history"] = JaggedKeys(flat[bag[0] : bag[-1]], 60, bag - bag[0])
            parts.append(node.predict("clicks", chosen, {"dense": dense["dense"][part]}).outputs)
    want = {name: np.concatenate([p[name] for p in parts]).reshape(-1) for name in parts[0]}
    ways = {
        "samples.parquet": ("a.parquet", ["--server", urls[0]]),
        "samples.csv": ("b.csv", ["--server", urls[0]]),
        "samples.jsonl": ("c.jsonl", ["--config", config]),
        "./samples.parquet": ("d.npz", ["--config", config]),
    }
    for source, (name, way) in ways.items():
        out = tmp_path / name
        done = hps_command(
            "predict", "clicks", folder / source, "--out", out, "--batch-size", "60", *way
        )
        assert done.code == 0, done.err
        assert "300 rows scored" in done.err
        got = read_scores(out)
        assert set(got) == set(want)
        for output, value in want.items():
            scores = got[output].astype(np.float32)  # text carries the digits that name it
            np.testing.assert_allclose(scores, value, rtol=0, atol=1e-6)
    # Without --batch-size: no more than the model takes at once.
    piped = hps_command("predict", "clicks", folder / "samples.csv", "--server", urls[0])
    assert piped.code == 0, piped.err
    rows = [json.loads(line) for line in piped.out.splitlines()]
    np.testing.assert_allclose([row["score"] for row in rows], want["score"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", ["server", "config"])
def test_missing_default_scores_empty_cells_with_the_default(
    urls: tuple[str, str], config: Path, tmp_path: Path, hps_command: Command, way: str
) -> None:
    path = tmp_path / "s.tsv"
    path.write_text("1\t2\t3\t1 2 3\n0x1\t\t3\t1 2 3\n")
    known = tmp_path / "known.csv"
    known.write_text("user,item,history,dense\n1,2,3,1 2 3\n1,987654321,3,1 2 3\n")
    at = ["--server", urls[0]] if way == "server" else ["--config", config]
    names = ["--columns", "user,item,history,dense", "--missing", "default", "--hex-keys"]
    done = hps_command("predict", "clicks", path, *names, *at)
    assert done.code == 0, done.err
    assert done.out == hps_command("predict", "clicks", known, *at).out
    rejected = hps_command("predict", "clicks", path, *names[:2], *at)
    assert rejected.code == 1
    assert "'item'" in rejected.err


def read_scores(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: arrays[name].reshape(-1) for name in arrays}
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}
    table = parquet.read_table(path) if path.suffix == ".parquet" else csv.read_csv(path)
    return {name: table[name].to_numpy() for name in table.column_names}


def test_bad_cell_fails_with_its_row_and_no_output(
    urls: tuple[str, str], tmp_path: Path, hps_command: Command
) -> None:
    path = tmp_path / "s.csv"
    path.write_text("user,item,history,dense\n1,2,3,1 2 3\n1,1.42e+19,3,1 2 3\n")
    out = tmp_path / "o.csv"
    done = hps_command("predict", "clicks", path, "--out", out, "--server", urls[0])
    assert done.code == 1
    assert done.err.startswith("error: column 'item', row 2: '1.42e+19' is not a whole number")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.csv"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["predict", "nope", "--input", "a=1"], 2, "unknown model: 'nope'"),
        (["predict", "clicks", "--input", "usr=1"], 1, "did you mean 'user'?"),
        (["predict", "clicks", "--input", "user"], 2, "must look like name=1,2,3"),
        (["predict", "clicks", "none.csv"], 2, "there is no file none.csv"),
        (["predict", "clicks", "--json", "{"], 1, "not JSON"),
    ],
)
def test_user_errors_are_one_line(
    words: list[str], code: int, message: str, urls: tuple[str, str], hps_command: Command
) -> None:
    done = hps_command(*words, "--server", urls[0])
    assert done.code == code
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert message in done.err


def test_lookup_explains_rows(config: Path, urls: tuple[str, str], hps_command: Command) -> None:
    for way in (["--server", urls[1]], ["--config", config]):
        keys = ["-3", str(2**64 - 4), "700"]
        done = hps_command("lookup", "clicks", "items", *keys, "-o", "json", *way)
        assert done.code == 0, done.err
        first, same, unknown = done.json["rows"]
        assert first["key"] == -3
        assert first["vector"] == [-3, -2.875]
        assert first["source"] in ("cpu", "rocksdb")
        assert 0 < first["age_s"] < 3600
        assert same["key"] == 2**64 - 4
        assert same["vector"] == [-4, -3.875]
        assert (unknown["found"], unknown["source"], unknown["vector"]) == (
            False,
            "default",
            [1, 2],
        )
    shown = hps_command("lookup", "clicks", "items", "0x5", "700", "--explain", "--server", urls[1])
    titles, first, _ = shown.out.splitlines()
    assert titles.split() == ["key", "from", "age", "vector"]
    assert first.split()[0] == "5"
    assert "1 of 2 keys unknown" in shown.err


def test_many_keys_are_looked_up_in_several_calls(
    urls: tuple[str, str], hps_command: Command
) -> None:
    keys = [str(2**64 - 1 - i) for i in range(450)]
    done = hps_command("lookup", "clicks", "items", *keys, "-o", "json", "--server", urls[1])
    assert [row["key"] for row in done.json["rows"]] == [int(key) for key in keys]
    assert [row["found"] for row in done.json["rows"]] == [i < 50 for i in range(450)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope", "items", "1"], "unknown model: 'nope'"),
        (["clicks", "item", "1"], "no table 'item'"),
        (["clicks", "items", "1", "x"], "'x' is not a key"),
        (["clicks", "items", str(2**64)], "is outside -2^63 to 2^64-1"),
    ],
)
def test_lookup_errors_are_one_line(
    words: list[str], message: str, config: Path, urls: tuple[str, str], hps_command: Command
) -> None:
    for way in (["--server", urls[1]], ["--config", config]):
        done = hps_command("lookup", *words, *way)
        assert done.code == 2
        assert done.err.count("\n") == 1
        assert message in done.err


def test_tables_are_listed(config: Path, urls: tuple[str, str], hps_command: Command) -> None:
    for way in (["--server", urls[1]], ["--config", config]):
        done = hps_command("tables", "-o", "json", *way)
        found = {(t["model"], t["table"]): t for t in done.json}
        assert {key: t["rows"] for key, t in found.items()} == {
            ("clicks", "users"): 100,
            ("clicks", "items"): 100,
            ("words", "words"): 1000,
        }
        assert found["words", "words"]["bytes"] == 32_000
        assert found["words", "words"]["dim"] == 8
        assert len(hps_command("tables", "clicks", "-o", "json", *way).json) == 2
        wrong = hps_command("tables", "none", *way)
        assert wrong.code == 2
        assert "there is clicks, words" in wrong.err
    assert "1,000" in hps_command("tables", "--server", urls[1]).out


def test_status_counts_answered_requests(urls: tuple[str, str], hps_command: Command) -> None:
    def answered() -> dict[str, int]:
        return hps_command("status", "-o", "json", "--server", urls[1]).json["keys_by_tier"]

    before = answered()
    hps_command("predict", "words", "--input", "word=1,2,-4,-5", "--server", urls[0])
    after = answered()
    assert after["default"] - before.get("default", 0) == 2
    assert sum(after.values()) - sum(before.values()) == 4
    shown = hps_command("status", "--server", urls[1]).out
    for word in ("clicks", "words", "rocksdb", "p99 below", "infer"):
        assert word in shown


def test_wrong_port_is_reported(urls: tuple[str, str], hps_command: Command) -> None:
    done = hps_command("status", "--server", urls[0])
    assert done.code == 2
    assert "is it the admin address?" in done.err


def test_doctor_finds_nothing_in_a_sound_setup(
    config: Path, urls: tuple[str, str], hps_command: Command
) -> None:
    done = hps_command("doctor", "--config", config, "--server", urls[0], "-o", "json")
    assert done.code == 0, done.out
    verdicts = {check["name"]: check["verdict"] for check in done.json}
    for name in ("configuration", "access", "model clicks", "database", "server"):
        assert verdicts[name] == "OK"
    assert "server" in hps_command("doctor", "--server", urls[0]).out


def test_doctor_reports_each_fault_with_its_remedy(
    small_repository: Path, small_server: Hps, tmp_path: Path, hps_command: Command
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    port = small_server.port
    with contextlib.ExitStack() as stack:
        import socket

        other = stack.enter_context(socket.socket())
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = write_config(
            tmp_path,
            small_repository,
            models={"repository": str(small_repository), "serve": {"words": {"version": 7}}},
            tiers={"rocksdb": {"path": str(blocked / "data")}},
            server={
                "http": {"port": port},
                "grpc": None,
                "admin": {"port": other.getsockname()[1]},
            },
        )
        done = hps_command("doctor", "--config", config, "-o", "json")
    assert done.code == 1
    checks = {check["name"]: check for check in done.json}
    assert checks["http port"]["verdict"] == "WARN"
    assert "served by hps, perhaps another one" in checks["http port"]["found"]
    assert checks["admin port"]["verdict"] == "WARN"  # who is silent may be hps
    assert "server.admin.port" in checks["admin port"]["remedy"]
    assert checks["model words"]["verdict"] == "FAIL"
    assert "no version 7" in checks["model words"]["found"]
    assert checks["database"]["verdict"] == "FAIL"
    assert "tiers.rocksdb.path" in checks["database"]["remedy"]
    assert all(check["remedy"] for check in done.json if check["verdict"] != "OK")
    unreachable = hps_command("doctor", "--server", "http://127.0.0.1:1", "-o", "json")
    assert unreachable.code == 1
    broken = tmp_path / "broken.yaml"
    broken.write_text("tiers: {cpu_cash: {}}")
    done = hps_command("doctor", "--config", broken, "--json")
    assert done.code == 2, "what it names could not be checked"
    assert "cpu_cache" in {c["name"]: c for c in done.json}["configuration"]["found"]


BROKEN = {
    "unknown key": ("tiers: {cpu_cach: {enabled: true}}", "cpu_cache"),
    "no repository": ("models: {repository: nowhere}", "nowhere"),
    "not yaml": ("models: [", "config.yaml"),
    "wrong type": ("server: {http: {port: many}}", "server.http.port"),
    "open door": ("models: {repository: .}\nserver: {http: {host: 0.0.0.0}}", "auth.mode"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_serve_exits_on_an_invalid_configuration(
    name: str, tmp_path: Path, hps_command: Command
) -> None:
    text, message = BROKEN[name]
    (tmp_path / "config.yaml").write_text(text)
    done = hps_command("serve", "--config", "config.yaml", cwd=tmp_path)
    assert done.code == 2
    assert done.out == ""
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.err


def test_serve_explains_the_option_for_a_bare_file(hps_command: Command) -> None:
    done = hps_command("serve", "my.yaml")
    assert done.code == 2
    assert done.err == "error: the configuration file is an option: hps serve --config my.yaml\n"


def test_serve_exits_on_a_port_in_use(
    small_server: Hps, small_repository: Path, tmp_path: Path, hps_command: Command
) -> None:
    config = write_config(tmp_path, small_repository)
    done = hps_command(
        "serve", "--config", config, "--set", f"server.http.port={small_server.port}"
    )
    assert done.code == 2
    assert "cannot listen on" in done.err
    assert "server.http.port" in done.err


def test_serve_exits_on_a_database_in_use_and_names_its_owner(
    small_repository: Path, tmp_path: Path, hps_command: Command
) -> None:
    folder = tmp_path / ("a folder with a long name " * 5).strip()
    folder.mkdir()
    config = write_config(folder, small_repository)
    with serving(config):
        for words in (["serve"], ["tables"], ["lookup", "words", "words", "1"]):
            done = hps_command(*words, "--config", config)
            assert done.code == 2
            errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1
            assert f"serve --config {config} --output json)" in errors[0]
            assert "tiers.rocksdb.path" in errors[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_exits_with_code_0_on_a_signal(
    number: signal.Signals, small_repository: Path, tmp_path: Path
) -> None:
    with serving(write_config(tmp_path, small_repository)) as (process, ready):
        assert ready["auth"] == "off"
        assert set(ready["models"]) == {"clicks", "words"}
        with Client(ready["endpoints"]["http"]) as client:
            assert client.ready()
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_serve_prints_models_and_addresses(small_repository: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, small_repository)
    with subprocess.Popen(
        [*COMMAND, "serve", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        shown = []
        assert process.stdout is not None
        for line in process.stdout:
            shown.append(line)
            if "is ready" in line:
                break
        process.terminate()
        assert process.wait(60) == 0
    text = "".join(shown)
    for word in ("clicks", "users", "1,000", "http://127.0.0.1:", "/metrics", "rocksdb", "access"):
        assert word in text


def test_killed_server_opens_its_database_again(small_repository: Path, tmp_path: Path) -> None:
    tiers = {"rocksdb": {"path": str(tmp_path / "rocksdb")}, "mapped": {"enabled": False}}
    config = write_config(tmp_path, small_repository, tiers=tiers)
    keys = np.arange(-5, 5)
    answers = []
    for attempt in range(2):
        with serving(config) as (process, ready):
            # The second start finds the rows in the database and loads nothing.
            stamps = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "rocksdb").glob("*.sst")}
            assert stamps
            if attempt == 0:
                before = stamps
            else:
                assert before.items() <= stamps.items()
            with Client(ready["endpoints"]["http"]) as client:
                answers.append(client.lookup("clicks", {"item": keys}).vectors["item"])
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait(60) == -signal.SIGKILL
    np.testing.assert_array_equal(answers[0], answers[1])
    assert answers[0][:, 0].tolist() == keys.tolist()


def test_api_key_is_required_and_accepted(
    small_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hps_command: Command
) -> None:
    secret = "0123456789abcdef-admin"
    config = write_config(
        tmp_path,
        small_repository,
        auth={"mode": "api_key", "keys": [{"name": "me", "role": "admin", "key": secret}]},
    )
    with serving(config) as (_process, ready):
        assert ready["auth"] == "api_key"
        http, admin = ready["endpoints"]["http"], ready["endpoints"]["admin"]
        ask = ("predict", "words", "--input", "word=1", "--server", http)
        rejected = hps_command(*ask)
        assert rejected.code == 1
        assert "HPS_API_KEY" in rejected.err
        assert hps_command(*ask, "--api-key", secret).code == 0
        assert hps_command("status", "--server", admin).code == 1
        check = [
            f"--set=server.{name}.port={url.rpartition(':')[2]}"
            for name, url in ready["endpoints"].items()
        ]
        report = hps_command("doctor", "--config", config, *check, "-o", "json").json
        assert {c["name"]: c["verdict"] for c in report}["http port"] == "WARN"
        monkeypatch.setenv("HPS_API_KEY", secret)
        assert hps_command("status", "--server", admin).code == 0
        assert hps_command("lookup", "words", "words", "1", "--server", admin).code == 0
        report = hps_command("doctor", "--config", config, *check, "-o", "json").json
        assert {c["name"]: c["verdict"] for c in report}["http port"] == "OK"


def test_serve_accepts_a_ps_json(
    small_repository: Path, tmp_path: Path, hps_command: Command
) -> None:
    model = {
        "model": "legacy",
        "sparse_files": [str(small_repository / "words/1/tables/words")],
        "embedding_table_names": ["t0"],
        "embedding_vecsize_per_table": [8],
        "maxnum_catfeature_query_per_table_per_sample": [4],
        "default_value_for_each_table": [0.5],
        "deployed_device_list": [0],
        "max_batch_size": 64,
        "gpucache": False,
    }
    path = tmp_path / "ps.json"
    path.write_text(json.dumps({"supportlonglong": True, "models": [model]}))
    settings = [
        f"--set=tiers.rocksdb.path={tmp_path / 'rocksdb'}",
        "--set=server.http.port=0",
        "--set=server.grpc.port=0",
        "--set=server.admin.port=0",
    ]
    with serving(path, *settings) as (_process, ready):
        http = ready["endpoints"]["http"]
        done = hps_command("predict", "legacy", "-i", "t0=7,-1", "--server", http, "-o", "json")
    assert [row[0] for row in done.json["outputs"]["t0"]] == [7, 0.5]


def test_version_prints_versions(hps_command: Command) -> None:
    done = hps_command("version", "--output", "json")
    assert done.json["hps"] == hps.__version__
    assert done.json["native core"] in ("compiled", "NumPy twins")
