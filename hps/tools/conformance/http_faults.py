"""Checks over HTTP: what a server must reject, how, and that it continues."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from hps.tools.conformance.http_wire import BINARY_ONLY, LENGTH, HttpProbe, path_of, request
from hps.tools.conformance.target import (
    CheckedServer,
    CheckSuite,
    NotOffered,
    SampleRequest,
    needs,
    note,
    require,
)

SUITE = CheckSuite("http", HttpProbe)


@SUITE.check
def unknown_names(target: CheckedServer, http: HttpProbe) -> None:
    """An unknown model is 404, an unknown version 404 or not ready, unknown inputs and outputs are 400."""
    sample, model = target.sample, path_of(target.sample.model)
    body, length = http.request(sample)
    text = http.infer("none", body, length).refused(404)
    note("none" in text, f"the error does not name the model: {text}")
    head = {"Content-Type": "application/json"} if length is None else {LENGTH: str(length)}
    for version in ("77", "0"):
        path = f"{model}/versions/{version}/infer"
        http.ask("POST", path, body, head).refused(404, 400, 503)
    http.ask("GET", "/v2/models/none").refused(404)
    offered = http.extensions()
    for extension, path in (("model_configuration", "config"), ("statistics", "stats")):
        if extension in offered:
            http.ask("GET", f"/v2/models/none/{path}").refused(404)
    first, *_ = sample.inputs
    renamed = {f"{name}_" if name == first else name: a for name, a in sample.inputs.items()}
    text = http.send(replace(sample, inputs=renamed)).refused(400)
    added = replace(sample, inputs={**sample.inputs, "more": np.zeros((1, 1), np.int64)})
    text = http.send(added).refused(400)
    note("more" in text, f"the error does not name the input: {text}")
    text = http.send(replace(sample, outputs=("none",))).refused(400)
    note("none" in text, f"the error does not name the output: {text}")
    _still_answers(http, sample)


@SUITE.check
def missing_inputs(target: CheckedServer, http: HttpProbe) -> None:
    """A request without a required input, or without `inputs`, is 400."""
    sample = target.sample
    required = list(sample.inputs)
    if "model_configuration" in http.extensions():
        config = http.ask("GET", f"{path_of(sample.model)}/config").json()
        required = [each["name"] for each in config["input"] if not each.get("optional")]
    for name in required:
        rest = {other: array for other, array in sample.inputs.items() if other != name}
        http.send(replace(sample, inputs=rest)).refused(400)
    http.infer(sample.model, b"{}").refused(400)
    http.infer(sample.model, b'{"inputs": []}').refused(400)
    _still_answers(http, sample)


@SUITE.check
def wrong_types(target: CheckedServer, http: HttpProbe) -> None:
    """A datatype that the model does not accept, such as strings for numbers, is 400."""
    sample = _textual(target)
    for name, array in sample.inputs.items():
        for other in (np.full(array.shape, "x", np.object_), array.astype(np.float64)):
            if other.dtype != array.dtype:
                wrong = replace(sample, inputs={**sample.inputs, name: other})
                for binary in {target.binary, False}:
                    http.send(wrong, binary=binary).refused(400)
    head = json.loads(request(sample, binary=False)[0])
    head["inputs"][0]["datatype"] = "INT63"
    http.infer(sample.model, json.dumps(head).encode()).refused(400)
    _still_answers(http, sample)


@SUITE.check
def wrong_shapes(target: CheckedServer, http: HttpProbe) -> None:
    """A shape that the model does not accept, or that has another number of elements, is 400."""
    sample = _textual(target)
    fixed = [
        tensor["name"]
        for tensor in http.ask("GET", path_of(sample.model)).json()["inputs"]
        if tensor["shape"][-1] > 0 and tensor["name"] in sample.inputs
    ]
    for name in fixed:
        array = sample.inputs[name]
        for other in (np.concatenate([array, array], axis=-1), array[..., None]):
            wrong = replace(sample, inputs={**sample.inputs, name: other})
            http.send(wrong).refused(400)
    for change in (1, -1):
        head = json.loads(request(sample, binary=False)[0])
        head["inputs"][0]["shape"][0] += change
        http.infer(sample.model, json.dumps(head).encode()).refused(400)
    for shape in ([-1, 1], ["1"], "1", [2**62, 4]):
        head["inputs"][0]["shape"] = shape
        http.infer(sample.model, json.dumps(head).encode()).refused(400)
    _still_answers(http, sample)


@SUITE.check
def oversized_batch(target: CheckedServer, http: HttpProbe) -> None:
    """A batch beyond the configuration's max_batch_size is 400."""
    sample = target.sample
    needs("model_configuration" in http.extensions(), "model_configuration")
    most = http.ask("GET", f"{path_of(sample.model)}/config").json()["max_batch_size"]
    if not 0 < most < 10_000:
        raise NotOffered("a bound of the batch")
    many = {name: np.repeat(a[:1], most + 1, axis=0) for name, a in sample.inputs.items()}
    http.send(replace(sample, inputs=many)).refused(400)
    _still_answers(http, sample)


@SUITE.check
def wrong_lengths(target: CheckedServer, http: HttpProbe) -> None:
    """A JSON length that is missing, negative, not a number or beyond the body, and too few or too many
    bytes after it, are 400."""
    needs(target.binary, "binary_tensor_data")
    sample = target.sample
    body, length = request(sample)
    assert length is not None
    for wrong in (-1, "x", len(body) + 1, 10**9, length - 1, length + 1):
        http.infer(sample.model, body, wrong).refused(400)
    http.infer(sample.model, body).refused(400)
    http.infer(sample.model, body[:-1], length).refused(400)
    http.infer(sample.model, body + b"x", length).refused(400)
    _still_answers(http, sample)


@SUITE.check
def tensor_in_two_forms(target: CheckedServer, http: HttpProbe) -> None:
    """A tensor with both `data` and binary_data_size, or with neither, is 400."""
    sample = _textual(target)
    body, length = request(sample)
    head = json.loads(body[:length])
    head["inputs"][0]["data"] = next(iter(sample.inputs.values())).reshape(-1).tolist()
    twice = json.dumps(head).encode()
    if target.binary:
        http.infer(sample.model, twice + body[length:], len(twice)).refused(400)
    head = json.loads(request(sample, binary=False)[0])
    del head["inputs"][0]["data"]
    http.infer(sample.model, json.dumps(head).encode()).refused(400)
    _still_answers(http, sample)


@SUITE.check
def invalid_json(target: CheckedServer, http: HttpProbe) -> None:
    """A body that is not JSON, not an object or truncated is 400."""
    body, _ = request(target.sample, binary=False)
    for wrong in (body[:-2], b"", b"[]", b'"inputs"', b"\xff\xfe", b'{"inputs": 7}'):
        http.infer(target.sample.model, wrong).refused(400)
    _still_answers(http, target.sample)


@SUITE.check
def wrong_codings(target: CheckedServer, http: HttpProbe) -> None:
    """An unsupported Content-Encoding is rejected, with the supported ones in Accept-Encoding; a body that is
    not encoded as declared is 400."""
    model = target.sample.model
    body, length = http.request(target.sample)
    answer = http.infer(model, body, length, {"Content-Encoding": "br"})
    answer.refused(415, 501)
    accepted = answer.headers.get("Accept-Encoding", "")
    require("gzip" in accepted and "deflate" in accepted, f"Accept-Encoding: {accepted!r}")
    for coding in ("gzip", "deflate"):
        http.infer(model, body, length, {"Content-Encoding": coding}).refused(400)
    _still_answers(http, target.sample)


@SUITE.check
def wrong_methods_and_paths(target: CheckedServer, http: HttpProbe) -> None:
    """A method that a path does not support is 405, an unknown path 404, both as JSON."""
    model = path_of(target.sample.model)
    http.ask("GET", f"{model}/infer").refused(405)
    http.ask("DELETE", model).refused(405)
    http.ask("POST", "/v2/health/live", b"").refused(405)
    http.ask("GET", "/v2/none").refused(404)
    http.ask("POST", f"{model}/none", b"{}").refused(404)
    _still_answers(http, target.sample)


@SUITE.check
def unoffered_extensions(_target: CheckedServer, http: HttpProbe) -> None:
    """Shared memory, tracing and logging answer if their extensions are named, and are rejected with an error
    if they are not."""
    paths: dict[str, Any] = {
        "system_shared_memory": "/v2/systemsharedmemory/status",
        "cuda_shared_memory": "/v2/cudasharedmemory/status",
        "trace": "/v2/trace/setting",
        "logging": "/v2/logging",
    }
    offered = http.extensions()
    for extension, path in paths.items():
        answer = http.ask("GET", path)
        if extension in offered:
            require(answer.status == 200, f"{extension} is named, but {path} is not 200")
        else:
            answer.refused(400, 404, 501)


def _textual(target: CheckedServer) -> SampleRequest:
    """A sample whose inputs JSON can hold."""
    for sample in target.samples:
        if not BINARY_ONLY & {*map(sample.datatype, sample.inputs)}:
            return sample
    raise NotOffered("a model whose inputs have a form in JSON")


def _still_answers(http: HttpProbe, sample: SampleRequest) -> None:
    """Check that the same connection still answers a valid request."""
    http.send(sample).outputs()
