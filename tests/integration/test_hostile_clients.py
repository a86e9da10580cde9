"""Clients that send too much, too slowly or not at all: rejected or awaited, never blocking others."""

from __future__ import annotations

import gzip
import json
import resource
import socket
import zlib
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from benchmarks.peers.hps_server import start_hps
from tests.support.small_models import write_models

ENCODERS = {"gzip": gzip.compress, "deflate": zlib.compress}


def check_still_right(ask, server):
    """A good request still gets its row."""
    keys = {"name": "word", "shape": [1, 1], "datatype": "INT64", "data": [999]}
    body = json.dumps({"inputs": [keys]}).encode()
    length = {"Content-Length": str(len(body))}
    answer = ask(server.address, "POST", "/v2/models/words/infer", body, length)
    assert answer.status == 200, answer
    assert json.loads(answer.body)["outputs"][0]["data"][0] == 999


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compression_bomb_is_rejected(ask, small_server, encoding):
    body = ENCODERS[encoding](bytes(200 << 20))
    assert len(body) < 1 << 18
    headers = {"Content-Encoding": encoding, "Content-Length": str(len(body))}
    before = small_server.process.memory_info().rss
    answer = ask(small_server.address, "POST", "/v2/models/words/infer", body, headers)
    assert answer.status == 413
    assert small_server.process.memory_info().rss - before < 50 << 20


def test_body_beyond_the_limit_is_rejected(ask, small_server):
    size = 100 << 20
    headers = {"Content-Length": str(size)}
    answer = ask(small_server.address, "POST", "/v2/models/words/infer", bytes(size), headers)
    assert answer.status == 413


NESTED = b"[" * 100_000 + b"]" * 100_000
TENSOR = b'{"inputs": [{"name": "word", "shape": [1, 1], "datatype": "INT64", "data": %b}]}'


@pytest.mark.parametrize("body", [b'{"inputs": %b}' % NESTED, TENSOR % NESTED, b'{"a":' * 50_000])
def test_deeply_nested_json_is_rejected(ask, small_server, body):
    length = {"Content-Length": str(len(body))}
    answer = ask(small_server.address, "POST", "/v2/models/words/infer", body, length)
    assert answer.status == 400
    check_still_right(ask, small_server)


def test_compressed_grpc_message_takes_no_memory_beyond_the_limit(ask, small_server):
    """Bodies of up to 200 KB, within the limit, that are up to 200 MB of zeros."""
    before = most_memory(small_server)
    with calling(small_server) as infer:
        for size in (1 << 20, 60 << 20, 200 << 20):
            with pytest.raises(grpc.RpcError) as refused:
                infer(bytes(size), compression=grpc.Compression.Gzip, timeout=60)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    check_still_right(ask, small_server)
    assert most_memory(small_server) - before < 30 << 20


def test_grpc_metadata_is_bounded(ask, small_server):
    with calling(small_server) as infer:
        with pytest.raises(grpc.RpcError) as refused:
            infer(b"", metadata=[("x-long", "a" * (64 << 10))], timeout=60)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    check_still_right(ask, small_server)


@contextmanager
def calling(server):
    """The bytes of a request over gRPC."""
    unbounded = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server.grpc, unbounded) as channel:
        yield channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")


def most_memory(server):
    """Bytes that the process has had at most."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_unfinished_requests_do_not_block_other_clients(ask, small_server):
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


@pytest.fixture
def many_open_files():
    """Connections up to this process's limit of open files."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.usefixtures("many_open_files")
def test_one_client_cannot_use_all_open_files(tmp_path):
    """Other clients are served, and rows written meanwhile."""
    most = 512
    write_models(tmp_path / "models")
    with start_hps(tmp_path, open_files=most) as server, ExitStack() as opened:
        for address in (server.address, server.grpc, server.admin):
            for _ in range(most):
                opened.enter_context(socket.create_connection(split(address), 60))
        for address, request in (
            (server.address, KEYS_999),
            (server.admin, ROW_7),
        ):
            other = opened.enter_context(
                socket.create_connection(split(address), 60, ("127.0.0.2", 0))
            )
            other.sendall(request)
            assert other.recv(12) == b"HTTP/1.1 200"
        assert server.process.num_fds() < most * 3 / 4
        assert "refused connections: too many for the limit of open files" in server.log.read_text()


def split(address):
    host, _, port = address.rpartition(":")
    return host, int(port)


def posted(path, body):
    text = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path, len(text), text)


KEYS_999 = posted(
    b"/v2/models/words/infer",
    {"inputs": [{"name": "word", "shape": [1, 1], "datatype": "INT64", "data": [999]}]},
)
ROW_7 = posted(b"/v1/tables/words/words/rows", {"keys": [7], "vectors": [[0.5] * 8]})
