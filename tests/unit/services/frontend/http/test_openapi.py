"""The OpenAPI documents, and answers checked against them."""

from __future__ import annotations

import base64
import hashlib
import re

import jsonschema_rs
import orjson
import pytest

from hps.config.server_settings import ServerSettings
from services.frontend.auth import Authorizer
from services.frontend.http.app import admin_app, data_app

LEFT = {"name": "left", "shape": [1, 2], "datatype": "INT64", "data": [1, 99]}


def openapi(call, app):
    return call(app, "GET", "/openapi.json").json()


def test_document_describes_inference_and_errors(admin, data, call):
    for app in (admin, data):
        document = openapi(call, app)
        assert {"/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"} <= set(
            document["paths"]
        )
        for path, operations in document["paths"].items():
            for operation in operations.values():
                named = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
                assert named == set(re.findall(r"{(\w+)}", path))
                assert "422" not in operation["responses"]
                for status, response in operation["responses"].items():
                    if int(status) >= 400:
                        (schema,) = (c["schema"] for c in response["content"].values())
                        assert schema == {"$ref": "#/components/schemas/Error"}
        for reference in set(
            re.findall(r"#/components/schemas/(\w+)", orjson.dumps(document).decode())
        ):
            assert reference in document["components"]["schemas"]
    assert "/v1/status" in openapi(call, admin)["paths"]
    assert "/v1/status" not in openapi(call, data)["paths"]


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
        ("/v1/hotkeys?limit=2", "HotKeys"),
        ("/v1/tables/ctr/items/rows?keys=1,99", "Rows"),
    ],
)
def test_answers_match_the_document(admin, path, schema, call):
    validator(openapi(call, admin), schema).validate(call(admin, "GET", path).json())


def test_inference_matches_the_document(admin, call):
    document = openapi(call, admin)
    request = {
        "id": "x",
        "inputs": [LEFT],
        "outputs": [{"name": "left"}],
        "parameters": {"timeout": 0},
    }
    validator(document, "InferRequest").validate(request)
    reply = call(admin, "POST", "/v2/models/words/infer", json=request)
    validator(document, "InferResponse").validate(reply.json())


def test_documentation_loads_nothing_from_other_hosts(admin, data, call):
    for app in (admin, data):
        page = call(app, "GET", "/docs")
        assert page.status_code == 200
        assert "//" not in re.sub(r"<!--.*?-->", "", page.text)
        for path in re.findall(r'(?:src|href)="([^"]+)"', page.text):
            loaded = call(app, "GET", f"/{path}")
            assert (loaded.status_code, bool(loaded.content)) == (200, True), path
        (url,) = re.findall(r"url: '([^']+)'", page.text)
        assert call(app, "GET", f"/{url}").json()["openapi"]


def test_documentation_allows_only_its_own_script(admin, call):
    page = call(admin, "GET", "/docs")
    policy = dict(
        rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";")
    )
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == f"'self' 'sha256-{digest}'"
    assert policy["frame-ancestors"] == "'none'"
    assert not any("//" in sources for sources in policy.values())


def test_documentation_needs_no_key(small, key_guard, call):
    app = admin_app(small.state, small.settings, key_guard)
    for path in ("/docs", "/docs/files/swagger-ui-bundle.js", "/openapi.json"):
        assert call(app, "GET", path).status_code == 200


def test_documentation_can_be_disabled(small, call):
    settings = ServerSettings(docs=False)
    for make in (data_app, admin_app):
        app = make(small.state, settings, Authorizer())
        for path in ("/docs", "/docs/files/swagger-ui.css", "/openapi.json", "/redoc"):
            assert call(app, "GET", path).status_code == 404


def test_document_describes_keys_if_they_are_required(small, admin, key_guard, call):
    assert "securitySchemes" not in openapi(call, admin)["components"]
    document = openapi(call, admin_app(small.state, small.settings, key_guard))
    assert set(document["components"]["securitySchemes"]) == {"ApiKey", "Bearer"}
    assert "401" in document["paths"]["/v2/models"]["get"]["responses"]
    assert "security" not in document["paths"]["/metrics"]["get"]
