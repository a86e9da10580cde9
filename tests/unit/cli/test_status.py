"""The numbers of ``hps status`` and ``hps tables``, computed from a server's reports."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from hps.cli.main import app
from hps.cli.serve import processes
from hps.cli.status import (
    _show,
    _show_processes,
    _show_tiers,
    _show_updates,
    dead_letters,
    keys_by_tier,
    requests,
)
from hps.cli.tables import flatten, show
from hps.client import Admin
from hps.client.admin import MetricSample


def test_keys_are_summed_over_models_and_tables() -> None:
    samples = [
        MetricSample("hps_lookup_keys_total", {"model": "a", "table": "t", "tier": "cpu"}, 3),
        MetricSample("hps_lookup_keys_total", {"model": "b", "table": "t", "tier": "cpu"}, 4),
        MetricSample("hps_lookup_keys_total", {"model": "b", "table": "t", "tier": "default"}, 1),
        MetricSample("other", {}, 9),
    ]
    assert keys_by_tier(samples) == {"cpu": 7, "default": 1}


def histogram(counts: dict[str, float], **labels: str) -> list[MetricSample]:
    name = "hps_request_duration_seconds_bucket"
    return [MetricSample(name, labels | {"le": bound}, n) for bound, n in counts.items()]


def test_quantiles_are_bucket_bounds_summed_over_codes() -> None:
    labels = {"model": "m", "method": "infer"}
    samples = histogram({"0.001": 40, "0.01": 98, "+Inf": 98}, code="200", **labels)
    samples += histogram({"0.001": 0, "0.01": 1, "+Inf": 2}, code="400", **labels)
    samples += histogram({"0.001": 0, "+Inf": 0}, code="200", model="idle", method="infer")
    assert requests(samples) == [
        {"model": "m", "method": "infer", "requests": 100, "p50_s": 0.01, "p99_s": 0.01}
    ]
    samples += histogram({"0.001": 0, "0.01": 0, "+Inf": 50}, code="504", **labels)
    assert requests(samples)[0]["p99_s"] is None


STATUS: dict[str, Any] = {
    "tiers": [{"name": "cpu", "kind": "cache"}, {"name": "rocksdb", "kind": "store"}],
    "models": [
        {
            "name": "m",
            "version": 3,
            "tables": [
                {
                    "name": "t",
                    "dim": 8,
                    "dtype": "float16",
                    "miss_policy": "wait",
                    "rows": {"cpu": 10, "rocksdb": 40},
                }
            ],
        }
    ],
}


def test_table_has_rows_of_the_store_and_bytes_of_vectors() -> None:
    (table,) = flatten(STATUS)
    assert (table["rows"], table["cached_rows"], table["bytes"]) == (40, 10, 40 * 8 * 2)
    assert (table["model"], table["version"], table["table"]) == ("m", 3, "t")


def test_approximate_rows_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    status = copy.deepcopy(STATUS)
    status["models"][0]["tables"][0]["rows_approximate"] = ["rocksdb"]
    (table,) = flatten(status)
    assert table["rows_approximate"]
    show([table])
    assert "~40" in (shown := capsys.readouterr().out)
    assert "~25.0 %" in shown
    show(flatten(STATUS))
    assert "~" not in capsys.readouterr().out


def with_redis(**redis: Any) -> dict[str, Any]:
    status = copy.deepcopy(STATUS)
    tier = {"name": "redis", "kind": "cache", "shared": True, "circuit": "open", **redis}
    status["tiers"].insert(1, tier)
    status["models"][0]["tables"][0]["rows"]["redis"] = 25
    return status


def test_shared_tier_does_not_count_as_cache(capsys: pytest.CaptureFixture[str]) -> None:
    status = with_redis()
    (table,) = flatten(status)
    assert (table["rows"], table["cached_rows"]) == (40, 10)
    report = {"rows": 25, "rows_approximate": False, "bytes": None}
    assert table["shared"] == {"redis": report}
    show([table])
    assert "in redis" in capsys.readouterr().out
    status["models"][0]["tables"][0]["bytes"] = {"redis": 2_000_000}
    (table,) = flatten(status)
    show([table])
    assert "25 (2.0 MB)" in capsys.readouterr().out


def test_shared_tier_may_be_the_only_store() -> None:
    status = with_redis()
    del status["models"][0]["tables"][0]["rows"]["rocksdb"]
    del status["tiers"][2]
    (table,) = flatten(status)
    assert (table["rows"], table["cached_rows"]) == (25, 10)


def test_unavailable_redis_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    _show_tiers({**with_redis(problem="redis: refused"), "keys_by_tier": {"cpu": 3}})
    shown = capsys.readouterr()
    assert "shared" in shown.out
    assert "redis does not answer: redis: refused" in shown.out + shown.err


def test_batches_of_the_gpu_are_shown_per_model(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {
        "requests": 1200,
        "samples": 3100,
        "batches": 100,
        "incomplete": 7,
        "slow": 5,
        "failed": 1,
    }
    gpu = {"name": "gpu", "kind": "cache", "scheduler": {"ctr/2": counts}}
    _show_tiers({"tiers": [gpu], "keys_by_tier": {"gpu": 3}})
    shown = capsys.readouterr().out
    assert "samples per batch" in shown
    (line,) = [line for line in shown.splitlines() if "ctr/2" in line]
    assert line.split() == ["ctr/2", "1,200", "100", "31.0", "7", "5", "1"]
    _show_tiers({"tiers": [gpu | {"scheduler": {}}], "keys_by_tier": {"gpu": 3}})
    assert "GPU batches" not in capsys.readouterr().out


def test_loading_server_shows_progress(capsys: pytest.CaptureFixture[str]) -> None:
    task = {"title": "loading rows", "done": 250, "total": 1000, "unit": "rows"}
    _show({"phase": "starting", "uptime_s": 3.2, "loading": [task]})
    shown = capsys.readouterr().out
    assert "Not ready (starting), up for 3 s" in shown
    assert "loading rows: 250 of 1,000 rows, 25.0 %" in shown


def test_tables_of_a_loading_server_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = {"phase": "loading", "ready": False, "uptime_s": 1.0, "loading": []}
    monkeypatch.setattr(Admin, "status", lambda _self: loading)
    result = CliRunner().invoke(app, ["tables"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the server is still loading its tables; hps status")


def test_processes_are_listed_if_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    node = {"role": "node", "pid": 70, "state": "ready"}
    worker = {"role": "worker", "number": 1, "pid": None, "state": "starting", "restarts": 3}
    _show_processes({"processes": [node]})
    assert capsys.readouterr().out == ""
    _show_processes({"processes": [node, worker]})
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[1:] == [["node", "70", "ready"], ["worker", "1", "-", "starting", "3"]]
    assert processes([node]) == "node 70"
    assert processes([node, worker | {"pid": 71}]) == "node 70; 1 worker: 71"


def test_requests_for_unknown_models_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    status = copy.deepcopy(STATUS) | {"version": "1", "uptime_s": 3.0}
    samples = histogram({"0.001": 3, "+Inf": 3}, model="m", method="infer", code="200")
    samples += histogram({"0.001": 2, "+Inf": 2}, model="", method="infer", code="404")
    monkeypatch.setattr(Admin, "status", lambda _self: copy.deepcopy(status))
    monkeypatch.setattr(Admin, "metrics", lambda _self: samples)
    report = json.loads(CliRunner().invoke(app, ["status", "--output", "json"]).stdout)
    assert [each["model"] for each in report["requests"]] == ["m"]
    assert report["unknown_model_requests"] == 2
    shown = CliRunner().invoke(app, ["status"]).stdout
    assert "2 requests rejected: no such model." in shown
    assert len([line for line in shown.splitlines() if " infer " in line]) == 1


def test_updates_and_dead_letters_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    stream = {
        "group": "hps.node.a",
        "state": "paused",
        "problem": None,
        "lag": 12_345,
        "tables": [{"age_s": 3.0}, {"age_s": 75.2}],
    }
    stuck = {**stream, "group": "hps.shared", "state": "running", "problem": "redis: away"}
    samples = [
        MetricSample("hps_update_dead_letters_total", {"reason": "row_size"}, 3.0),
        MetricSample("hps_update_dead_letters_total", {"reason": "checksum"}, 0.0),
    ]
    report = {"updates": [stream, stuck], "dead_letters": dead_letters(samples)}
    _show_updates(report)
    captured = capsys.readouterr()
    assert ["hps.node.a", "paused", "12,345", "1", "min", "15", "s"] in [
        line.split() for line in captured.out.splitlines()
    ]
    text = " ".join((captured.out + captured.err).split())
    assert "updates of hps.shared wait: redis: away" in text
    assert "3 update messages became dead letters since the start: 3 row_size" in text
    _show_updates({"updates": [], "dead_letters": {}})
    assert capsys.readouterr().out == ""
