import json
import socket
import sys
import threading

import pytest

from benchmarks.load import drive, exchange, http_request
from benchmarks.peers.process import free_ports, serving


@pytest.fixture(scope="module")
def echo():
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "benchmarks.peers.asgi", "echo", str(port), "1000", "300000"]
    with serving(command, port, ready_path="/0") as server:
        yield server


@pytest.mark.parametrize("size", [1000, 300_000])
def test_drive_counts_requests_and_server_cpu_time(echo, size):
    load = drive(echo, [http_request(f"/{size}", bytes(size))], connections=4, seconds=0.5)
    assert load.requests > 10
    assert 0.5 <= load.wall_s < 60
    assert 0 < load.cpu_us < 1e5
    assert load.per_second == pytest.approx(load.requests / load.wall_s)


def test_exchange_returns_the_whole_answer(echo):
    head, body = exchange(echo.address, http_request("/300000", b"x" * 200_000))
    assert len(body) == 300_000
    assert b"inference-header-content-length: 100" in head


def serve_once(chunks):
    """Start a server that answers one request with these pieces; returns its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listener, listener.accept()[0] as connection:
            connection.recv(65536)
            for chunk in chunks:
                connection.sendall(chunk)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_exchange_joins_an_answer_in_pieces():
    pieces = [b"HTTP/1.1 200 OK\r\nX-Content-Length: 7\r\nContent-Le", b"ngth: 5\r\n\r\nab", b"cde"]
    assert exchange(serve_once(pieces), http_request("/", b""))[1] == b"abcde"


def test_exchange_fails_for_a_status_other_than_200():
    body = json.dumps({"error": "no"}).encode()
    pieces = [b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(body), body]
    with pytest.raises(RuntimeError, match="404"):
        exchange(serve_once(pieces), http_request("/", b""))


def test_exchange_fails_when_the_server_closes_the_connection():
    with pytest.raises(RuntimeError, match="closed"):
        exchange(serve_once([]), http_request("/", b""))


def test_serving_raises_with_the_output_of_a_server_that_exits():
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with (
        pytest.raises(RuntimeError, match=r"exited(.|\n)*the reason"),
        serving(command, free_ports(1)[0], ready_path="/"),
    ):
        pass
