"""The admin port: status, tables, rows, metrics, roles."""

from __future__ import annotations

import pytest

from services.frontend.auth import Authorizer
from services.frontend.http.app import admin_app
from services.frontend.state import FrontendState

LEFT = {"name": "left", "shape": [1, 2], "datatype": "INT64", "data": [1, 99]}


def test_admin_port_answers_requests_of_the_data_port(admin, call):
    reply = call(admin, "POST", "/v2/models/words.lookup/infer", json={"inputs": [LEFT]})
    assert reply.json()["parameters"]["hps_defaulted"] == 1


def test_metrics_are_exposed(admin, call):
    reply = call(admin, "GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert "hps_request_duration_seconds" in reply.text


def test_status_lists_models_and_tables(small, admin, call):
    status = call(admin, "GET", "/v1/status").json()
    assert status["phase"] == "ready"
    assert status["models"] == call(admin, "GET", "/v1/models").json()["models"]
    tables = call(admin, "GET", "/v1/tables").json()["tables"]
    assert [(t["model"], t["name"]) for t in tables] == [
        ("ctr", "users"),
        ("ctr", "items"),
        ("words", "left"),
        ("words", "right"),
        ("halves", "half"),
    ]


def test_status_reports_loading(small, call):
    state = FrontendState()
    state.loading.append({"title": "t", "done": 1, "total": 2, "unit": "rows"})
    app = admin_app(state, small.settings, Authorizer())
    status = call(app, "GET", "/v1/status").json()
    assert status["phase"] == "starting"
    assert status["loading"] == state.loading
    for path in ("/v1/models", "/v1/tables", "/v1/tables/a/b/rows?keys=1"):
        assert call(app, "GET", path).status_code == 503


def test_rows_are_shown_with_tier_and_age(admin, call):
    found = call(
        admin, "GET", "/v1/tables/ctr/items/rows?keys=1, 12,-7,18446744073709551615"
    ).json()
    assert (found["model"], found["table"], found["dim"]) == ("ctr", "items", 2)
    near, far, unknown, unsigned = found["rows"]
    assert (near["key"], near["found"], near["source"]) == (1, True, "cpu")
    assert near["vector"] == [1.0, 1.125]
    assert near["version"] == 1_700_000_000_000 << 20
    assert near["age_s"] > 0
    assert (far["source"], far["vector"]) == ("rocksdb", [12.0, 12.125])
    assert (unknown["found"], unknown["source"], unknown["vector"]) == (
        False,
        "default",
        [0.5, 0.5],
    )
    assert unknown["age_s"] is None
    assert unsigned["key"] == -1


def test_half_precision_rows_are_shown(admin, call):
    found = call(admin, "GET", "/v1/tables/halves/half/rows?keys=1").json()
    assert found["rows"][0]["vector"] == [1.0, 1.125, 1.25, 1.375]
    assert found["dtype"] == "float16"


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v1/tables/ctr/items/rows", 400, "query.keys: Field required"),
        ("/v1/tables/ctr/items/rows?keys=", 400, "1 to 1000 integers"),
        ("/v1/tables/ctr/items/rows?keys=1,x", 400, 'key "x" is not an integer'),
        ("/v1/tables/ctr/items/rows?keys=--1", 400, "is not an integer"),
        ("/v1/tables/ctr/items/rows?keys=²", 400, "is not an integer"),
        ("/v1/tables/ctr/items/rows?keys=18446744073709551616", 400, "does not fit into 64 bits"),
        ("/v1/tables/ctr/items/rows?keys=" + "1," * 1001, 400, "1 to 1000"),
        ("/v1/tables/ctr/item/rows?keys=1", 404, "no table 'item'; did you mean 'items'?"),
        ("/v1/tables/nope/items/rows?keys=1", 404, "unknown model: 'nope'"),
    ],
)
def test_invalid_row_requests_are_rejected(admin, path, status, message, call, error):
    reply = call(admin, "GET", path)
    assert reply.status_code == status
    assert message in error(reply)


def test_each_route_requires_its_role(small, call, error, key_guard):
    app = admin_app(small.state, small.settings, key_guard)
    reader, writer, root = ({"X-API-Key": letter * 16} for letter in "rwa")
    for path in ("/v2", "/v2/models", "/v2/models/words", "/v2/models/stats"):
        assert call(app, "GET", path).status_code == 401
        assert call(app, "GET", path, headers={"X-API-Key": "x" * 16}).status_code == 401
        assert call(app, "GET", path, headers=reader).status_code == 200
    for path in ("/v1/status", "/v1/models", "/v1/tables", "/v1/tables/words/left/rows?keys=1"):
        assert call(app, "GET", path).status_code == 401
        for key in (reader, writer):
            reply = call(app, "GET", path, headers=key)
            assert reply.status_code == 403
            assert "needs role admin" in error(reply)
        assert call(app, "GET", path, headers=root).status_code == 200
    for path in ("/v2/health/live", "/v2/health/ready", "/metrics", "/docs", "/openapi.json"):
        assert call(app, "GET", path).status_code == 200
    assert call(app, "POST", "/v2/repository/index").status_code == 401


def test_hot_keys_are_listed(small, admin, call, monkeypatch):
    calls = []
    monkeypatch.setattr(
        type(small.node), "hot_keys", lambda _, *reported: calls.append(reported) or [1]
    )
    assert call(admin, "GET", "/v1/hotkeys?model=ctr&table=items&limit=1").json() == {"tables": [1]}
    call(admin, "GET", "/v1/hotkeys")
    assert calls == [("ctr", "items", 1), (None, None, 20)]
    monkeypatch.undo()
    assert call(admin, "GET", "/v1/hotkeys?model=ctr&table=nope").status_code == 404
    assert call(admin, "GET", "/v1/hotkeys?limit=0").status_code == 400
