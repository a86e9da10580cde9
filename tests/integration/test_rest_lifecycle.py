"""Life of a server: "loading" instead of refused connections, drain on SIGTERM, clear errors."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import pytest

from benchmarks.peers.process import free_ports
from hps import tracing
from hps.config import configuration_from
from hps.errors import ConfigError, ModelError
from hps.node.build import open_node
from hps.observability import otel
from hps.types import LookupResult
from services.frontend.http import server as http_server
from services.frontend.main import FrontendServer
from tests.support.grpc_load import no_call_lost
from tests.support.waiting import until

WORD = {"name": "word", "shape": [1, 1], "datatype": "INT64", "data": [5]}
BODY = json.dumps({"inputs": [WORD]})
PATH = "/v2/models/words.lookup/infer"


def configuration(repository, folder, **server):
    return configuration_from(
        {
            "models": {"repository": str(repository)},
            "tiers": {"rocksdb": {"path": str(folder / "db")}},
            "server": {**{name: {"port": 0} for name in ("http", "grpc", "admin")}, **server},
        }
    )


class Running:
    """A front end on a thread of this process."""

    def __init__(self, frontend):
        self.frontend = frontend
        self.addresses = None
        self.error = None
        self.listening, self.ready = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.frontend.run(lambda _: self.ready.set(), self._listening)
        except BaseException as error:
            self.error = error
            self.listening.set()
            self.ready.set()

    def _listening(self, addresses):
        self.addresses = addresses
        self.listening.set()

    def request(self, method, path, body=None, *, admin=False):
        url = self.addresses.admin if admin else self.addresses.http
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        connection.request(method, path, body)
        reply = connection.getresponse()
        data = json.loads(reply.read())
        connection.close()
        return reply.status, data

    def join(self):
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def running(*arguments, **options):
    server = Running(FrontendServer(*arguments, **options))
    assert server.listening.wait(60)
    try:
        yield server
    finally:
        server.frontend.stop()
        server.join()


def test_server_is_live_but_not_ready_while_loading(small_repository, tmp_path):
    go = threading.Event()

    def slowly(chosen, progress):
        with progress.task("words", 10) as step:
            step(4)
            assert go.wait(60)
        return open_node(chosen, progress)

    with running(configuration(small_repository, tmp_path), open_node=slowly) as server:
        assert server.request("GET", "/v2/health/live") == (200, {"live": True})
        for path in ("/v2/health/ready", "/v2/models/words/ready"):
            status, answer = server.request("GET", path)
            assert status == 503
            assert "loading" in answer["error"]
        status, answer = server.request("POST", PATH, BODY)
        assert status == 503
        task = {"title": "words", "done": 4, "total": 10, "unit": "rows"}
        assert server.request("GET", "/v1/status", admin=True)[1]["loading"] == [task]
        go.set()
        assert server.ready.wait(60)
        assert server.request("GET", "/v2/health/ready", admin=True)[0] == 200
        assert server.request("POST", PATH, BODY)[0] == 200
        assert "loading" not in server.request("GET", "/v1/status", admin=True)[1]


def test_stop_cancels_loading(small_repository, tmp_path):
    loading = threading.Event()

    def forever(chosen, progress):
        with progress.task("words", 10**9) as step:
            while True:
                step(1)
                loading.set()
                time.sleep(0.01)

    with running(configuration(small_repository, tmp_path), open_node=forever) as server:
        assert loading.wait(60)
        start = time.monotonic()
        server.frontend.stop()
        server.join()
        assert time.monotonic() - start < 30
        assert server.error is None
        assert not server.ready.is_set()


def test_accepted_requests_are_answered_and_the_node_is_closed(
    small_repository, tmp_path, monkeypatch
):
    # On a machine that is busy with other things, the default ten seconds may pass between two steps.
    patient = configuration(small_repository, tmp_path, drain_s=60, request_timeout_ms=60_000)
    with running(patient) as server:
        assert server.ready.wait(60)
        state = server.frontend.state
        entry = state.entries["words.lookup"]
        slow, begun = Future(), threading.Event()

        def submit(*_, **__):
            begun.set()
            return slow

        monkeypatch.setattr(entry.endpoint, "submit", submit)
        answers = []
        waiting = threading.Thread(
            target=lambda: answers.append(server.request("POST", PATH, BODY))
        )
        waiting.start()
        assert begun.wait(60)
        server.frontend.stop()

        def takes_no_new_connections():
            with suppress(OSError):
                server.request("GET", "/v2/health/live")
                return False
            return True

        until(takes_no_new_connections)
        status, answer = server.request("GET", "/v2/health/ready", admin=True)
        assert status == 503
        assert "shutting down" in answer["error"]
        assert not answers
        slow.set_result(LookupResult({}))
        waiting.join(60)
        assert answers[0][0] == 200
        server.join()
        assert server.error is None
        with pytest.raises(Exception, match=r"shutting down|closed"):
            state.node.lookup("words", {"word": [[12345]]})


def test_request_longer_than_the_drain_does_not_delay_the_shutdown(
    small_repository, tmp_path, monkeypatch
):
    hasty = configuration(small_repository, tmp_path, drain_s=1, request_timeout_ms=120_000)
    with running(hasty) as server:
        assert server.ready.wait(60)
        begun = threading.Event()
        entry = server.frontend.state.entries["words.lookup"]
        monkeypatch.setattr(entry.endpoint, "submit", lambda *_, **__: begun.set() or Future())

        answers = []
        waiting = threading.Thread(
            target=lambda: answers.append(server.request("POST", PATH, BODY))
        )
        waiting.start()
        assert begun.wait(60)
        start = time.monotonic()
        server.frontend.stop()
        server.join()
        waiting.join(60)
        assert time.monotonic() - start < 60
        assert answers[0][0] == 503
        assert "shut down before it could answer" in answers[0][1]["error"]


def test_requests_during_the_drain_delay_are_answered_and_connections_closed(
    small_repository, tmp_path
):
    chosen = configuration(small_repository, tmp_path, drain_delay_s=60)
    ends = []
    answered = [threading.Semaphore(0) for _ in range(6)]

    def ask_until_told_to_go(address, mine):
        connection = http.client.HTTPConnection(address, timeout=60)
        try:
            while True:
                connection.request("POST", PATH, BODY)
                answer = connection.getresponse()
                answer.read()
                mine.release()
                if answer.headers.get("connection") == "close":
                    ends.append(answer.status)
                    return
        except Exception as error:
            ends.append(error)
        finally:
            connection.close()

    with running(chosen) as server:
        assert server.ready.wait(60)
        address = server.addresses.http.removeprefix("http://")
        clients = [
            threading.Thread(target=ask_until_told_to_go, args=(address, mine)) for mine in answered
        ]
        for client in clients:
            client.start()
        for mine in answered:
            assert all(mine.acquire(timeout=60) for _ in range(50))
        server.frontend.stop()
        for client in clients:
            client.join(60)
        assert ends == [200] * len(clients)
        assert server.request("GET", "/v2/health/ready")[0] == 503
        assert server.request("POST", PATH, BODY)[0] == 200
        server.frontend.stop()  # a second stop skips the drain
        server.join()
        assert server.error is None


def test_server_records_spans_if_tracing_is_configured(small_repository, tmp_path, monkeypatch):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    roles = []
    monkeypatch.setattr(otel, "tracer", lambda role: roles.append(role) or otel.Tracer(provider))
    with running(configuration(small_repository, tmp_path)) as server:
        assert server.ready.wait(60)
        assert tracing.recorder() is not None
        assert server.request("POST", PATH, BODY)[0] == 200
    assert server.error is None
    assert roles == ["node"]
    assert tracing.recorder() is None
    spans = {span.name: span for span in exporter.get_finished_spans()}
    request = spans["infer words.lookup"]
    for part in ("decode", "lookup", "encode"):
        assert spans[part].parent.span_id == request.context.span_id


def test_unusable_repository_ends_the_server(tmp_path):
    empty = tmp_path / "models"
    empty.mkdir()
    server = Running(FrontendServer(configuration(empty, tmp_path)))
    server.join()
    assert isinstance(server.error, ConfigError | ModelError)


def test_taken_port_is_a_configuration_error(small_repository, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name in ("http", "admin"):
            chosen = configuration(small_repository, tmp_path, **{name: {"port": port}})
            server = Running(FrontendServer(chosen))
            server.join()
            assert isinstance(server.error, ConfigError)
            assert f"server.{name}: cannot listen on 127.0.0.1:{port}" in str(server.error)


def test_port_open_to_all_hosts_requires_an_explicit_auth_mode(small_repository, tmp_path):
    with pytest.raises(ConfigError, match=r"auth\.mode must be set"):
        FrontendServer(
            configuration(small_repository, tmp_path, http={"host": "0.0.0.0", "port": 0})
        )


@pytest.mark.private_interface("the application's timeout ends a body")
def test_stalled_connections_are_closed_but_not_idle_ones(small_repository, tmp_path, monkeypatch):
    """A partial head or body, or a connection without data; not an idle one."""
    monkeypatch.setattr(http_server, "SWEEP_S", 0.3)
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
    with running(configuration(small_repository, tmp_path)) as server:
        assert server.ready.wait(60)
        host, _, port = server.addresses.http.removeprefix("http://").rpartition(":")
        stalled = []
        for start in (b"", b"POST /v2", head):
            connection = socket.create_connection((host, int(port)), 60)
            connection.sendall(start)
            stalled.append(connection)
        with socket.create_connection((host, int(port)), 60) as idle:
            idle.sendall(head + BODY.encode())
            assert idle.recv(65536).startswith(b"HTTP/1.1 200")
            for connection in stalled:
                assert connection.recv(100) == b""
                connection.close()
            idle.sendall(head + BODY.encode())
            while not (piece := idle.recv(65536)).startswith(b"HTTP/1.1 200"):
                assert piece


def serve(folder, **settings):
    (folder / "config.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "hps.cli.main", "serve", "--output", "json"]
    return subprocess.Popen(
        [*command, "--config", str(folder / "config.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_process_with_exit_code_0(small_repository, tmp_path, number):
    http_port, admin_port = free_ports(2)
    server = {"http": {"port": http_port}, "grpc": None, "admin": {"port": admin_port}}
    models = {"repository": str(small_repository)}
    with serve(tmp_path, models=models, server=server) as process:
        assert json.loads(process.stdout.readline())["endpoints"]["http"].endswith(str(http_port))
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert " INFO hps.frontend stopped" in errors
    assert "Traceback" not in errors


def test_sigterm_under_load_loses_no_request(small_repository, tmp_path):
    http_port, admin_port = free_ports(2)
    server = {"http": {"port": http_port}, "grpc": {"port": 0}, "admin": {"port": admin_port}}
    body = json.dumps(
        {"inputs": [{"name": "word", "shape": [1, 1], "datatype": "INT64", "data": [1]}]}
    )
    ends, answered = [], [threading.Semaphore(0) for _ in range(4)]

    def ask_until_told_to_stop(mine):
        connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=60)
        try:
            while True:
                connection.request("POST", "/v2/models/words.lookup/infer", body)
                answer = connection.getresponse()
                answer.read()
                mine.release()
                if answer.headers.get("connection") == "close":
                    ends.append(answer.status)
                    return
        except Exception as error:
            ends.append(error)
        finally:
            connection.close()

    with serve(tmp_path, models={"repository": str(small_repository)}, server=server) as process:
        urls = json.loads(process.stdout.readline())["endpoints"]
        clients = [threading.Thread(target=ask_until_told_to_stop, args=(a,)) for a in answered]
        for client in clients:
            client.start()
        for each in answered:
            assert all(each.acquire(timeout=60) for _ in range(100))
        with no_call_lost(urls["grpc"]):
            os.kill(process.pid, signal.SIGTERM)
        for client in clients:
            client.join(60)
        _, errors = process.communicate(timeout=60)
    assert ends == [200] * 4
    assert process.returncode == 0, errors


def test_missing_certificates_end_the_process_with_exit_code_2(small_repository, tmp_path):
    tls = {"certificate_file": "no.crt", "key_file": "no.key"}
    server = {"http": {"port": 0}, "grpc": None, "admin": {"port": 0, "tls": tls}}
    models = {"repository": str(small_repository)}
    with serve(tmp_path, models=models, server=server) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    (reported,) = [line for line in errors.splitlines() if "server.admin.tls" in line]
    assert "no.key: No such file or directory" in reported
    assert "Traceback" not in errors


def test_taken_port_ends_the_process_with_exit_code_2(small_repository, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = {"http": {"port": port}, "grpc": None, "admin": {"port": 0}}
        with serve(
            tmp_path, models={"repository": str(small_repository)}, server=server
        ) as process:
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"server.http: cannot listen on 127.0.0.1:{port}" in errors
    assert "Traceback" not in errors
