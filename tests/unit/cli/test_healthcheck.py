"""``hps healthcheck`` against servers that are ready, loading, unresponsive or gone."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hps.cli.healthcheck import TIMEOUT_S
from hps.cli.main import app
from tests.support.certificates import made


@contextmanager
def answering(ready: int, live: int = 200, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A port with the given health; an error has the reason."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = {"/v2/health/ready": ready, "/v2/health/live": live}.get(self.path, 404)
            body = b'{"error": "loading ctr: 3 of 8 tables"}' if status != 200 else b"{}"
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


Check = Callable[..., Result]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """``check(port, *options, admin={…})``: the command, with HPS_CONFIG naming the configuration."""

    def run(port: int, *options: str, env: dict[str, str] | None = None, **admin: object) -> Result:
        config = tmp_path / "hps.yaml"
        config.write_text(json.dumps({"server": {"admin": {"port": port, **admin}}}))
        given = {"HPS_CONFIG": str(config), **(env or {})}
        return CliRunner().invoke(app, ["healthcheck", *options], env=given)

    return run


def test_healthcheck_of_ready_server_succeeds_silently(check: Check) -> None:
    with answering(ready=200) as port:
        done = check(port)
    assert (done.exit_code, done.output) == (0, "")


def test_loading_server_is_live_but_not_ready(check: Check) -> None:
    with answering(ready=503) as port:
        done = check(port)
        assert (done.exit_code, done.output) == (1, "error: loading ctr: 3 of 8 tables\n")
        assert check(port, "--live").exit_code == 0


def test_wildcard_host_is_asked_on_loopback(check: Check) -> None:
    with answering(ready=200) as port:
        listening = check(port, "--set", "auth.mode=off", host="0.0.0.0")
    assert listening.exit_code == 0


def test_closed_port_names_address_and_setting(check: Check) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        done = check(port)
    assert done.exit_code == 1
    assert f"no answer from 127.0.0.1:{port} (server.admin): " in done.output
    assert "refused" in done.output


def test_unresponsive_server_times_out(check: Check) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        begun = time.monotonic()
        done = check(silent.getsockname()[1])
        assert time.monotonic() - begun >= TIMEOUT_S / 2
    assert done.exit_code == 1
    assert "timed out" in done.output


def test_wrong_configuration_is_unhealthy(check: Check, tmp_path: Path) -> None:
    done = check(70_000)
    assert done.exit_code == 1
    assert "server.admin.port" in done.output
    assert check(0).exit_code == 1
    missing = check(8002, env={"HPS_CONFIG": str(tmp_path / "none.yaml")})
    assert missing.exit_code == 1
    assert "none.yaml" in missing.output


def test_client_certificate_is_sent_if_required(
    check: Check, tmp_path: Path, program: Callable[[str], str]
) -> None:
    program("openssl")
    key, certificate = made(tmp_path, "somebody-else")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    tls = {"certificate_file": str(certificate), "key_file": str(key)}
    with answering(ready=200, tls=context) as port:
        assert check(port, tls=tls).exit_code == 0
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(certificate)
    asking = {**tls, "client_ca_file": str(certificate)}
    with answering(ready=200, tls=context) as port:
        shown = f"certificate={certificate},key={key}"
        assert check(port, tls=asking, env={"HPS_TLS": shown}).exit_code == 0
        done = check(port, tls=asking)
    assert done.exit_code == 1
    assert "give --tls certificate=FILE,key=FILE, or HPS_TLS" in done.output


def test_healthcheck_imports_neither_numpy_nor_the_client(tmp_path: Path) -> None:
    """Engines run it every few seconds in every container."""
    code = (
        "import sys, hps.cli.main as m\n"
        "try: m.app(['healthcheck'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('numpy', 'hps.client', 'grpc', 'rocksdict') if name in sys.modules])"
    )
    with answering(ready=200) as port:
        config = tmp_path / "hps.yaml"
        config.write_text(json.dumps({"server": {"admin": {"port": port}}}))
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, check=True, env={"HPS_CONFIG": str(config)},
        )  # fmt: skip
    assert done.stdout == "[]\n"
