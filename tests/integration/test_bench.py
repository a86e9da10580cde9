"""``hps bench`` against a real server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.peers.hps_server import Hps, start_hps
from hps.cli.main import app
from hps.client import Admin
from hps.client.errors import RetryLater
from tests.support.small_models import write_models

SHORT = ["--duration", "0.3", "--warmup", "0.1", "--rows", "100", "--distinct", "8"]


def bench(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def answered(server: Hps, protocol: str) -> float:
    with Admin(f"http://{server.admin}") as admin:
        return sum(
            sample.value
            for sample in admin.metrics()
            if sample.name == "hps_request_duration_seconds_count"
            and (sample.labels["protocol"], sample.labels["model"]) == (protocol, "clicks")
        )


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("way", [["--concurrency", "2"], ["--rate", "100"]])
def test_every_sent_request_is_counted(
    small_server: Hps, tmp_path: Path, protocol: str, way: list[str]
) -> None:
    at = small_server.address if protocol == "http" else small_server.grpc
    before = answered(small_server, protocol)
    file = tmp_path / "run.json"
    done = bench(
        "clicks", "--server", f"{protocol}://{at}", "--batch", 4, *way, *SHORT, "--json", file
    )
    assert done.exit_code == 0, done.output
    told = json.loads(file.read_text())
    assert told["errors"] == {}
    assert told["requests"] > 10
    assert 0 < told["latency_s"]["p50"] <= told["latency_s"]["max"]
    assert (told["model"], told["protocol"], told["batch"]) == ("clicks", protocol, 4)
    assert told["server"].startswith("hps ")
    # In addition those of the warm-up, and the first one.
    assert answered(small_server, protocol) - before > told["requests"]
    assert f"{told['requests']:,}" in done.stdout
    assert ("sent late by" in done.stdout) == ("--rate" in way)


def test_bench_sends_generated_requests_and_compares_two_runs(
    small_server: Hps, small_repository: Path, tmp_path: Path
) -> None:
    made = ["generate", "requests", "clicks", "--repository", str(small_repository)]
    made += ["--out", str(tmp_path / "r.npz"), "--count", "5", "--batch", "3"]
    assert CliRunner().invoke(app, made).exit_code == 0
    url = f"http://{small_server.address}"
    runs = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, source in zip(runs, ("--requests", "--repository"), strict=True):
        given = tmp_path / "r.npz" if source == "--requests" else small_repository
        done = bench(
            "clicks", "--server", url, "--batch", "3", source, given, *SHORT, "--json", file
        )
        assert done.exit_code == 0, done.output
        assert "have no row" not in done.stderr
    done = bench("--compare", *runs)
    assert done.exit_code == 0, done.output
    assert "keys was of r.npz" in done.stderr


def test_bench_of_lookups_sends_only_keys_of_the_model(
    small_server: Hps, small_repository: Path
) -> None:
    url = f"http://{small_server.address}"
    done = bench(
        "clicks.lookup", "--server", url, "--repository", small_repository, *SHORT, "--count", "3"
    )
    assert done.exit_code == 0, done.output
    assert "have no row" not in done.stderr


def test_bench_warns_about_keys_without_rows(small_server: Hps) -> None:
    """Items are -50 … 49 and users 0 … 99."""
    url = f"grpc://{small_server.grpc}"
    done = bench(
        "clicks", "--server", url, "--keys", "uniform", *SHORT, "--rows", 10_000, "--count", "3"
    )
    assert done.exit_code == 0, done.output
    assert "have no row, so this measures defaults" in done.stderr
    assert "no row (default)" in done.stdout


@pytest.fixture(scope="module")
def caching_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hps]:
    """``hps serve`` on ``write_models`` that answers from its CPU cache, which ranks keys."""
    folder = tmp_path_factory.mktemp("caching")
    write_models(folder / "models")
    with start_hps(folder, tiers={"mapped": {"memory_bytes": 0}}) as server:
        yield server


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_bench_sends_the_servers_hottest_keys(
    caching_server: Hps, tmp_path: Path, protocol: str
) -> None:
    """Items are -50 … 49, those of made-up requests 0 … 99,999."""
    at = caching_server.address if protocol == "http" else caching_server.grpc
    file, admin = tmp_path / "run.json", f"http://{caching_server.admin}"
    few = ["--duration", "0.2", "--warmup", "0", "--distinct", "8", "--json", file]
    for model in ("clicks", "words", "clicks.lookup"):
        words = [model, "--server", f"{protocol}://{at}", "--keys-from", admin]
        done = bench(*words, "--batch", 4, *few)
        assert done.exit_code == 0, done.output
        told = json.loads(file.read_text())
        assert told["keys"] == "zipf:1.2 of the server's hottest keys"
        assert told["keys_from"] == {"cpu": 1.0}
        assert "keys answered from cpu 100.0 %" in done.stdout


def test_result_names_the_reason_for_missing_hot_keys(small_server: Hps, tmp_path: Path) -> None:
    """Port 8002 belongs to another server."""
    url, file = f"http://{small_server.address}", tmp_path / "run.json"
    few = ["--duration", "0.2", "--warmup", "0", "--distinct", "8", "--json", file]
    assert bench("clicks", "--server", url, *few).exit_code == 0
    told = json.loads(file.read_text())
    assert told["keys"].startswith("zipf:1.2 of 0 … 99,999 (no hot keys: ")
    assert "give --keys-from URL" in told["keys"]
    assert told["keys_from"]["default"] > 0.5
    another = [*few, "--keys-from", url]
    assert bench("clicks", "--server", url, *another).exit_code == 0
    assert "(no hot keys: " in json.loads(file.read_text())["keys"]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_bench_requires_a_model_name_if_there_are_several(small_server: Hps, scheme: str) -> None:
    done = bench(
        "-s", f"{scheme}://{small_server.address if scheme == 'http' else small_server.grpc}"
    )
    assert done.exit_code == 2
    assert "name the model: hps bench MODEL; the server has clicks" in done.stderr


def test_bench_reports_a_rejecting_model_once(small_server: Hps) -> None:
    done = bench("clicks", "--server", f"http://{small_server.address}", "--batch", "65", *SHORT)
    assert done.exit_code == 1
    assert "the server rejected the first request, so no other is sent" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_retry_later_answer_is_one_line_error(
    small_server: Hps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_given: object, **_more: object) -> None:
        raise RetryLater("no lookup node is there", 1.0)

    monkeypatch.setattr("hps.client.Client.infer", full)
    done = bench("clicks", "--server", f"http://{small_server.address}", *SHORT)
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "error: the server rejected the first request, so no other is sent: no lookup node is there"
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--server", "http://x:1", "--compare", "a", "b"], "remove the server and the model"),
        (["m", "--compare", "a", "b"], "remove the server and the model"),
        (["m", "--requests", "a", "--repository", "b"], "exclude each other"),
        (["m", "n"], "expected one model"),
    ],
)
def test_invalid_command_line_is_one_line_error(words: list[str], says: str) -> None:
    done = bench(*words)
    assert done.exit_code == 2
    assert says in done.stderr


def test_ctrl_c_prints_partial_results(small_server: Hps) -> None:
    url = f"http://{small_server.address}"
    words = ["clicks", "--server", url, "--warmup", "0", "--duration", "60"]
    command = [sys.executable, "-m", "hps.cli.main", "bench", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    before = answered(small_server, "http")
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        from tests.support.waiting import until

        until(lambda: answered(small_server, "http") > before + 5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "requests/s" in out
    assert "interrupted: these are the results until then" in err
