"""Everything but inference: health, metadata, statistics, repository, admin; one shape of error."""

from __future__ import annotations

import asyncio
import re

import httpx
import jsonschema_rs
import numpy as np
import orjson
import pytest

from hps.config.auth import load_api_keys
from hps.config.schema import ApiKey, AuthSettings, ServerSettings
from services.frontend.app import admin_app, data_app
from services.frontend.auth import OpenGuard, guard
from services.frontend.state import State

LEFT = {"name": "left", "shape": [1, 2], "datatype": "INT64", "data": [1, 99]}


def key_guard():
    roles = {"read": "r", "write": "w", "admin": "a"}
    keys = [ApiKey(name=role, role=role, key=letter * 16) for role, letter in roles.items()]
    return guard(load_api_keys(AuthSettings(mode="api_key", keys=keys)))


def client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")


@pytest.fixture
def admin(small):
    return admin_app(small.state, small.settings, OpenGuard())


@pytest.fixture
def data(small):
    return data_app(small.state, small.settings, OpenGuard())


def ask(app, method, path, **options):
    async def once():
        async with client(app) as http:
            return await http.request(method, path, **options)

    return asyncio.run(once())


def error(reply):
    assert reply.headers["content-type"] == "application/json"
    found = reply.json()
    assert list(found) == ["error"]
    return found["error"]


# -- health ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [data_app, admin_app])
def test_alive_from_the_start_ready_when_models_are_there(small, make):
    state = State()
    app = make(state, small.settings, OpenGuard())

    def ready():
        reply = ask(app, "GET", "/v2/health/ready")
        return reply.status_code, error(reply) if reply.status_code != 200 else reply.json()

    assert ready()[0] == 503
    assert "loading" in ready()[1]
    assert ask(app, "GET", "/v2/models/words/ready").status_code == 503
    assert ask(app, "GET", "/v2/models/words").headers["retry-after"] == "1"
    state.serve(small.node)
    assert ready() == (200, {"ready": True})
    assert ask(app, "GET", "/v2/models/words/ready").json() == {"name": "words", "ready": True}
    state.stop()
    assert ready()[0] == 503
    assert "shutting down" in ready()[1]
    assert ask(app, "GET", "/v2/models/words/ready").status_code == 503
    assert ask(app, "GET", "/v2/health/live").json() == {"live": True}


def test_a_server_without_a_model_is_never_ready(small):
    state = State()
    small.node.models.clear()
    state.serve(small.node)
    reply = ask(data_app(state, small.settings, OpenGuard()), "GET", "/v2/health/ready")
    assert reply.status_code == 503
    assert "no model to serve" in error(reply)


# -- the protocol ----------------------------------------------------------------------------------


def test_server_metadata_names_only_what_there_is(data):
    for path in ("/v2", "/v2/"):
        found = ask(data, "GET", path).json()
        assert found["name"] == "hps"
        assert found["extensions"] == [
            "binary_tensor_data",
            "model_configuration",
            "parameters",
            "statistics",
        ]


def test_names(data):
    names = ["ctr", "ctr.lookup", "words", "words.lookup", "halves", "halves.lookup"]
    assert ask(data, "GET", "/v2/models").json() == {"models": names}
    index = ask(data, "POST", "/v2/repository/index", json={"ready": True}).json()
    assert [entry["name"] for entry in index] == names
    assert index[0] == {"name": "ctr", "version": "1", "state": "READY", "reason": ""}
    assert ask(data, "POST", "/v2/repository/index").json() == index


def test_the_index_of_a_server_that_stops(small, data):
    small.state.stop()
    assert ask(data, "POST", "/v2/repository/index", json={"ready": True}).json() == []
    index = ask(data, "POST", "/v2/repository/index").json()
    assert {entry["state"] for entry in index} == {"UNAVAILABLE"}


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"ready":1}'])
def test_an_index_request_at_fault(data, body):
    assert ask(data, "POST", "/v2/repository/index", content=body).status_code == 400


def test_an_index_request_that_is_too_large(data):
    assert ask(data, "POST", "/v2/repository/index", content=bytes(2 << 20)).status_code == 413


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/repository/models/words/load"),
        ("POST", "/v2/repository/models/words/unload"),
        ("POST", "/v2/repository/mine/index"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("POST", "/v2/cudasharedmemory/region/x/unregister"),
        ("GET", "/v2/logging"),
        ("POST", "/v2/trace/setting"),
        ("POST", "/v2/models/words/generate"),
    ],
)
def test_parts_of_the_protocol_that_are_not_offered(data, method, path):
    reply = ask(data, method, path)
    assert reply.status_code == 501
    assert f"{path} is not offered" in error(reply)


@pytest.mark.parametrize("path", ["", "/config", "/stats", "/ready"])
def test_unknown_models_and_versions(data, path):
    reply = ask(data, "GET", f"/v2/models/nope{path}")
    assert reply.status_code == 404
    assert error(reply) == "Request for unknown model: 'nope' is not found"
    reply = ask(data, "GET", f"/v2/models/words/versions/9{path}")
    assert reply.status_code == 404
    assert "version 9 is not found; version 1 is served" in error(reply)
    assert ask(data, "GET", f"/v2/models/words/versions/1{path}").status_code == 200


def test_statistics_of_one_and_of_all(data):
    ask(data, "POST", "/v2/models/words.lookup/infer", json={"inputs": [LEFT]})
    (one,) = ask(data, "GET", "/v2/models/words.lookup/stats").json()["model_stats"]
    assert one["inference_stats"]["success"]["count"] == 1
    everyone = ask(data, "GET", "/v2/models/stats").json()["model_stats"]
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
def test_paths_and_verbs_nobody_knows(data, method, path, status):
    reply = ask(data, method, path)
    assert reply.status_code == status
    assert f"{method} {path}" in error(reply)
    if status == 405:
        assert reply.headers["allow"]


def test_an_unexpected_error_is_logged_once_and_not_told(small, data, caplog, monkeypatch):
    monkeypatch.setattr(State, "require_node", lambda _: 1 / 0)
    reply = ask(data, "GET", "/v2/models")
    assert reply.status_code == 500
    assert "ZeroDivisionError" not in reply.text
    assert error(reply).startswith("internal error; the server's log has it under id")
    assert len(caplog.records) == 1


# -- admin -----------------------------------------------------------------------------------------


def test_the_admin_port_answers_the_data_ports_requests_too(admin):
    reply = ask(admin, "POST", "/v2/models/words.lookup/infer", json={"inputs": [LEFT]})
    assert reply.json()["parameters"]["hps_defaulted"] == 1


def test_metrics(admin):
    reply = ask(admin, "GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert "hps_request_duration_seconds" in reply.text


def test_status_models_tables(small, admin):
    status = ask(admin, "GET", "/v1/status").json()
    assert status["phase"] == "ready"
    assert status["models"] == ask(admin, "GET", "/v1/models").json()["models"]
    tables = ask(admin, "GET", "/v1/tables").json()["tables"]
    assert [(t["model"], t["name"]) for t in tables] == [
        ("ctr", "users"),
        ("ctr", "items"),
        ("words", "left"),
        ("words", "right"),
        ("halves", "half"),
    ]


def test_status_while_loading(small):
    state = State()
    state.loading.append({"title": "t", "done": 1, "total": 2, "unit": "rows"})
    app = admin_app(state, small.settings, OpenGuard())
    status = ask(app, "GET", "/v1/status").json()
    assert status["phase"] == "starting"
    assert status["loading"] == state.loading
    for path in ("/v1/models", "/v1/tables", "/v1/tables/a/b/rows?keys=1"):
        assert ask(app, "GET", path).status_code == 503


def test_rows_with_their_tier_and_age(admin):
    found = ask(admin, "GET", "/v1/tables/ctr/items/rows?keys=1, 12,-7,18446744073709551615").json()
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


def test_half_precision_rows(admin):
    found = ask(admin, "GET", "/v1/tables/halves/half/rows?keys=1").json()
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
def test_rows_at_fault(admin, path, status, message):
    reply = ask(admin, "GET", path)
    assert reply.status_code == status
    assert message in error(reply)


# -- keys ------------------------------------------------------------------------------------------


def test_who_may_do_what(small):
    app = admin_app(small.state, small.settings, key_guard())
    reader, writer, root = ({"X-API-Key": letter * 16} for letter in "rwa")
    for path in ("/v2", "/v2/models", "/v2/models/words", "/v2/models/stats"):
        assert ask(app, "GET", path).status_code == 401
        assert ask(app, "GET", path, headers={"X-API-Key": "x" * 16}).status_code == 401
        assert ask(app, "GET", path, headers=reader).status_code == 200
    for path in ("/v1/status", "/v1/models", "/v1/tables", "/v1/tables/words/left/rows?keys=1"):
        assert ask(app, "GET", path).status_code == 401
        for key in (reader, writer):
            reply = ask(app, "GET", path, headers=key)
            assert reply.status_code == 403
            assert "needs role admin" in error(reply)
        assert ask(app, "GET", path, headers=root).status_code == 200
    for path in ("/v2/health/live", "/v2/health/ready", "/metrics", "/docs", "/openapi.json"):
        assert ask(app, "GET", path).status_code == 200
    assert ask(app, "POST", "/v2/repository/index").status_code == 401


# -- OpenAPI ---------------------------------------------------------------------------------------


def openapi(app):
    return ask(app, "GET", "/openapi.json").json()


def test_the_document_describes_inference_and_one_shape_of_error(admin, data):
    for app in (admin, data):
        document = openapi(app)
        assert {"/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"} <= set(
            document["paths"]
        )
        for operations in document["paths"].values():
            for operation in operations.values():
                assert "422" not in operation["responses"]
                for status, response in operation["responses"].items():
                    if int(status) >= 400:
                        (schema,) = (c["schema"] for c in response["content"].values())
                        assert schema == {"$ref": "#/components/schemas/Error"}
        for reference in set(
            re.findall(r"#/components/schemas/(\w+)", orjson.dumps(document).decode())
        ):
            assert reference in document["components"]["schemas"]
    assert "/v1/status" in openapi(admin)["paths"]
    assert "/v1/status" not in openapi(data)["paths"]


def validator(document, schema):
    whole = {"components": document["components"], "$ref": f"#/components/schemas/{schema}"}
    return jsonschema_rs.validator_for(whole)


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("/v2", "ServerMetadata"),
        ("/v2/models", "ModelNames"),
        ("/v2/models/ctr", "ModelMetadata"),
        ("/v2/models/words/config", "ModelConfig"),
        ("/v2/models/stats", "Statistics"),
        ("/v2/models/ctr/ready", "ModelReady"),
        ("/v1/status", "Status"),
        ("/v1/models", "Models"),
        ("/v1/tables", "Tables"),
        ("/v1/tables/ctr/items/rows?keys=1,99", "Rows"),
    ],
)
def test_answers_are_as_the_document_says(admin, path, schema):
    validator(openapi(admin), schema).validate(ask(admin, "GET", path).json())


def test_inference_is_as_the_document_says(admin):
    document = openapi(admin)
    request = {
        "id": "x",
        "inputs": [LEFT],
        "outputs": [{"name": "left"}],
        "parameters": {"timeout": 0},
    }
    validator(document, "InferRequest").validate(request)
    reply = ask(admin, "POST", "/v2/models/words/infer", json=request)
    validator(document, "InferResponse").validate(reply.json())


def test_documentation_can_be_left_out(small):
    settings = ServerSettings(docs=False)
    for make in (data_app, admin_app):
        app = make(small.state, settings, OpenGuard())
        for path in ("/docs", "/openapi.json", "/redoc"):
            assert ask(app, "GET", path).status_code == 404


def test_keys_are_in_the_document_when_they_are_wanted(small, admin):
    assert "securitySchemes" not in openapi(admin)["components"]
    document = openapi(admin_app(small.state, small.settings, key_guard()))
    assert set(document["components"]["securitySchemes"]) == {"ApiKey", "Bearer"}
    assert "401" in document["paths"]["/v2/models"]["get"]["responses"]
    assert "security" not in document["paths"]["/metrics"]["get"]


# -- metadata --------------------------------------------------------------------------------------


def test_metadata_of_a_ranking_model(data):
    found = ask(data, "GET", "/v2/models/ctr").json()
    assert found["versions"] == ["1"]
    assert found["inputs"] == [
        {"name": "user", "datatype": "INT64", "shape": [-1, 1]},
        {"name": "item", "datatype": "INT64", "shape": [-1, 1]},
        {"name": "history", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "dense", "datatype": "FP32", "shape": [-1, 3]},
    ]
    assert found["outputs"] == [
        {"name": "score", "datatype": "FP32", "shape": [-1, 1]},
        {"name": "logit", "datatype": "FP32", "shape": [-1]},
    ]
    told = found["parameters"]
    assert told["source_codes"]["rocksdb"] == 4
    assert told["source_outputs"] == ["user.source", "item.source", "history.source"]
    assert told["jagged_inputs"] == ["history.offsets", "history.weights"]
    assert told["context"] == ["user"]


def test_metadata_of_lookups(data):
    found = ask(data, "GET", "/v2/models/halves.lookup").json()
    assert found["inputs"] == [{"name": "half", "datatype": "INT64", "shape": [-1, -1]}]
    assert found["outputs"] == [{"name": "half", "datatype": "FP16", "shape": [-1, 4]}]
    found = ask(data, "GET", "/v2/models/words").json()
    assert [t["name"] for t in found["inputs"]] == ["KEYS", "NUMKEYS"]
    assert found["inputs"][1]["datatype"] == "INT32"
    assert found["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, -1]}]
    assert found["parameters"]["tables"] == ["left", "right"]


@pytest.mark.parametrize("model", ["ctr", "ctr.lookup", "words", "halves.lookup"])
def test_configuration_and_metadata_agree(data, model):
    """As perf_analyzer reads them: the metadata's first dimension is the batch, the
    configuration's dimensions are without it."""
    metadata = ask(data, "GET", f"/v2/models/{model}").json()
    config = ask(data, "GET", f"/v2/models/{model}/config").json()
    assert config["max_batch_size"] > 0
    for told, configured in (("inputs", "input"), ("outputs", "output")):
        for tensor, entry in zip(metadata[told], config[configured], strict=True):
            assert tensor["name"] == entry["name"]
            assert tensor["shape"] == [-1, *entry["dims"]]
            assert entry["data_type"] == f"TYPE_{tensor['datatype']}"
    assert {type(p["string_value"]) for p in config["parameters"].values()} == {str}
    optional = {entry["optional"] for entry in config["input"]}
    assert optional == {model.endswith(".lookup")}


@pytest.mark.parametrize("model", ["ctr", "ctr.lookup", "words", "words.lookup", "halves.lookup"])
def test_a_request_made_from_the_metadata_is_answered(data, model):
    """Every input sent and every output asked for, as perf_analyzer does."""
    metadata = ask(data, "GET", f"/v2/models/{model}").json()
    inputs = []
    for tensor in metadata["inputs"]:
        shape = [1, *(2 if dim == -1 else dim for dim in tensor["shape"][1:])]
        values = [1] * int(np.prod(shape))
        inputs.append({**tensor, "shape": shape, "data": values})
    wanted = [{"name": t["name"], "parameters": {"binary_data": True}} for t in metadata["outputs"]]
    reply = ask(
        data,
        "POST",
        f"/v2/models/{model}/infer",
        json={"inputs": inputs, "outputs": wanted, "id": ""},
    )
    assert reply.status_code == 200, reply.text
    head = orjson.loads(reply.content[: int(reply.headers["inference-header-content-length"])])
    assert [o["name"] for o in head["outputs"]] == [o["name"] for o in wanted]
