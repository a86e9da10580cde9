"""Checks over HTTP: what a server must answer."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from hps.tools.conformance.http_wire import LENGTH, NO_CODING, HttpProbe, encoded, path_of
from hps.tools.conformance.target import (
    CheckedServer,
    CheckSuite,
    NotOffered,
    SampleRequest,
    needs,
    note,
    require,
    same,
    settled,
    steady,
    unknown_version,
)

SUITE = CheckSuite("http", HttpProbe)
# Statistics that perf_analyzer requires.
TIMES = (
    *("success", "queue", "compute_input", "compute_infer", "compute_output"),
    *("cache_hit", "cache_miss"),
)


@SUITE.check
def health(target: CheckedServer, http: HttpProbe) -> None:
    """/v2/health/live, /v2/health/ready and a model's /ready answer 200."""
    model = path_of(target.sample.model)
    for path in ("/v2/health/live", "/v2/health/ready", f"{model}/ready"):
        require(http.ask("GET", path).status == 200, f"{path} is not 200")
    versions = http.ask("GET", model).json().get("versions") or []
    for version in versions[:1]:
        path = f"{model}/versions/{version}/ready"
        require(http.ask("GET", path).status == 200, f"{path} is not 200")
    other = f"{model}/versions/{unknown_version(versions)}/ready"
    for path in ("/v2/models/none/ready", other):
        require(http.ask("GET", path).status >= 400, f"{path} is ready")


@SUITE.check
def server_metadata(target: CheckedServer, http: HttpProbe) -> None:
    """/v2 reports name, version and extensions."""
    about = http.ask("GET", "/v2").json()
    require(isinstance(about["name"], str) and isinstance(about["version"], str), f"{about}")
    known = "binary_tensor_data" in (about.get("extensions") or ())
    require(target.binary or not known, "it names binary_tensor_data and rejects binary tensors")
    needs(target.binary, "binary_tensor_data, which Triton's clients require")
    require(known, "it has tensors in binary form and does not name binary_tensor_data")


@SUITE.check
def model_metadata(target: CheckedServer, http: HttpProbe) -> None:
    """A model's metadata has the tensors of a request it answers, with types and shapes that fit."""
    for sample in target.samples:
        about = http.ask("GET", path_of(sample.model)).json()
        require(about["name"] == sample.model, f"{sample.model} is called {about['name']}")
        versions = about.get("versions") or []
        require(all(type(v) is str for v in versions), f"versions {versions}")
        inputs = {tensor["name"]: tensor for tensor in about["inputs"]}
        for name, array in sample.inputs.items():
            has = inputs[name]
            require(has["datatype"] == sample.datatype(name), f"{name!r} is {has['datatype']}")
            require(
                len(has["shape"]) == array.ndim
                and all(a in (-1, b) for a, b in zip(has["shape"], array.shape, strict=True)),
                f"{name!r} {array.shape} does not fit {has['shape']}",
            )
        outputs = {tensor["name"] for tensor in about["outputs"]}
        require(outputs >= set(sample.outputs), f"outputs {outputs}")


@SUITE.check
def model_configuration(target: CheckedServer, http: HttpProbe) -> None:
    """/config has types and dimensions as Triton names them, without the batch."""
    needs("model_configuration" in http.extensions(), "model_configuration")
    for sample in target.samples:
        config = http.ask("GET", f"{path_of(sample.model)}/config").json()
        require(config["name"] == sample.model, f"{config['name']}")
        batched = config["max_batch_size"] > 0
        for tensor in config["input"]:
            if tensor["name"] in sample.inputs:
                name = tensor["name"]
                wanted = (f"TYPE_{sample.datatype(name)}", sample.inputs[name].ndim - batched)
                found = (tensor["data_type"], len(tensor["dims"]))
                require(found == wanted, f"{name!r} is {found}, should be {wanted}")


@SUITE.check
def equivalent_forms(target: CheckedServer, http: HttpProbe) -> None:
    """Inputs and outputs as flat JSON, nested JSON, bytes or a mixture get the same answer to the bit, which
    names its model and a version that is a string."""
    for sample in target.samples:
        expected = http.send(sample).outputs()
        require(set(expected) == set(sample.outputs), f"outputs {list(expected)}")
        some = _json_only(sample, expected)
        for nested in (False, True) if some.outputs else ():
            reply = http.send(some, binary=False, nested=nested)
            same(reply.outputs(), {n: expected[n] for n in some.outputs}, "JSON")
            if LENGTH not in reply.headers:
                head = reply.json()
                require(head["model_name"] == sample.model, f"{head['model_name']}")
                version = head.get("model_version") or ""
                require(type(version) is str, f"model_version {version!r}")
        if not target.binary:
            continue
        first = [*sample.inputs][:1]
        every = [{"name": name, "parameters": {"binary_data": True}} for name in sample.outputs]
        same(http.send(sample, binary=first, outputs=every).outputs(), expected, "mixed")


@SUITE.check
def requested_outputs(target: CheckedServer, http: HttpProbe) -> None:
    """Outputs are those that the request names, in its order; a form for one of them takes precedence over
    the form for all."""
    sample = next((s for s in target.samples if len(s.outputs) > 1), None)
    if sample is None:
        raise NotOffered("a model with two outputs")
    expected = http.send(sample).outputs()
    for names in (sample.outputs, sample.outputs[::-1], sample.outputs[-1:]):
        found = http.send(replace(sample, outputs=names)).outputs()
        note(tuple(found) == names, f"outputs {[*found]} for {[*names]}")
        same(found, {name: expected[name] for name in names}, f"{[*names]}")
    wide = _json_only(sample, expected).outputs
    if len(wide) < 2 or not target.binary:
        return
    json_form, default, *_ = wide
    plain = {"name": json_form, "parameters": {"binary_data": False}}
    every: dict[str, Any] = {"parameters": {"binary_data_output": True}}
    answer = http.send(sample, outputs=[plain, {"name": default}], **every)
    same(answer.outputs(), {n: expected[n] for n in (json_form, default)}, "two forms")
    inline = {output["name"] for output in answer.head()["outputs"] if "data" in output}
    note(inline == {json_form}, f"{inline} are JSON, asked for {json_form!r}")


@SUITE.check
def request_ids(target: CheckedServer, http: HttpProbe) -> None:
    """An id is returned; an empty one, as perf_analyzer sends it, counts as no id."""
    for sent in ("r-7", ""):
        answer = http.send(target.sample, id=sent)
        answer.outputs()
        found = answer.head().get("id", "")
        require(found == sent or not sent, f"id {sent!r} came back as {found!r}")


@SUITE.check
def compressed_requests(target: CheckedServer, http: HttpProbe) -> None:
    """Bodies may be encoded as gzip, deflate (a zlib stream) or identity."""
    body, length = http.request(target.sample)
    expected = http.send(target.sample).outputs()
    for coding, sent in {
        "gzip": gzip.compress(body),
        "deflate": zlib.compress(body),
        "identity": body,
    }.items():
        answer = http.infer(target.sample.model, sent, length, {"Content-Encoding": coding})
        needs(answer.status not in NO_CODING, f"bodies as {coding}")
        same(answer.outputs(), expected, coding)


@SUITE.check
def compressed_answers(target: CheckedServer, http: HttpProbe) -> None:
    """Accept-Encoding gzip or deflate: the answer may be compressed, with a Content-Encoding; the length
    of its JSON is that before compression."""
    body, length = http.request(target.sample)
    expected = http.send(target.sample).outputs()
    for coding in ("gzip", "deflate", "identity"):
        answer = http.infer(target.sample.model, body, length, {"Accept-Encoding": coding})
        found = answer.headers.get("Content-Encoding", "identity")
        require(found in (coding, "identity"), f"{found} for {coding}")
        same(answer.outputs(), expected, coding)


@SUITE.check
def chunked_bodies(target: CheckedServer, http: HttpProbe) -> None:
    """A body may be chunked, without Content-Length."""
    body, length = http.request(target.sample)
    expected = http.send(target.sample).outputs()
    pieces = [body[i : i + 100] for i in range(0, len(body), 100)]
    same(http.infer(target.sample.model, pieces, length).outputs(), expected, "chunked")


@SUITE.check
def raw_bodies(target: CheckedServer, http: HttpProbe) -> None:
    """Inference-Header-Content-Length 0: the body is the only input, batch 1; all outputs are binary."""
    needs(target.binary, "binary_tensor_data")
    for sample in target.samples:
        inputs = http.ask("GET", path_of(sample.model)).json()["inputs"]
        if len(inputs) == 1 and inputs[0]["shape"][1:].count(-1) <= 1:
            (name, array), *_ = sample.inputs.items()
            one = replace(sample, inputs={name: array[:1]})
            expected = http.send(one).outputs()
            answer = http.infer(sample.model, encoded(array[:1]), 0)
            found = answer.outputs()
            same({n: found[n] for n in expected}, expected, "raw")
            return
    raise NotOffered("a model with one input")


@SUITE.check
def empty_tensors(target: CheckedServer, http: HttpProbe) -> None:
    """A tensor without elements: binary_data_size 0 and no bytes, or an empty list."""
    sample = _emptied(target, http)
    expected = http.send(sample).outputs()
    some = _json_only(sample, expected)
    same(http.send(some, binary=False).outputs(), {n: expected[n] for n in some.outputs}, "[]")


@SUITE.check
def parameters(target: CheckedServer, http: HttpProbe) -> None:
    """`timeout` in microseconds, `priority`, and unknown parameters are accepted."""
    expected = http.send(target.sample).outputs()
    for sent in ({"timeout": 20_000_000}, {"priority": 0}, {"unknown_name": "x", "another": 1}):
        same(http.send(target.sample, parameters=sent).outputs(), expected, str(sent))


@SUITE.check
def statistics(target: CheckedServer, http: HttpProbe) -> None:
    """A model's statistics have all fields that perf_analyzer reads, and count requests and samples."""
    model, batch = target.sample.model, len(next(iter(target.sample.inputs.values())))
    needs("statistics" in http.extensions(), "statistics")

    def read() -> dict[str, int]:
        (stats,) = http.ask("GET", f"{path_of(model)}/stats").json()["model_stats"]
        require((stats["name"], type(stats["version"])) == (model, str), f"{stats['name']}")
        counts = {name: stats["inference_stats"][name]["count"] for name in TIMES}
        counts |= {f"{name} ns": stats["inference_stats"][name]["ns"] for name in TIMES}
        counts["execution_count"] = stats["execution_count"]
        return counts | {"inference_count": stats["inference_count"]}

    before = steady(read)
    for _ in range(3):
        http.send(target.sample).outputs()
    after = settled(read, lambda now: now["success"] >= before["success"] + 3)
    for name, value in after.items():
        require(value >= before[name], f"{name} went from {before[name]} to {value}")
    grown = (after["success"] - before["success"], after["inference_count"])
    wanted = (3, before["inference_count"] + 3 * batch)
    require(grown == wanted, f"3 × {batch} inferences, counted {grown} instead of {wanted}")
    every = http.ask("GET", "/v2/models/stats").json()["model_stats"]
    require(model in {stats["name"] for stats in every}, f"/v2/models/stats misses {model}")


@SUITE.check
def repository_index(target: CheckedServer, http: HttpProbe) -> None:
    """POST /v2/repository/index lists the models; with `ready`, only those that are ready."""
    bodies: tuple[bytes | None, ...] = (b"{}", b'{"ready": true}', None)
    if "model_repository" not in http.extensions():
        bodies, answer = bodies[:2], http.ask("POST", "/v2/repository/index", b"{}")
        needs(answer.status == 200 and answer.json(), "model_repository")
    for body in bodies:
        rows = http.ask("POST", "/v2/repository/index", body).json()
        states = {row["name"]: row.get("state") for row in rows}
        for sample in target.samples:
            require(states.get(sample.model) == "READY", f"{sample.model}: {states}")


@SUITE.changing
def load_and_unload(target: CheckedServer, http: HttpProbe) -> None:
    """A server with the extension model_repository unloads a model and loads it again; one without it
    answers with an error."""
    model = target.samples[-1]
    path = f"/v2/repository/models/{model.model}"
    if "model_repository" not in http.extensions():
        for verb in ("load", "unload"):
            http.ask("POST", f"{path}/{verb}").refused(400, 501, 503)
        raise NotOffered("model_repository")
    expected = http.send(model).outputs()
    require(http.ask("POST", f"{path}/unload").status == 200, "the model is not unloaded")
    note(http.ask("GET", f"{path_of(model.model)}/ready").status >= 400, "it is still ready")
    http.send(model).refused(404, 503)
    rows = http.ask("POST", "/v2/repository/index").json()
    states = [row.get("state") for row in rows if row["name"] == model.model]
    note("READY" not in states, f"states after it was unloaded: {states}")
    require(http.ask("POST", f"{path}/load").status == 200, "the model is not loaded")
    same(http.send(model).outputs(), expected, "loaded again")


def _json_only(sample: SampleRequest, answered: dict[str, Any]) -> SampleRequest:
    """``sample`` with the outputs that JSON can hold."""
    wide = tuple(name for name in sample.outputs if answered[name].dtype != np.float16)
    return replace(sample, outputs=wide)


def _emptied(target: CheckedServer, http: HttpProbe) -> SampleRequest:
    """A request with one tensor without elements: no keys for any of the samples."""
    for sample in target.samples:
        shapes = {
            t["name"]: t["shape"] for t in http.ask("GET", path_of(sample.model)).json()["inputs"]
        }
        for name, array in sample.inputs.items():
            if array.ndim > 1 and shapes[name][-1] == -1:
                return replace(sample, inputs={**sample.inputs, name: array[..., :0]})
    raise NotOffered("an input with a variable dimension")
