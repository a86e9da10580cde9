"""``hps profile`` against a real server, and in the process."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.peers.hps_server import Hps
from hps.cli.main import app
from hps.client import Admin

FEW = ["--count", "10", "--warmup", "2"]


def profiled(*words: str | Path) -> Any:
    done = CliRunner().invoke(app, ["profile", *map(str, words), *FEW, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def paths(found: Any) -> set[tuple[str, ...]]:
    return {tuple(part["path"]) for part in found["parts"]}


def test_profile_shows_each_part_of_a_prediction(small_server: Hps) -> None:
    url = f"http://{small_server.admin}"
    found = profiled("clicks", "--server", url, "--batch", 4, "--rows", 50)
    assert paths(found) >= {
        ("parse",),
        ("lookup",),
        ("lookup", "memory"),
        ("feed",),
        ("dense",),
        ("serialise",),
        ("rest",),
    }
    top = [part["mean_us"] for part in found["parts"] if len(part["path"]) == 1]
    assert sum(top) == pytest.approx(found["mean_us"], rel=1e-6)
    assert (found["about"]["model"], found["about"]["batch"], found["requests"]) == (
        "clicks",
        4,
        10,
    )
    assert found["round_trip_p50_us"] > 0
    shown = CliRunner().invoke(app, ["profile", "clicks", "--server", url, *FEW]).stdout
    assert "serialise" in shown
    assert "Without a profile" in shown


def test_a_request_over_grpc_is_read_and_written_as_such(small_server: Hps) -> None:
    url = f"http://{small_server.admin}"
    found = profiled("clicks", "--server", url, "--batch", 4, "--rows", 50, "--protocol", "grpc")
    assert paths(found) >= {("parse",), ("lookup",), ("dense",), ("serialise",)}
    top = [part["mean_us"] for part in found["parts"] if len(part["path"]) == 1]
    assert sum(top) == pytest.approx(found["mean_us"], rel=1e-6)
    about = found["about"]
    assert (about["protocol"], about["batch"], about["process"]) == ("grpc", 4, "node")
    assert found["round_trip_p50_us"] is None, "the admin address takes none of gRPC"
    # What is no ModelInferRequest, and one of another model.
    for body in (b"{}", b"\x0a\x04none"):
        head = {"Content-Type": "application/grpc"}
        sent = urllib.request.Request(f"{url}/v1/profile/clicks", body, head)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(sent, timeout=60)
        with refused.value:
            assert refused.value.code == 400


def test_profile_shows_store_lookups_for_misses(small_server: Hps) -> None:
    """The stores do not have them either, so they stay missing."""
    where = (
        "words",
        "--server",
        f"http://{small_server.admin}",
        "--rows",
        1 << 40,
        "--keys",
        "uniform",
    )
    found = profiled(*where)
    assert paths(found) >= {
        ("lookup", "dedup"),
        ("lookup", "cpu"),
        ("lookup", "rocksdb"),
        ("lookup", "wait"),
        ("lookup", "merge"),
    }
    assert found["about"]["defaulted"] > 0


def test_the_node_of_a_configuration_is_profiled_in_this_process(
    small_repository: Path, tmp_path: Path
) -> None:
    settings = {
        "models": {"repository": str(small_repository)},
        "tiers": {"rocksdb": {"path": str(tmp_path / "rocksdb")}},
    }
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(settings))
    profiled("clicks", "--config", file, "--protocol", "grpc")
    found = profiled("clicks", "--config", file, "--repository", small_repository)
    assert paths(found) >= {("parse",), ("lookup", "memory"), ("dense",), ("serialise",)}
    assert found["round_trip_p50_us"] is None
    assert found["about"]["defaulted"] == 0


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_servers_hottest_keys_are_asked_for(small_server: Hps, protocol: str) -> None:
    url = f"http://{small_server.admin}"
    found = profiled("clicks", "--server", url, "--batch", 4, "--protocol", protocol)
    assert found["keys"]["of"] == "zipf:1.2 of the server's hottest keys"
    assert found["keys"]["from"] == {"memory": 1.0}
    assert found["keys"]["asked"] == 10 * 4 * 3  # of three features
    assert found["about"]["defaulted"] == 0


def test_profile_reports_keys_without_a_row(small_server: Hps) -> None:
    words = ["profile", "clicks", "--server", f"http://{small_server.admin}", "--rows", "10000"]
    done = CliRunner().invoke(app, [*words, "--keys", "uniform", *FEW])
    assert done.exit_code == 0, done.output
    assert "keys uniform of 0 … 9,999: no row (default)" in done.stdout
    assert "have no row, so this measures defaults" in done.stderr


def test_profile_errors_are_one_line(small_server: Hps) -> None:
    admin = f"http://{small_server.admin}"
    for words, code, says in (
        (["clicks", "-s", f"http://{small_server.address}"], 2, "is it the admin address?"),
        (["none", "-s", admin], 2, "'none' is not found"),
        (["-s", admin], 2, "name the model"),
        (["clicks", "-s", admin, "--set", "a=b"], 2, "give --config FILE"),
        (["clicks", "-s", admin, "--batch", "65"], 1, "65"),
        (["clicks", "--config", "none.yaml"], 2, "none.yaml"),
        (["clicks", "words", "-s", admin], 2, "expected one model"),
    ):
        done = CliRunner().invoke(app, ["profile", *words])
        assert (done.exit_code, says in done.stderr) == (code, True), (words, done.output)


def test_profile_ignores_other_requests(small_server: Hps) -> None:
    """A profiled request is not counted among those of clients, either."""

    def answered() -> float:
        with Admin(f"http://{small_server.admin}") as admin:
            name = "hps_request_duration_seconds_count"
            return sum(s.value for s in admin.metrics() if s.name == name)

    before = answered()
    profiled("words", "--server", f"http://{small_server.admin}", "--rows", 50)
    assert answered() - before == 12, "those without a profile, to compare with"
