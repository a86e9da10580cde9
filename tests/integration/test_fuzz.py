"""Requests made to break the server: it must answer every one, without a 5xx and without a hang.

Valid requests are mutated (JSON header, framing, tensors, encodings) and sent to a real server. The
``ask`` fixture asserts that every failure is ``{"error": text}`` with a 4xx (or the documented 501 and
503); afterwards the server still answers a good request rightly.

Whole connections are generated beside these: any method, offers of other protocols, several requests on
one connection, cut anywhere. Whatever such a connection gets, the server answers the next good request.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import zlib
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks.peers.hps_server import Hps

FUZZ = settings(
    deadline=None,
    max_examples=600,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def check_still_right(ask: Any, server: Hps) -> None:
    """A good request still gets its rows."""
    keys = {"name": "word", "shape": [1, 2], "datatype": "INT64", "data": [3, 999]}
    body = json.dumps({"inputs": [keys]}).encode()
    length = {"Content-Length": str(len(body))}
    answer = ask(server.address, "POST", "/v2/models/words/infer", body, length)
    assert answer.status == 200, answer
    rows = np.array(json.loads(answer.body)["outputs"][0]["data"], np.float32).reshape(-1, 8)
    assert rows[:, 0].tolist() == [3, 999]


# -- valid requests, to be mutated -----------------------------------------------------------------

Tensor = tuple[str, str, list[int], list[Any]]
DTYPES = {"INT64": "<i8", "UINT64": "<u8", "FP32": "<f4", "INT32": "<i4"}


@st.composite
def good_requests(draw: st.DrawFn) -> tuple[str, list[Tensor]]:
    """A path and tensors that the server answers with 200."""
    batch = draw(st.integers(1, 4))
    keys = st.integers(-(2**63), 2**63 - 1) | st.integers(-60, 120)

    def many(count: int) -> list[int]:
        return draw(st.lists(keys, min_size=count, max_size=count))

    if draw(st.booleans()):
        return "/v2/models/words/infer", [("word", "INT64", [batch, 3], many(batch * 3))]
    tensors: list[Tensor] = [
        ("user", "INT64", [batch, 1], many(batch)),
        ("item", "INT64", [batch, 1], many(batch)),
        ("history", "INT64", [batch, 2], many(2 * batch)),
    ]
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 3), min_size=batch, max_size=batch))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        tensors[2] = ("history", "INT64", [offsets[-1]], many(offsets[-1]))
        tensors.append(("history.offsets", "INT64", [batch + 1], offsets))
    if draw(st.booleans()):
        return "/v2/models/clicks.lookup/infer", tensors
    numbers = draw(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3)
    )
    tensors.append(("dense", "FP32", [batch, 3], numbers * batch))
    return "/v2/models/clicks/infer", tensors


def as_json(tensors: list[Tensor]) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": name, "datatype": datatype, "shape": shape, "data": data}
            for name, datatype, shape, data in tensors
        ]
    }


def as_binary(tensors: list[Tensor]) -> tuple[dict[str, Any], bytes]:
    """JSON header and the raw tensors behind it."""
    raw = [np.array(data, DTYPES[datatype]).tobytes() for _, datatype, _, data in tensors]
    document = as_json(tensors)
    for tensor, data in zip(document["inputs"], raw, strict=True):
        del tensor["data"]
        tensor["parameters"] = {"binary_data_size": len(data)}
    document["parameters"] = {"binary_data_output": True}
    return document, b"".join(raw)


# -- mutations -------------------------------------------------------------------------------------

NAMES = """name shape datatype data parameters inputs outputs id INT64 UINT64 FP16 FP32 BF16 BYTES BOOL
user item word word.source score history.offsets history.weights KEYS NUMKEYS OUTPUT0 top_k binary_data
binary_data_size binary_data_output classification shared_memory_region sequence_id priority timeout"""
WORDS = st.sampled_from([*NAMES.split(), "", "\ud800", "é\0"])
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, -1, 1, 2**31, 2**32, 2**62, 2**63, 2**64, 1e308, float("nan"), 1.5])
    | WORDS
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All positions in a JSON document."""
    found = [path]
    if isinstance(node, dict | list):
        children = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in children:
            found += places(child, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """``document`` with one to three positions replaced, removed, repeated or extended."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(document)))
        if not path:
            document = draw(JUNK) if draw(st.integers(0, 9)) == 0 else document
            if isinstance(document, dict):
                document[draw(WORDS)] = draw(JUNK)
            continue
        parent = document
        for step in path[:-1]:
            parent = parent[step]
        action = draw(st.sampled_from(["replace", "replace", "remove", "repeat", "add"]))
        if action == "remove":
            del parent[path[-1]]
        elif action == "repeat" and isinstance(parent, list):
            parent.extend([parent[path[-1]]] * draw(st.integers(1, 3)))
        elif action == "add" and isinstance(parent, dict):
            parent[draw(WORDS)] = draw(JUNK)
        else:
            parent[path[-1]] = draw(JUNK)
    return document


def dumps(document: Any) -> bytes:
    """JSON with NaN, Infinity and lone surrogates where the document has them."""
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


# -- tests -----------------------------------------------------------------------------------------


@given(request=good_requests(), binary=st.booleans())
@settings(FUZZ, max_examples=100)
def test_unmutated_requests_are_answered(ask, small_server, request, binary):
    path, tensors = request
    header, raw = as_binary(tensors) if binary else (as_json(tensors), b"")
    text = dumps(header)
    headers = {"Content-Length": str(len(text) + len(raw))}
    if binary:
        headers["Inference-Header-Content-Length"] = str(len(text))
    answer = ask(small_server.address, "POST", path, text + raw, headers)
    assert answer.status == 200, answer


@given(data=st.data(), request=good_requests())
@FUZZ
def test_mutated_json_gets_no_server_error(ask, small_server, data, request):
    path, tensors = request
    body = dumps(data.draw(mutated(as_json(tensors))))
    headers = {"Content-Length": str(len(body)), "Content-Type": "application/json"}
    ask(small_server.address, "POST", path, body, headers)


@given(data=st.data(), request=good_requests())
@FUZZ
def test_mutated_binary_gets_no_server_error(ask, small_server, data, request):
    """The header mutated, its length wrong, the tensors cut, extended or overwritten."""
    path, tensors = request
    header, raw = as_binary(tensors)
    kind = data.draw(st.sampled_from(["header", "length", "cut", "longer", "noise"]))
    text = dumps(data.draw(mutated(header)) if kind == "header" else header)
    stated: Any = len(text)
    if kind == "length":
        wrong = st.integers(-2, len(text) + len(raw) + 2) | st.sampled_from(
            [2**31, 2**63, 2**64, -1, "", "x", "1e3", " 5", "0x10", "+7", "1_0", "9" * 400, "٣"]
        )
        stated = data.draw(wrong)
        assume(str(stated).isascii() or data.draw(st.just(True)))
    elif kind == "cut":
        raw = raw[: data.draw(st.integers(0, max(len(raw) - 1, 0)))]
    elif kind == "longer":
        raw += data.draw(st.binary(min_size=1, max_size=20))
    elif kind == "noise":
        raw = data.draw(st.binary(min_size=len(raw), max_size=len(raw)))
    headers = {"Content-Length": str(len(text) + len(raw))}
    headers["Inference-Header-Content-Length"] = (
        str(stated).encode("utf-8").decode("latin-1")  # as bytes on the wire
    )
    ask(small_server.address, "POST", path, text + raw, headers)


ENCODERS = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}


@given(data=st.data(), request=good_requests())
@settings(FUZZ, max_examples=150)
def test_content_codings_get_no_server_error(ask, small_server, data, request):
    """Encodings that are named and not used, used and not named, unknown, cut short."""
    path, tensors = request
    body = dumps(as_json(tensors))
    used = data.draw(st.sampled_from(sorted(ENCODERS)))
    names = ["gzip", "deflate", "identity", "br", "zstd", "GZIP", "gzip, deflate", "", "*", "x"]
    body = ENCODERS[used](body)
    if data.draw(st.booleans()):
        body = body[: data.draw(st.integers(0, len(body)))]
    headers = {
        "Content-Encoding": data.draw(st.sampled_from([used, *names])),
        "Accept-Encoding": data.draw(st.sampled_from([*names, "gzip;q=0", "deflate;q=0.5, *"])),
        "Content-Length": str(len(body)),
    }
    ask(small_server.address, "POST", path, body, headers)


@given(
    body=st.binary(max_size=300),
    path=st.sampled_from(["words", "clicks", "clicks.lookup", "nope", "words/versions/1"])
    | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
    method=st.sampled_from(["POST", "POST", "GET", "PUT", "DELETE", "OPTIONS", "PATCH"]),
    verb=st.sampled_from(["/infer", "", "/ready", "/config", "/stats", "/infer/", "/generate"]),
    header=st.none() | st.integers(-1, 301),
)
@FUZZ
def test_random_bytes_get_no_server_error(ask, small_server, body, path, method, verb, header):
    """Bytes that are no request at all, on paths that may not exist."""
    assume("#" not in path)
    headers = {"Content-Length": str(len(body))}
    if header is not None:
        headers["Inference-Header-Content-Length"] = str(header)
    ask(small_server.address, method, f"/v2/models/{path}{verb}", body, headers)


@given(chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6), request=good_requests())
@settings(FUZZ, max_examples=60)
def test_chunked_bodies_get_no_server_error(ask, small_server, chunks, request):
    path, tensors = request
    good = dumps(as_json(tensors))
    pieces = chunks or [good[i : i + 7] for i in range(0, len(good), 7)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    ask(small_server.address, "POST", path, body, {"Transfer-Encoding": "chunked"})


# -- connections of any bytes ----------------------------------------------------------------------

# llhttp accepts these; the last ones are not HTTP's, not upper case, or no method at all.
METHODS = """GET HEAD POST PUT DELETE CONNECT OPTIONS TRACE PATCH COPY LOCK MKCOL MOVE PROPFIND PROPPATCH
SEARCH UNLOCK BIND REBIND UNBIND ACL REPORT MKACTIVITY CHECKOUT MERGE M-SEARCH NOTIFY SUBSCRIBE UNSUBSCRIBE
PURGE MKCALENDAR LINK UNLINK SOURCE QUERY PRI DESCRIBE ANNOUNCE SETUP PLAY PAUSE TEARDOWN GET_PARAMETER
SET_PARAMETER REDIRECT RECORD FLUSH connect NOPE \x16\x03\x01"""
TARGETS = """/v2 /v2/health/live /v2/models/words/infer /v2/models/words/infer?a=%00 / * other:80 http://other/v2
[::1]:80 // /%zz /v1/status /metrics"""
VERSIONS = [
    "HTTP/1.1",
    "HTTP/1.0",
    "HTTP/2.0",
    "HTTP/0.9",
    "HTTP/3.0",
    "RTSP/1.0",
    "ICE/1.0",
    "HTTP/1.1 x",
    "",
]
PROTOCOLS = [
    "h2c",
    "websocket",
    "WebSocket",
    "h2c, websocket",
    "HTTP/2.0",
    "TLS/1.0",
    "x",
    "",
    "a" * 300,
]
FIELDS = {
    "Connection": [
        "upgrade",
        "Upgrade, HTTP2-Settings",
        "keep-alive",
        "close",
        "keep-alive, upgrade",
        "",
    ],
    "Upgrade": PROTOCOLS,
    "upgrade": PROTOCOLS,
    "HTTP2-Settings": ["AAMAAABkAAQAAP__", ""],
    "Sec-WebSocket-Key": ["dGhlIHNhbXBsZSBub25jZQ=="],
    "Sec-WebSocket-Version": ["13"],
    "Expect": ["100-continue", "x"],
    "TE": ["trailers"],
    "Trailer": ["upgrade"],
    "Transfer-Encoding": ["chunked", "identity", "gzip, chunked", "chunked, chunked", "x"],
    "Content-Length": ["0", "3", "1000", "-1", "3, 3", "x", str(2**64), str(2**31)],
    "Host": ["x", "", "a b"],
    "x": ["y", "\x00", "\xff", "a\r\n b", "a" * 5000],
}
BODIES = [
    b"",
    b"abc",
    b"3\r\nabc\r\n0\r\n\r\n",
    b"3;x=y\r\nabc\r\n0\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
    b"z\r\n",
    b"ffffffffffffffff\r\nabc",
    b"SM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
]
# The longest time for a good request while others are read.
DEADLINE_S = 15.0


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Bytes that resemble a request, mostly one that the server could read."""
    method = draw(st.sampled_from(["GET", "POST"]) | st.sampled_from(METHODS.split()))
    version = draw(st.just(VERSIONS[0]) | st.sampled_from(VERSIONS))
    lines = [f"{method} {draw(st.sampled_from(TARGETS.split()))} {version}"]
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=5))
    lines += [f"{name}: {draw(st.sampled_from(FIELDS[name]))}" for name in names]
    if draw(st.booleans()):
        lines += ["Connection: upgrade", f"Upgrade: {draw(st.sampled_from(PROTOCOLS))}"]
    end = draw(st.just("\r\n") | st.sampled_from(["\r\n", "\n", "\r", ""]))
    body = draw(st.sampled_from(BODIES) | st.binary(max_size=20))
    return end.join([*lines, "", ""]).encode("latin-1") + body


@st.composite
def connections(draw: st.DrawFn) -> list[bytes]:
    """Pieces of bytes to send on a connection."""
    sent = b"".join(draw(st.lists(messages(), min_size=1, max_size=4)))
    if draw(st.booleans()):
        return [sent]
    size = draw(st.sampled_from([1, 7, 50]))
    return [sent[i : i + size] for i in range(0, len(sent), size)]


class Fuzzed:
    """The server, until it does not answer any more: then it is killed, as its memory may have no bound, and
    every test of it fails."""

    def __init__(self, server: Hps) -> None:
        self._server = server
        self._stuck_at: list[bytes] | None = None

    def take(self, port: str, pieces: list[bytes]) -> None:
        """Send ``pieces`` to a port. What is answered is right, the port answers others meanwhile, and the
        connection ends when the client ends it."""
        if self._stuck_at is None:
            try:
                self._take(getattr(self._server, port), pieces)
            except TimeoutError:
                self._stuck_at = pieces
                self._server.process.kill()
        assert self._stuck_at is None, f"no answer after {DEADLINE_S} s: {self._stuck_at}"

    def _take(self, address: str, pieces: list[bytes]) -> None:
        with closing(self._connect(address)) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                for piece in pieces:
                    connection.sendall(piece)
            with closing(self._connect(address)) as other:
                other.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
                assert other.recv(1000).startswith(b"HTTP/1.1 200")
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            got = b""
            with suppress(ConnectionResetError):
                while piece := connection.recv(1 << 16):
                    got += piece
        for status in re.findall(rb"HTTP/1\.1 (\d+) ", got):
            assert int(status) < 500 or int(status) in (501, 503), got

    @staticmethod
    def _connect(address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), DEADLINE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


@pytest.fixture(scope="module")
def fuzzed(small_server: Hps) -> Fuzzed:
    return Fuzzed(small_server)


@given(port=st.sampled_from(["address", "admin"]), pieces=connections())
@settings(FUZZ, max_examples=1000)
def test_server_answers_after_arbitrary_bytes_on_connections(fuzzed, port, pieces):
    fuzzed.take(port, pieces)


def test_server_still_answers_correctly(ask, small_server):
    """Last in this file: no test above has left a trace."""
    check_still_right(ask, small_server)
