"""Bad input over real sockets: each case gets the status of docs/rest.md immediately."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import numpy as np
import pytest

WORD = {"name": "word", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
CLICKS = [
    {"name": "user", "shape": [1, 1], "datatype": "INT64", "data": [1]},
    {"name": "item", "shape": [1, 1], "datatype": "INT64", "data": [1]},
    {"name": "history", "shape": [1, 1], "datatype": "INT64", "data": [1]},
    {"name": "dense", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]},
]
WORDS, RANK = "/v2/models/words.lookup", "/v2/models/clicks"
DOCS = Path(__file__).parents[2] / "docs/rest.md"


def body(*inputs, **rest):
    return json.dumps({"inputs": list(inputs), **rest}).encode()


def changed(**fields):
    return {**WORD, **fields}


def dense(**fields):
    return body(*CLICKS[:3], {**CLICKS[3], **fields})


def framed(path, data, headers=None, *, chunked=False):
    named = {"Host": "x", **(headers or {})}
    if chunked:
        named["Transfer-Encoding"] = "chunked"
        pieces = [data[i : i + 50_000] for i in range(0, len(data), 50_000)]
        data = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    else:
        named.setdefault("Content-Length", str(len(data)))
    lines = [f"POST {path}/infer HTTP/1.1", *(f"{k}: {v}" for k, v in named.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + data


def exchange(address, request, *, then=b""):
    """Send ``request`` whole, then read one answer; keep-alive, so the connection must stay usable."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(request)
        found = read_answer(connection)
        if then:
            connection.sendall(then)
            return found, read_answer(connection)
        return found


def read_answer(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])
    while len(rest) < length:
        rest += connection.recv(65536)
    return int(head.split()[1]), rest


SIZE = "Inference-Header-Content-Length"
HEADER = body(
    {k: v for k, v in WORD.items() if k != "data"} | {"parameters": {"binary_data_size": 16}}
)
MISSING_MODEL = "/v2/models/nope"
CASES = {
    "wrong dtype": (WORDS, body(changed(datatype="FP32")), {}, 400),
    "wrong shape": (WORDS, body(changed(shape=[1, 3])), {}, 400),
    "wrong rank": (RANK, dense(shape=[3]), {}, 400),
    "wrong width": (RANK, dense(shape=[1, 2], data=[1, 2]), {}, 400),
    "truncated binary body": (WORDS, HEADER + bytes(9), {SIZE: len(HEADER)}, 400),
    "additional bytes": (WORDS, HEADER + bytes(17), {SIZE: len(HEADER)}, 400),
    "truncated JSON": (WORDS, body(WORD)[:-3], {}, 400),
    "missing input": (RANK, body(*CLICKS[:2]), {}, 400),
    "no input": (WORDS, body(), {}, 400),
    "unknown input": (WORDS, body(changed(name="wrd")), {}, 400),
    "unknown output": (WORDS, body(WORD, outputs=[{"name": "x"}]), {}, 400),
    "unknown model": (MISSING_MODEL, body(WORD), {}, 404),
    "unknown version": (f"{WORDS}/versions/7", body(WORD), {}, 404),
    "empty batch, lookup": (WORDS, body(changed(shape=[0, 2], data=[])), {}, 200),
    "empty batch, ranking": (
        RANK,
        body(*({**t, "shape": [0, t["shape"][1]], "data": []} for t in CLICKS)),
        {},
        200,
    ),
    "batch too large": (RANK, body({**CLICKS[1], "shape": [65, 1], "data": [1] * 65}), {}, 400),
    "batch of candidates too large": (
        RANK,
        body(*({**t, "shape": [65, t["shape"][1]], "data": t["data"] * 65} for t in CLICKS)),
        {},
        400,
    ),
    "NaN in JSON": (RANK, dense().replace(b"[1, 2, 3]", b"[1, NaN, 3]"), {}, 400),
    "null in JSON": (RANK, dense(data=[1, None, 3]), {}, 400),
    "numbers as text": (WORDS, body(changed(data=["1", "2"])), {}, 400),
    "no JSON": (WORDS, b"\xff\x00", {}, 400),
    "empty body": (WORDS, b"", {}, 400),
    "oversize header length": (WORDS, body(WORD), {SIZE: 10**6}, 400),
    "negative header length": (WORDS, body(WORD), {SIZE: -1}, 400),
    "header length no number": (WORDS, body(WORD), {SIZE: "x"}, 400),
    "raw body of a model with many inputs": (RANK, bytes(8), {SIZE: 0}, 400),
    "raw body of half a key": (WORDS, bytes(12), {SIZE: 0}, 400),
    "unknown content coding": (WORDS, body(WORD), {"Content-Encoding": "br"}, 415),
    "damaged gzip": (WORDS, body(WORD), {"Content-Encoding": "gzip"}, 400),
    "parameters": (WORDS, body(WORD, parameters={"timeout": "soon"}), {}, 400),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gets_the_documented_status(small_server, case):
    path, data, headers, expected = CASES[case]
    good = framed(WORDS, body(WORD))
    start = time.monotonic()
    (status, answer), (again, _) = exchange(
        small_server.address, framed(path, data, headers), then=good
    )
    assert time.monotonic() - start < 30
    assert status == expected
    found = json.loads(answer)
    if status >= 400:
        assert list(found) == ["error"]
        assert len(found["error"]) > 10
    assert again == 200


def test_documentation_names_these_statuses():
    table = dict(re.findall(r"^\| ([^|]+?) \| (\d{3}) \|", DOCS.read_text(), re.MULTILINE))
    for case, (_, _, _, status) in CASES.items():
        assert table.get(case) == str(status), case


def test_nan_in_binary_form_reaches_the_scores(small_server):
    values = np.array([1, np.nan, 3], np.float32)
    named = {**CLICKS[3], "parameters": {"binary_data_size": 12}}
    del named["data"]
    head = body(*CLICKS[:3], named)
    status, answer = exchange(
        small_server.address, framed(RANK, head + values.tobytes(), {SIZE: len(head)})
    )
    assert status == 200
    found = json.loads(answer)
    assert found["outputs"][0]["data"] == [None]
    assert found["parameters"]["hps_not_finite"] == 2


@pytest.mark.parametrize("chunked", [False, True])
def test_body_of_100_mb_is_rejected_and_the_connection_stays_usable(small_server, chunked):
    before = small_server.process.memory_info().rss
    request = framed(WORDS, bytes(100 << 20), chunked=chunked)
    (status, answer), (again, _) = exchange(
        small_server.address, request, then=framed(WORDS, body(WORD))
    )
    assert (status, again) == (413, 200)
    assert "server.max_body_bytes" in json.loads(answer)["error"]
    assert small_server.process.memory_info().rss - before < 20 << 20


def test_large_body_announced_with_expect_is_rejected_before_it_is_sent(small_server):
    headers = {"Content-Length": 100 << 20, "Expect": "100-continue"}
    status, _ = exchange(small_server.address, framed(WORDS, b"", headers))
    assert status == 413


def test_chunked_body_is_accepted(small_server):
    many = changed(shape=[1, 9000], data=list(range(1000)) * 9)
    status, answer = exchange(small_server.address, framed(WORDS, body(many), chunked=True))
    assert status == 200
    assert json.loads(answer)["outputs"][0]["shape"] == [9000, 8]


@pytest.mark.private_interface("uvicorn answers invalid requests in text")
def test_endless_head_is_rejected(small_server):
    host, _, port = small_server.address.rpartition(":")

    def flood(piece):
        with socket.create_connection((host, int(port)), 20) as connection:
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\nz: ")
            for _ in range(10_000):
                connection.sendall(piece)

    for piece in (b"x: " + b"y" * 2000 + b"\r\n", b"y" * 2000):
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            flood(piece)
    status, answer = exchange(small_server.address, b"GET /v2 HTTP/1.1\r\nz: " + b"y" * 100_000)
    assert status == 431
    assert "head has more than" in json.loads(answer)["error"]


@pytest.mark.private_interface("uvicorn answers invalid requests in text")
def test_invalid_chunked_body_is_rejected(small_server):
    head = framed(WORDS, b"", {"Transfer-Encoding": "chunked", "Content-Length": ""})
    head = head.replace(b"Content-Length: \r\n", b"")
    status, answer = exchange(small_server.address, head + b"no size\r\n")
    assert status == 400
    assert json.loads(answer)["error"]


@pytest.mark.private_interface("uvicorn answers invalid requests in text")
def test_bytes_that_are_not_http_are_answered_with_400(small_server):
    status, answer = exchange(small_server.address, b"nonsense\r\n\r\n")
    assert status == 400
    assert json.loads(answer)["error"]


def test_pipelined_requests_are_answered_in_order(small_server):
    first, second = (framed(WORDS, body(WORD, id=name)) for name in ("a", "b"))
    host, _, port = small_server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(first + second)
        data = b""
        while data.count(b"hps_degraded") < 2:
            data += connection.recv(65536)
    assert data.index(b'"id":"a"') < data.index(b'"id":"b"')
