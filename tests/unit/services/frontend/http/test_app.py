"""The data port without inference: health, metadata, errors."""

from __future__ import annotations

import pytest

from hps.node.served_versions import ServedModels
from services.frontend import log_settings
from services.frontend.auth import Authorizer
from services.frontend.http.app import admin_app, data_app
from services.frontend.state import FrontendState

LEFT = {"name": "left", "shape": [1, 2], "datatype": "INT64", "data": [1, 99]}


@pytest.mark.parametrize("make", [data_app, admin_app])
def test_server_is_live_from_the_start_and_ready_with_its_models(small, make, call, error):
    state = FrontendState()
    app = make(state, small.settings, Authorizer())

    def ready():
        reply = call(app, "GET", "/v2/health/ready")
        return reply.status_code, error(reply) if reply.status_code != 200 else reply.json()

    assert ready()[0] == 503
    assert "loading" in ready()[1]
    assert call(app, "GET", "/v2/models/words/ready").status_code == 503
    assert call(app, "GET", "/v2/models/words").headers["retry-after"] == "1"
    state.serve(small.node)
    assert ready() == (200, {"ready": True})
    assert call(app, "GET", "/v2/models/words/ready").json() == {"name": "words", "ready": True}
    state.stop()
    assert ready()[0] == 503
    assert "shutting down" in ready()[1]
    assert call(app, "GET", "/v2/models/words/ready").status_code == 503
    assert call(app, "GET", "/v2/health/live").json() == {"live": True}


def test_server_without_a_model_is_not_ready(small, call, error):
    state = FrontendState()
    small.node.models = ServedModels()
    state.serve(small.node)
    reply = call(data_app(state, small.settings, Authorizer()), "GET", "/v2/health/ready")
    assert reply.status_code == 503
    assert "no model to serve" in error(reply)


def test_server_metadata_names_only_offered_extensions(data, call):
    for path in ("/v2", "/v2/"):
        found = call(data, "GET", path).json()
        assert found["name"] == "hps"
        assert found["extensions"] == [
            "binary_tensor_data",
            "model_configuration",
            "parameters",
            "statistics",
            "logging",
        ]


def test_log_settings_are_read_and_changed(data, call, error, monkeypatch):
    set_to = []
    monkeypatch.setattr(log_settings, "set_level", set_to.append)
    reported = call(data, "GET", "/v2/logging").json()
    assert (reported["log_file"], reported["log_error"]) == ("", True)
    assert call(data, "POST", "/v2/logging", json={"log_verbose_level": 3}).json() == reported
    assert set_to == ["debug"]
    reply = call(data, "POST", "/v2/logging", json={"log_inof": True})
    assert reply.status_code == 400
    assert "unknown log setting" in error(reply)


def test_index_lists_all_names(data, call):
    names = ["ctr", "ctr.lookup", "words", "words.lookup", "halves", "halves.lookup"]
    assert call(data, "GET", "/v2/models").json() == {"models": names}
    index = call(data, "POST", "/v2/repository/index", json={"ready": True}).json()
    assert [entry["name"] for entry in index] == names
    assert index[0] == {
        "name": "ctr",
        "version": "1",
        "state": "READY",
        "reason": "",
        "labels": [],
        "current": True,
        "weight": 100.0,
    }
    assert call(data, "POST", "/v2/repository/index").json() == index


def test_index_of_a_stopping_server_is_unavailable(small, data, call):
    small.state.stop()
    assert call(data, "POST", "/v2/repository/index", json={"ready": True}).json() == []
    index = call(data, "POST", "/v2/repository/index").json()
    assert {entry["state"] for entry in index} == {"UNAVAILABLE"}


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"ready":1}'])
def test_invalid_index_request_is_rejected(data, body, call):
    assert call(data, "POST", "/v2/repository/index", content=body).status_code == 400


def test_too_large_index_request_is_rejected(data, call):
    assert call(data, "POST", "/v2/repository/index", content=bytes(2 << 20)).status_code == 413


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/repository/models/words/load"),
        ("POST", "/v2/repository/models/words/unload"),
        ("POST", "/v2/repository/mine/index"),
        ("POST", "/v2/cudasharedmemory/region/x/unregister"),
        ("POST", "/v2/trace/setting"),
        ("POST", "/v2/models/words/generate"),
    ],
)
def test_unsupported_extensions_are_not_implemented(data, method, path, call, error):
    reply = call(data, method, path)
    assert reply.status_code == 501
    assert f"{path} is not offered" in error(reply)


@pytest.mark.parametrize("path", ["", "/config", "/stats", "/ready"])
def test_unknown_models_and_versions_are_not_found(data, path, call, error):
    reply = call(data, "GET", f"/v2/models/nope{path}")
    assert reply.status_code == 404
    assert error(reply) == "Request for unknown model: 'nope' is not found"
    reply = call(data, "GET", f"/v2/models/words/versions/9{path}")
    assert reply.status_code == 404
    assert "version 9 is not found; version 1 is served" in error(reply)
    assert call(data, "GET", f"/v2/models/words/versions/1{path}").status_code == 200


def test_statistics_of_one_model_and_of_all(data, call):
    call(data, "POST", "/v2/models/words.lookup/infer", json={"inputs": [LEFT]})
    (one,) = call(data, "GET", "/v2/models/words.lookup/stats").json()["model_stats"]
    assert one["inference_stats"]["success"]["count"] == 1
    everyone = call(data, "GET", "/v2/models/stats").json()["model_stats"]
    assert one in everyone
    assert len(everyone) == 6


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v2/health", 404),
        ("GET", "/v2/models/words/infer", 405),
        ("DELETE", "/v2/models/words", 405),
        ("POST", "/v2/models/words/infer/", 404),
        ("GET", "/v1/status", 404),
        ("GET", "/metrics", 404),
    ],
)
def test_unknown_paths_and_methods_are_rejected(data, method, path, status, call, error):
    reply = call(data, method, path)
    assert reply.status_code == status
    assert f"{method} {path}" in error(reply)
    if status == 405:
        assert reply.headers["allow"]


def test_unexpected_error_is_logged_once_and_hidden_from_clients(
    small, data, caplog, monkeypatch, call, error
):
    monkeypatch.setattr(FrontendState, "require_node", lambda _: 1 / 0)
    reply = call(data, "GET", "/v2/models")
    assert reply.status_code == 500
    assert "ZeroDivisionError" not in reply.text
    assert error(reply).startswith("internal error; the server's log has it under id")
    assert len(caplog.records) == 1


def test_request_id_is_returned(data, call):
    for path in ("/v2", "/nope"):
        reply = call(data, "GET", path, headers={"X-Request-ID": "r-1"})
        assert reply.headers["x-request-id"] == "r-1"
    assert "x-request-id" not in call(data, "GET", "/v2").headers
