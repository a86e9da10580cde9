"""Every example of docs/rest.md, docs/grpc.md and docs/clients.md works against a real server."""

from __future__ import annotations

import http.client
import re
import shlex
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join((DOCS / f"{name}.md").read_text() for name in ("rest", "grpc", "clients"))
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
CURLS = [
    words
    for kind, block in BLOCKS
    if kind == "sh"
    for line in block.replace("\ncurl", "\0curl").split("\0")
    if (words := shlex.split(line))
]


@pytest.mark.parametrize("words", CURLS, ids=lambda words: words[1])
def test_curl_examples_work(small_server, words):
    name, url, *rest = words
    assert name == "curl"
    host, _, path = url.partition("/")
    ports = {"localhost:8000": small_server.address, "localhost:8002": small_server.admin}
    connection = http.client.HTTPConnection(ports[host], timeout=60)
    if rest:
        assert rest[0] == "-d"
        connection.request("POST", f"/{path}", rest[1])
    else:
        connection.request("GET", f"/{path}")
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    assert reply.status == 200, body


@pytest.mark.parametrize("code", [block for kind, block in BLOCKS if kind == "python"])
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_python_examples_work(small_server, code):
    names = {}
    code = code.replace("localhost:8000", small_server.address)
    exec(code.replace("localhost:8001", small_server.grpc), names)
    for each in ("client", "server"):
        if hasattr(names.get(each), "close"):
            names[each].close()


def test_documentation_has_curl_and_python_examples():
    assert len(CURLS) > 10
    assert sum(kind == "python" for kind, _ in BLOCKS) == 8
