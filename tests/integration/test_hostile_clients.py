"""Clients that send too much, too slowly or not at all: refused or waited for, never in others' way."""

from __future__ import annotations

import gzip
import json
import socket
import zlib

import pytest

ENCODERS = {"gzip": gzip.compress, "deflate": zlib.compress}


def check_still_right(ask, server):
    """A good request gets its row, whatever came before."""
    keys = {"name": "word", "shape": [1, 1], "datatype": "INT64", "data": [999]}
    body = json.dumps({"inputs": [keys]}).encode()
    length = {"Content-Length": str(len(body))}
    answer = ask(server.address, "POST", "/v2/models/words/infer", body, length)
    assert answer.status == 200, answer
    assert json.loads(answer.body)["outputs"][0]["data"][0] == 999


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_unpacks_to_gigabytes_is_refused_unread(ask, small_server, encoding):
    body = ENCODERS[encoding](bytes(200 << 20))
    assert len(body) < 1 << 18
    headers = {"Content-Encoding": encoding, "Content-Length": str(len(body))}
    before = small_server.process.memory_info().rss
    answer = ask(small_server.address, "POST", "/v2/models/words/infer", body, headers)
    assert answer.status == 413
    assert small_server.process.memory_info().rss - before < 50 << 20


def test_a_body_beyond_the_limit_is_refused(ask, small_server):
    size = 100 << 20
    headers = {"Content-Length": str(size)}
    answer = ask(small_server.address, "POST", "/v2/models/words/infer", bytes(size), headers)
    assert answer.status == 413


def test_clients_that_never_finish_do_not_hold_up_the_others(ask, small_server):
    """Bodies that stop half way, heads that stop half way, connections that say nothing."""
    host, _, port = small_server.address.rpartition(":")
    head = b"POST /v2/models/words/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    sockets = []
    for start in [head + b"{", head[:40], b"", b"GET "] * 16:
        connection = socket.create_connection((host, int(port)), 60)
        connection.sendall(start)
        sockets.append(connection)
    check_still_right(ask, small_server)
    for connection in sockets:
        connection.close()
    check_still_right(ask, small_server)
