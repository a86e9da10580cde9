"""Inference: internal errors, API keys, metrics and logs."""

from __future__ import annotations

import logging
import time

import pytest

from hps.config import Settings
from hps.config.admission_settings import BatchingSettings
from hps.config.server_settings import ServerSettings
from services.frontend.auth import Authorizer
from services.frontend.http.app import data_app
from services.frontend.state import FrontendState

PATH = "/v2/models/words.lookup/infer"
LEFT = {"name": "left", "shape": [1, 2], "datatype": "INT64", "data": [1, 99]}
GOOD = {"inputs": [LEFT]}
ROWS = [[2.0 + 98 - 99, 1.125, 1.25]]  # the row of key 1, plus the zeros of key 99


def test_unexpected_error_is_logged_and_hidden_from_clients(small, ask, monkeypatch, caplog):
    endpoint = small.state.entries["words.lookup"].endpoint

    def broken(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr(endpoint, "submit", broken)
    reply = ask(small.app(), "POST", PATH, GOOD, {"X-Request-ID": "r-9"})
    assert reply.status == 500
    assert reply.error == "internal error; the server's log has it under id r-9"
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "request_id=r-9" in record.getMessage()
    assert record.exc_info
    reply = ask(small.app(), "POST", PATH, GOOD)
    assert reply.error.rpartition(" ")[2] in caplog.records[1].getMessage()


def test_requests_are_logged_at_debug_level(small, ask, caplog):
    with caplog.at_level("DEBUG", "hps.access"):
        ask(small.app(), "POST", PATH, GOOD, {"X-Request-ID": "r-1"})
        ask(small.app(), "POST", PATH, b"")
    with caplog.at_level("INFO", "hps.access"):
        ask(small.app(), "POST", PATH, GOOD)
    first, second = (record.getMessage() for record in caplog.records)
    reported = (
        "request request_id=r-1 protocol=http model=words.lookup model_version=1 status=200 dur_ms="
    )
    assert first.startswith(reported)
    assert first.endswith(" keys=2 misses=1")
    assert "status=400" in second


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"X-API-Key": "x" * 16}, 401),
        ({"X-API-Key": " "}, 401),
        ({"Authorization": "Basic " + "r" * 16}, 401),
        ({"X-API-Key": "r" * 16}, 200),
        ({"Authorization": "Bearer " + "r" * 16}, 200),
        ({"Authorization": "bearer  " + "a" * 16}, 200),
    ],
)
def test_api_key_is_required(small, ask, headers, status, key_guard):
    reply = ask(small.app(guard=key_guard), "POST", PATH, GOOD, headers)
    assert reply.status == status
    if status == 401:
        assert reply.headers["www-authenticate"].startswith("Bearer")
        assert "API key" in reply.error


def test_unknown_model_is_unauthenticated_without_a_key(small, ask, key_guard):
    reply = ask(small.app(guard=key_guard), "POST", "/v2/models/nope/infer", GOOD)
    assert reply.status == 401


def test_successes_and_failures_are_counted(small, ask):
    app = small.app()
    before = time.time_ns() // 1_000_000
    for _ in range(3):
        ask(app, "POST", PATH, GOOD)
    ask(app, "POST", PATH, b"")
    ask(app, "POST", "/v2/models/nope/infer", GOOD)
    stats = small.state.entries["words.lookup"].statistics.as_json("words.lookup", "1")
    assert stats["inference_count"] == stats["execution_count"] == 3
    inference = stats["inference_stats"]
    assert inference["success"]["count"] == 3
    assert inference["fail"]["count"] == 1
    stages = ("compute_input", "compute_infer", "compute_output")
    assert sum(inference[s]["ns"] for s in stages) == inference["success"]["ns"] > 0
    assert before - 1 <= stats["last_inference"] <= time.time_ns() // 1_000_000 + 1
    assert [b["batch_size"] for b in stats["batch_stats"]] == [1]
    text = small.node.metrics.render().decode()
    counted = (
        'hps_request_duration_seconds_count{code="%s",method="infer",model="%s",protocol="http",'
        'version="%s"} %s'
    )
    for code, model, version, times in (
        ("200", "words.lookup", "1", 3.0),
        ("400", "words.lookup", "1", 1.0),
        ("404", "", "", 1.0),
    ):
        assert counted % (code, model, version, times) in text


def test_rejections_are_counted(small, ask, key_guard):
    ask(small.app(max_body_bytes=1024), "POST", PATH, bytes(2000))
    ask(small.app(guard=key_guard), "POST", PATH, GOOD)
    text = small.node.metrics.render().decode()
    assert 'hps_requests_refused_total{reason="too_large"} 1.0' in text
    assert 'hps_requests_refused_total{reason="unauthenticated"} 1.0' in text


def test_batch_counts_as_one_execution(small, http):
    settings = ServerSettings(batching=BatchingSettings(at_once=1))
    state = FrontendState(settings=Settings(server=settings))
    state.serve(small.node)
    app, entry = data_app(state, settings, Authorizer()), state.entries["words.lookup"]

    async def together():
        small.store.gate.clear()
        wires = []
        for keys in ([15], [1, 2], [15, 3, 4]):
            protocol, wire = http.connect(app)
            wires.append(wire)
            await http.read(protocol, http.binary(keys))
        assert entry.endpoint.running == 3
        small.store.gate.set()
        await http.until(lambda: all(wire.statuses for wire in wires))
        assert [wire.statuses for wire in wires] == [[200]] * 3

    http.run(together)
    stats = entry.statistics.as_json("words.lookup", "1")
    assert (stats["inference_count"], stats["execution_count"]) == (6, 2)
    found = {each["batch_size"]: each["compute_infer"]["count"] for each in stats["batch_stats"]}
    assert found == {1: 1, 5: 1}
