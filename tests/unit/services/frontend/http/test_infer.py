"""Inference as an ASGI application: statuses, headers, bounds, deadlines."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
import zlib

import numpy as np
import orjson
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferResult

from services.frontend.state import FrontendState

PATH = "/v2/models/words.lookup/infer"
LEFT = {"name": "left", "shape": [1, 2], "datatype": "INT64", "data": [1, 99]}
GOOD = {"inputs": [LEFT]}
ROWS = [[2.0 + 98 - 99, 1.125, 1.25]]  # the row of key 1, plus the zeros of key 99


def binary(**options):
    sent = InferInput("left", [1, 2], "INT64").set_data_from_numpy(np.array([[1, 99]]))
    body, size = InferenceServerClient.generate_request_body([sent], **options)
    return body, {"Inference-Header-Content-Length": str(size), "Content-Length": str(len(body))}


def left(reply):
    size = reply.headers.get("inference-header-content-length")
    result = InferResult.from_response_body(
        reply.body,
        header_length=size and int(size),
        content_encoding=reply.headers.get("content-encoding"),
    )
    return result.as_numpy("left").tolist()


def test_json_in_json_out(small, ask):
    reply = ask(small.app(), "POST", PATH, {"id": "a1", **GOOD})
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json == {
        "model_name": "words.lookup",
        "model_version": "1",
        "id": "a1",
        "parameters": {"hps_defaulted": 1, "hps_degraded": ""},
        "outputs": [{"name": "left", "datatype": "FP32", "shape": [1, 3], "data": ROWS[0]}],
    }


def test_binary_in_binary_out(small, ask):
    body, headers = binary()
    reply = ask(small.app(), "POST", PATH, body, headers)
    assert reply.headers["content-type"] == "application/octet-stream"
    assert int(reply.headers["inference-header-content-length"]) == len(reply.body) - 12
    assert "id" not in reply.json
    assert left(reply) == ROWS


def test_version_may_be_named(small, ask):
    reply = ask(small.app(), "POST", "/v2/models/words.lookup/versions/1/infer", GOOD)
    assert left(reply) == ROWS


def test_chunked_body_is_answered(small, ask):
    body = orjson.dumps(GOOD)
    pieces = [body[i : i + 9] for i in range(0, len(body), 9)]
    assert left(ask(small.app(), "POST", PATH, pieces)) == ROWS


def test_raw_body_is_answered(small, ask):
    keys = np.array([1, 1]).tobytes()
    path = "/v2/models/halves.lookup/infer"
    reply = ask(small.app(), "POST", path, keys, {"Inference-Header-Content-Length": "0"})
    assert reply.json["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert np.frombuffer(reply.body[-8:], np.float16).tolist() == [2, 2.25, 2.5, 2.75]
    reply = ask(small.app(), "POST", PATH, keys, {"Inference-Header-Content-Length": "0"})
    assert reply.status == 400
    assert "exactly one input" in reply.error


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_request_and_answer_may_be_compressed(small, ask, coding):
    many = {**LEFT, "shape": [200, 1], "data": [1] * 200}
    body = {"gzip": gzip.compress, "deflate": zlib.compress}[coding](
        orjson.dumps({"inputs": [many], "parameters": {"binary_data_output": True}})
    )
    headers = {"Content-Encoding": coding, "Accept-Encoding": coding}
    reply = ask(small.app(), "POST", PATH, body, headers)
    assert reply.headers["content-encoding"] == coding
    assert len(reply.body) < 800
    assert left(reply) == [[1.0, 1.125, 1.25]] * 200


def test_small_answers_are_not_compressed(small, ask):
    reply = ask(small.app(), "POST", PATH, GOOD, {"Accept-Encoding": "gzip"})
    assert "content-encoding" not in reply.headers


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v2/models/nope/infer", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/words/versions/2/infer", 404, "version 2 is not found; version 1 is served"),
        ("/v2/models/words/versions/x/infer", 404, "version x is not found"),
        (PATH, 400, "failed to parse"),
    ],
)
def test_unknown_names_and_versions_are_not_found(small, ask, path, status, message):
    reply = ask(small.app(), "POST", path, b"{}x")
    assert reply.status == status
    assert message in reply.error


@pytest.mark.parametrize("value", ["-1", "1000", "x", "", "+1", "1_0", "9" * 30, "0x1", "²"])
def test_header_length_out_of_range_is_rejected(small, ask, value):
    body = orjson.dumps(GOOD)
    reply = ask(small.app(), "POST", PATH, body, {"Inference-Header-Content-Length": value})
    assert reply.status == 400
    assert f"inference header size should be in range (0, {len(body)}), got: {value}" in reply.error


def test_bodies_and_keys_beyond_the_limits_are_rejected(small, ask):
    app = small.app(max_body_bytes=2000, max_keys=100)
    for body in (bytes(2001), [bytes(900)] * 1000):
        reply = ask(app, "POST", PATH, body)
        assert reply.status == 413
        assert "raise server.max_body_bytes" in reply.error
    reply = ask(
        app, "POST", PATH, b"", {"Content-Length": str(100 << 20), "Expect": "100-continue"}
    )
    assert reply.status == 413
    many = {**LEFT, "shape": [1, 101], "data": [1] * 101}
    reply = ask(app, "POST", PATH, {"inputs": [many]})
    assert reply.status == 413
    assert "has 101 keys, at most 100 are accepted" in reply.error


def test_unknown_codings_are_rejected(small, ask):
    reply = ask(small.app(), "POST", PATH, GOOD, {"Content-Encoding": "br"})
    assert reply.status == 415
    assert reply.headers["accept-encoding"] == "gzip, deflate"


def test_request_id_is_returned(small, ask):
    app = small.app()
    assert ask(app, "POST", PATH, GOOD, {"X-Request-ID": "r-1"}).headers["x-request-id"] == "r-1"
    assert ask(app, "POST", PATH, b"", {"X-Request-ID": "r-2"}).headers["x-request-id"] == "r-2"
    for bad in ("a b", "x" * 129, "é", ""):
        assert "x-request-id" not in ask(app, "POST", PATH, GOOD, {"X-Request-ID": bad}).headers


def test_other_requests_are_passed_on(small, ask):
    seen = []

    async def rest(scope, receive, send):
        seen.append((scope["method"], scope["path"]))
        await send(
            {"type": "http.response.start", "status": 204, "headers": [(b"content-length", b"0")]}
        )
        await send({"type": "http.response.body"})

    app = small.app(rest)
    for method, path in (("GET", PATH), ("POST", "/v2/models/a/b/infer"), ("POST", "/v2")):
        assert ask(app, method, path).status == 204
        assert seen.pop() == (method, path)


def test_requests_are_unavailable_while_models_load(small, ask):
    small.state = FrontendState()
    reply = ask(small.app(), "POST", PATH, GOOD)
    assert reply.status == 503
    assert reply.headers["retry-after"] == "1"
    assert "loading its models" in reply.error


def test_models_answer_while_the_server_drains(small, ask):
    app = small.app()
    small.state.stop()
    assert ask(app, "POST", PATH, GOOD).status == 200


# -- deadlines and work on other threads -----------------------------------------------------------


def slow(timeout_us=None):
    parameters = {} if timeout_us is None else {"timeout": timeout_us}
    return {"inputs": [{**LEFT, "data": [1, 12]}], "parameters": parameters}


def test_request_that_waits_for_a_store_does_not_block_others(small, ask):
    app = small.app()
    small.store.gate.clear()
    replies = []
    waiting = threading.Thread(target=lambda: replies.append(ask(app, "POST", PATH, slow())))
    waiting.start()
    assert left(ask(app, "POST", PATH, {"inputs": [{**LEFT, "data": [1, 1]}]})) == [[2, 2.25, 2.5]]
    assert not replies
    small.store.gate.set()
    waiting.join()
    assert left(replies[0]) == [[13.0, 13.25, 13.5]]


@pytest.mark.parametrize("timeout_us", [50_000, 0, None])
def test_late_answer_times_out(small, ask, timeout_us):
    small.store.gate.clear()
    start = time.monotonic()
    reply = ask(small.app(request_timeout_ms=50), "POST", PATH, slow(timeout_us))
    assert time.monotonic() - start < 30
    assert reply.status == 504
    assert "no answer within the request's time" in reply.error


def test_stalled_body_times_out(small, ask):
    async def stalled():
        app, sent = small.app(request_timeout_ms=50), []

        async def send(message):
            sent.append(message)

        first = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive():
            if first:
                return first.pop()
            if sent:
                return {"type": "http.disconnect"}
            await asyncio.sleep(3600)
            return None

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
        await asyncio.wait_for(app(scope, receive, send), 60)
        return sent

    sent = asyncio.run(stalled())
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"].startswith("timed out after ")


def test_disconnected_client_gets_no_answer(small):
    async def gone():
        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            raise AssertionError(message)

        scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
        await small.app()(scope, receive, send)

    asyncio.run(gone())
