"""The OpenAPI document: FastAPI's own, with the inference routes added and one error schema."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.frontend.auth import EXEMPT, Authorizer

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_DURATION = {
    "type": "object",
    "required": ["count", "ns"],
    "properties": {"count": _COUNT, "ns": _COUNT},
}
_PARAMETERS = {
    "type": "object",
    "additionalProperties": {"type": ["string", "number", "boolean"]},
}
_DATATYPE = {
    "type": "string",
    "enum": [
        "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16",
        "FP32", "FP64",
    ],
}  # fmt: skip
_SHAPE = {"type": "array", "items": _COUNT}
_DATA = {
    "type": "array",
    "description": "The elements, flat in row-major order or nested.",
    "items": {},
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


_VERSION = {"type": ["string", "integer"], "description": "A number or a label."}
SCHEMAS: dict[str, Any] = {
    "Error": _object(["error"], error={**_TEXT, "description": "Cause and remedy."}),
    "Live": _object(["live"], live={"type": "boolean"}),
    "Ready": _object(["ready"], ready={"type": "boolean"}),
    "ModelReady": _object(["name", "ready"], name=_TEXT, ready={"type": "boolean"}),
    "ModelNames": _object(["models"], models=_list(_TEXT)),
    "ServerMetadata": _object(
        ["name", "version", "extensions"], name=_TEXT, version=_TEXT, extensions=_list(_TEXT)
    ),
    "TensorMetadata": _object(
        ["name", "datatype", "shape"],
        name=_TEXT,
        datatype=_DATATYPE,
        shape=_list({"type": "integer", "minimum": -1}),
    ),
    "ModelMetadata": _object(
        ["name", "versions", "platform", "inputs", "outputs"],
        name=_TEXT,
        versions=_list(_TEXT),
        platform=_TEXT,
        inputs=_list(_ref("TensorMetadata")),
        outputs=_list(_ref("TensorMetadata")),
        parameters={"type": "object"},
    ),
    "ModelConfig": _object(
        ["name", "platform", "backend", "max_batch_size", "input", "output"],
        name=_TEXT,
        platform=_TEXT,
        backend=_TEXT,
        max_batch_size=_COUNT,
        input=_list({"type": "object"}),
        output=_list({"type": "object"}),
        parameters={"type": "object"},
    ),
    "Statistics": _object(
        ["model_stats"],
        model_stats=_list(
            _object(
                ["name", "version", "inference_count", "execution_count", "inference_stats"],
                name=_TEXT,
                version=_TEXT,
                last_inference=_COUNT,
                inference_count=_COUNT,
                execution_count=_COUNT,
                inference_stats={"type": "object", "additionalProperties": _DURATION},
            )
        ),
    ),
    "RepositoryIndex": _list(
        _object(
            ["name", "version", "state"],
            name=_TEXT,
            version=_TEXT,
            state=_TEXT,
            reason=_TEXT,
            labels=_list(_TEXT),
            current={"type": "boolean"},
            weight={"type": "number"},
        )
    ),
    "Traffic": _object(
        ["name", "rule", "versions"],
        name=_TEXT,
        rule={"type": "object"},
        versions=_list(
            _object(
                ["version", "weight", "reason"],
                version=_TEXT,
                weight={"type": "number"},
                reason=_TEXT,
            )
        ),
    ),
    "Status": _object(["phase", "ready"], phase=_TEXT, ready={"type": "boolean"}),
    "Models": _object(["models"], models=_list({"type": "object"})),
    "Profile": _object(
        ["name", "us", "about", "parts"],
        name=_TEXT,
        us={"type": ["number", "null"]},
        about={"type": "object"},
        parts=_list(_ref("Profile")),
    ),
    "HotKeys": _object(["tables"], tables=_list({"type": "object"})),
    "Tables": _object(["tables"], tables=_list({"type": "object"})),
    "Rows": _object(
        ["model", "version", "table", "dim", "rows"],
        model=_TEXT,
        version={"type": "integer"},
        table=_TEXT,
        dim=_COUNT,
        dtype=_TEXT,
        rows=_list(
            _object(
                ["key", "found", "source", "version", "age_s", "vector"],
                key={"type": "integer"},
                found={"type": "boolean"},
                source=_TEXT,
                version=_COUNT,
                age_s={"type": ["number", "null"]},
                vector=_list({"type": ["number", "null"]}),
            )
        ),
        degraded=_list(_TEXT),
    ),
    "RowWrite": _object(
        [],
        keys=_list({"type": "integer"}),
        vectors=_list(_list({"type": "number"})),
        deleted=_list({"type": "integer"}),
        model_version={"type": ["integer", "string", "null"]},
    ),
    "Written": _object(
        ["version", "written", "deleted"], version=_COUNT, written=_COUNT, deleted=_COUNT
    ),
    "Updates": _object(["updates"], updates=_list({"type": "object"})),
    "UpdatesGroup": _object([], group=_TEXT),
    "UpdatesSeek": _object(
        ["topic", "partition", "offset"], topic=_TEXT, partition=_COUNT, offset=_COUNT, group=_TEXT
    ),
    "Checkpoint": _object(
        ["checkpoint", "seconds"], checkpoint=_TEXT, seconds={"type": "number", "minimum": 0}
    ),
    "CheckpointKeep": _object([], keep={"type": "integer", "minimum": 1}),
    "KeyTrace": _object(
        ["model", "version", "seconds"],
        model=_TEXT,
        version={"type": "integer"},
        seconds={"type": "number"},
    ),
    "KeyTraceStart": _object([], seconds={"type": "number", "exclusiveMinimum": 0}, keys=_COUNT),
    "Nothing": _object([]),
    "Region": _object(["key", "byte_size"], key=_TEXT, offset=_COUNT, byte_size=_COUNT),
    "Regions": _list(
        _object(
            ["name", "key", "offset", "byte_size"],
            name=_TEXT,
            key=_TEXT,
            offset=_COUNT,
            byte_size=_COUNT,
        )
    ),
    "ModelLoad": _object(
        [],
        parameters=_object([], version=_COUNT, labels=_list(_TEXT), beside={"type": "boolean"}),
    ),
    "ModelLabel": _object([], parameters=_object(["label"], label=_TEXT, version=_VERSION)),
    "ModelSwitch": _object([], parameters=_object(["version"], version=_VERSION)),
    "TrafficChange": _object(
        [],
        parameters=_object(
            [],
            weights={"type": "object", "additionalProperties": {"type": "number"}},
            sticky={"type": ["string", "null"]},
            matches=_list({"type": "object"}),
            shadow={"type": ["object", "null"]},
            rollback={"type": ["object", "null"]},
        ),
    ),
    "ModelRollback": _object([], parameters={"type": "object"}),
    "ModelLoaded": _object(["name", "version"], name=_TEXT, version=_TEXT, warning=_TEXT),
    "ModelUnload": _object([], parameters=_object([], version=_VERSION)),
    "ModelUnloaded": _object(["name"], name=_TEXT),
    "LogSettings": _object(
        [],
        log_file=_TEXT,
        log_info={"type": "boolean"},
        log_warning={"type": "boolean"},
        log_error={"type": "boolean"},
        log_verbose_level=_COUNT,
        log_format=_TEXT,
    ),
    "InferInput": _object(
        ["name", "shape", "datatype"],
        name=_TEXT,
        shape=_SHAPE,
        datatype=_DATATYPE,
        parameters={
            **_PARAMETERS,
            "properties": {
                "binary_data_size": {
                    **_COUNT,
                    "description": "Bytes of this tensor after the JSON header, instead of `data`.",
                }
            },
        },
        data=_DATA,
    ),
    "InferOutputRequest": _object(
        ["name"],
        name=_TEXT,
        parameters={**_PARAMETERS, "properties": {"binary_data": {"type": "boolean"}}},
    ),
    "InferRequest": _object(
        ["inputs"],
        id=_TEXT,
        parameters={
            **_PARAMETERS,
            "properties": {
                "binary_data_output": {"type": "boolean"},
                "timeout": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": 2**63 - 1,
                    "description": "Timeout in microseconds; 0: the server's default.",
                },
                "top_k": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Ranking models: keep the k best candidates.",
                },
            },
        },
        inputs=_list(_ref("InferInput")),
        outputs=_list(_ref("InferOutputRequest")),
    ),
    "InferOutput": _object(
        ["name", "shape", "datatype"],
        name=_TEXT,
        shape=_SHAPE,
        datatype=_DATATYPE,
        parameters=_PARAMETERS,
        data=_DATA,
    ),
    "InferResponse": _object(
        ["model_name", "model_version", "parameters", "outputs"],
        model_name=_TEXT,
        model_version=_TEXT,
        id=_TEXT,
        parameters={
            "type": "object",
            "required": ["hps_defaulted", "hps_degraded"],
            "properties": {
                "hps_defaulted": {**_COUNT, "description": "Keys answered with the default."},
                "hps_degraded": {**_TEXT, "description": "Tiers that were skipped."},
                "hps_stale_s": {
                    **_COUNT,
                    "description": "The greatest age of rows, in seconds, if more than "
                    "updates.max_staleness_s.",
                },
                "hps_not_finite": {**_COUNT, "description": "Values sent as null in JSON."},
            },
        },
        outputs=_list(_ref("InferOutput")),
    ),
}

_INFER_ERRORS = {
    400: "Invalid request: JSON, names, shapes, datatypes, sizes.",
    404: "No such model or version.",
    408: "The request's body stalled.",
    413: "The body or the number of keys exceeds the server's limits.",
    415: "Unknown Content-Encoding.",
    500: "The dense model failed.",
    503: "Loading, overloaded or shutting down; see Retry-After.",
    504: "Deadline exceeded.",
}
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def _error(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref("Error")}}}


def _infer(parameters: list[str]) -> dict[str, Any]:
    return {
        "tags": ["inference"],
        "summary": "Infer",
        "description": "JSON, or JSON followed by binary tensors (header "
        "Inference-Header-Content-Length gives the length of the JSON; 0: the body is the only "
        "input's bytes). docs/rest.md shows every form.",
        "operationId": "infer" + "_version" * (len(parameters) - 1),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in parameters
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref("InferRequest")}, **_BINARY},
        },
        "responses": {
            "200": {
                "description": "The requested outputs.",
                "content": {"application/json": {"schema": _ref("InferResponse")}, **_BINARY},
            },
            **{str(status): _error(text) for status, text in _INFER_ERRORS.items()},
        },
    }


def document(api: FastAPI, guard: Authorizer, *, infers: bool = True) -> dict[str, Any]:
    """Create the document of one port; ``infers``: with the inference routes."""
    spec = get_openapi(
        title=api.title, version=api.version, description=api.description, routes=api.routes
    )
    paths = spec["paths"]
    if infers:
        paths["/v2/models/{model}/infer"] = {"post": _infer(["model"])}
        versioned = "/v2/models/{model}/versions/{version}/infer"
        paths[versioned] = {"post": _infer(["model", "version"])}
    for path, operations in paths.items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # answered as 400
            if guard.enabled and not path.startswith(EXEMPT):
                operation["security"] = [{"ApiKey": []}, {"Bearer": []}]
                operation["responses"]["401"] = _error("No API key, or an unknown one.")
                operation["responses"]["403"] = _error("The key's role does not allow this.")
    components = spec.setdefault("components", {})
    components["schemas"] = SCHEMAS
    if guard.enabled:
        components["securitySchemes"] = {
            "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            "Bearer": {"type": "http", "scheme": "bearer"},
        }
    return spec
