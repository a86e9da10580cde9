"""Tests of the native open-loop load generator, against an echo over HTTP."""

from __future__ import annotations

import struct
import sys
import time

import numpy as np
import pytest

from benchmarks.load import http_request
from benchmarks.native_load import Patch, Template
from benchmarks.open_load import Kind, open_load
from benchmarks.peers.process import free_ports, serving
from benchmarks.switch import Half, Measured

MESSAGE = http_request("/3000", bytes(64))
ECHO = Template("http", MESSAGE, [Patch(len(MESSAGE) - 64, 4, 100)])


@pytest.fixture(scope="module")
def echo():
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "benchmarks.peers.asgi", "echo", str(port), "3000"]
    with serving(command, port, ready_path="/0") as server:
        yield server.address


def test_requests_are_sent_at_their_times(echo):
    begin = time.monotonic_ns()
    with open_load(echo, [Kind(ECHO, 0.75), Kind(ECHO, 0.25)], 400) as running:
        time.sleep(1)
    records = running.records
    assert (records["status"] == 200).all()
    assert not records["wrong"].any()
    assert 250 < len(records) < 600
    assert 0.1 < records["kind"].mean() < 0.4
    assert (records["due"] >= begin).all()
    assert (records["sent"] >= records["due"]).all()
    assert (records["end"] > records["sent"]).all()


def test_closed_loop_sends_after_each_answer(echo):
    with open_load(echo, [Kind(ECHO)], 0, connections=2) as running:
        time.sleep(0.3)
    assert len(running.records) > 20


def test_numbers_that_differ_are_wrong():
    """The peer answers with 3,000 bytes of the request's kind; here a fixed answer stands in."""
    numbers = struct.pack("<4f", 1, 9, 1, 9)
    for last, wrong in ((numbers, 0), (struct.pack("<4f", 1, 9, 2, 9), 1)):
        with answering(last) as address, open_load(address, [Kind(ECHO, 1, 4, 2)], 100) as running:
            time.sleep(0.2)
        assert running.records["wrong"].mean() == wrong
        assert (running.records["value"] == 1).all()


def test_old_versions_are_stale_only_after_the_switch():
    from benchmarks.open_load import RECORD

    changes = [Half(0, 30, changes=[(5, 20, 2)]), Half(45, 80, changes=[(50, 60, 1)])]
    records = np.zeros(7, RECORD)
    records["due"] = (10, 25, 25, 40, 55, 70, 70)
    records["value"] = (1, 1, 2, 1, 1, 2, 1)
    records["status"] = 200
    assert Measured(quiet=[Half(0, 1)] * 2, busy=changes, records=records).stale == 3


class answering:
    """An HTTP server that answers every request with a fixed body."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __enter__(self) -> str:
        import threading
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        body = self._body

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Closing:
    """Accepts connections; answers one request on each, then closes it, or closes it unanswered."""

    def __init__(self, answers: bool) -> None:
        import socket
        import threading

        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        import contextlib

        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                with peer:
                    peer.recv(1 << 16)
                    if self._answers:
                        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                        time.sleep(0.01)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("answers", [True, False])
def test_ended_connections_are_opened_again_and_unanswered_requests_fail(answers):
    server = _Closing(answers)
    with open_load(server.address, [Kind(ECHO)], 20) as running:
        time.sleep(1)
    server.close()
    assert len(running.records) > 5
    failed = (running.records["status"] == 0).mean()
    assert failed < 0.3 if answers else failed == 1
