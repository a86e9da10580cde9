"""HTTP ports with TLS: roles by certificate, renewed certificates, answers of every size."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from contextlib import ExitStack

import numpy as np
import pytest
import uvloop
import yaml
from typer.testing import CliRunner

from hps.cli.main import app
from hps.client import Admin, Client, Tls
from hps.config import auth as auth_module
from hps.config.server_settings import HttpSettings, Listener, TlsSettings
from hps.errors import Forbidden, HpsError, NotFound, Unauthenticated, Unavailable
from hps.tools.doctor import check, ports
from services.frontend.auth import Authorizer
from services.frontend.certificates import server_context
from services.frontend.http.app import admin_app
from services.frontend.http.server import HttpPortOptions, HttpServer
from services.frontend.listening import listen
from tests.support.certificates import made
from tests.support.fallbacks import HTTP_PROTOCOL
from tests.support.server_thread import Running
from tests.support.waiting import until
from tests.unit.services.frontend.conftest import CALLERS

WRITE = "/v1/tables/none/none/rows"


@pytest.fixture
def serve(small):
    """``serve(tls, guard)``: the address of a running server with the admin port's answers."""
    with ExitStack() as stack:

        def serve(tls, guard=None):
            at = Listener(port=0, tls=TlsSettings(**tls))
            answers = admin_app(small.state, small.settings, guard or Authorizer())
            context = server_context(at, "server.admin")
            server = HttpServer(
                answers,
                listen(at.host, 0, "server.admin"),
                HttpPortOptions(60, context, HTTP_PROTOCOL),
            )
            ran = Running(server, uvloop.new_event_loop())
            stack.callback(ran.join)
            stack.callback(ran.stop, force=True)
            return Server(ran)

        yield serve


class Server:
    def __init__(self, running):
        self.running = running
        scheme, _, port = running.server.url.rpartition(":")
        assert scheme == "https://127.0.0.1"
        self.url = f"https://localhost:{port}"


@pytest.fixture
def known(serve, tls, by_certificate):
    """The address of a server that identifies callers by their certificates."""
    return serve(tls, by_certificate).url


@pytest.fixture
def shows(certificates):
    """``shows(who)``: the certificate that a client presents."""

    def shows(who):
        key, certificate = certificates[who]
        return Tls(certificates["ca"][1], certificate, key)

    return shows


def outcome(ask, *args):
    try:
        ask(*args)
    except HpsError as error:
        return type(error)
    return None


@pytest.mark.parametrize(
    ("who", "found"),
    [
        ("front", (None, Forbidden, Forbidden)),
        ("trainer", (None, NotFound, Forbidden)),
        ("operator", (None, NotFound, None)),
        ("both", (None, NotFound, Forbidden)),
        ("liar", (Unauthenticated,) * 3),
    ],
)
def test_certificate_determines_the_role(known, shows, who, found):
    with Client(known, tls=shows(who)) as client, Admin(known, tls=shows(who)) as admin:
        ways = (client.lookup, "words", {"left": [1]}), (admin.ask, WRITE, {}), (admin.status,)
        assert tuple(outcome(*way) for way in ways) == found


def test_cached_head_is_checked_for_each_caller(known, shows):
    """Heads are cached by their bytes, which clients share."""
    with Client(known, tls=shows("front")) as front, Client(known, tls=shows("liar")) as liar:
        for _ in range(3):
            assert front.lookup("words", {"left": [1]}).vectors["left"][0, 0] == 1
            with pytest.raises(
                Unauthenticated, match="unknown certificate, with the names CN=liar"
            ):
                liar.lookup("words", {"left": [1]})


def test_api_key_takes_precedence_over_certificate(known, shows):
    with Admin(known, api_key="s" * 16, tls=shows("liar")) as admin:
        assert admin.status()
    with Admin(known, api_key="w" * 16, tls=shows("operator")) as admin:
        assert outcome(admin.status) is Unauthenticated


def test_connection_without_certificate_is_refused(known, certificates):
    tls = Tls(certificates["ca"][1])
    with Admin(known, tls=tls) as admin, pytest.raises(Unavailable, match="require a client cert"):
        admin.status()
    plain = known.replace("https", "http")
    with Admin(plain) as admin, pytest.raises(Unavailable, match="does it speak https"):
        admin.status()


def test_reloaded_keys_file_changes_roles(known, shows, keys_file, monkeypatch):
    monkeypatch.setattr(auth_module, "CHECK_EVERY_S", 0.01)
    with Admin(known, tls=shows("front")) as admin:
        assert outcome(admin.status) is Forbidden
        other = keys_file.with_suffix(".new")
        other.write_text(yaml.safe_dump([{**caller, "role": "admin"} for caller in CALLERS]))
        os.replace(other, keys_file)
        until(lambda: outcome(admin.status) is None)


@pytest.mark.parametrize("count", [1, 500, 1_000, 60_000])
def test_answers_of_every_size_arrive(serve, tls, shows, count):
    keys = np.arange(count) % 10
    with Client(serve(tls).url, tls=shows("front")) as client:
        for _ in range(3):
            found = client.lookup("words", {"left": keys}).vectors["left"]
            assert np.array_equal(found[:, 0], keys)


def test_renewed_certificates_are_used(serve, tmp_path, caplog):
    """The server's, and its clients' root certificates; open connections stay open."""
    caplog.set_level(logging.INFO)
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = (made(tmp_path / each, "localhost", ["DNS:localhost"]) for each in ("old", "new"))
    used = {name: tmp_path / name for name in ("key_file", "certificate_file", "client_ca_file")}

    def install(key, certificate):
        for name, source in zip(used, (key, certificate, certificate), strict=True):
            shutil.copy(source, used[name])

    install(*old)
    server = serve(used)

    def asks(by):
        with Client(server.url, retries=0, tls=Tls(by[1], by[1], by[0])) as client:
            return client.ready()

    with Client(server.url, tls=Tls(old[1], old[1], old[0])) as lasting:
        assert lasting.ready()
        shutil.copy(new[0], used["key_file"])  # its certificate is made below
        assert asks(old)
        assert asks(old)
        (message,) = [r.message for r in caplog.records if "keeping the former" in r.message]
        assert "the key does not match the certificate" in message
        install(*new)
        assert asks(new)
        assert "reloaded certificates" in caplog.text
        with pytest.raises(HpsError, match="not trusted"):
            asks(old)
        with (
            pytest.raises(Unavailable),
            Client(server.url, retries=0, tls=Tls(new[1], old[1], old[0])) as client,
        ):
            client.ready()
        assert lasting.ready()


def test_plain_text_connection_is_closed(serve, tls, shows):
    server = serve(tls)
    with socket.create_connection(("localhost", int(server.url.rpartition(":")[2])), 60) as sock:
        sock.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        sock.settimeout(60)
        while sock.recv(100):
            pass
    with Client(server.url, tls=shows("front")) as client:
        assert client.ready()


@pytest.mark.private_interface("CONNECT is an unknown method")
def test_connect_is_rejected(serve, tls, shows):
    """As without TLS; bytes after it are not read."""
    server = serve(tls)
    port = int(server.url.rpartition(":")[2])
    plain = socket.create_connection(("localhost", port), 60)
    with shows("front").context().wrap_socket(plain, server_hostname="localhost") as sock:
        sock.sendall(b"CONNECT /v2 HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET /v2 HTTP/1.1\r\n\r\n" * 99)
        got = b""
        while piece := sock.recv(4096):
            got += piece
    assert got.startswith(b"HTTP/1.1 400")
    assert got.count(b"HTTP/1.1") == 1
    with Client(server.url, tls=shows("front")) as client:
        assert client.ready()


def test_client_without_tls_close_does_not_delay_the_shutdown(serve, tls, shows):
    server = serve(tls)
    port = int(server.url.rpartition(":")[2])
    plain = socket.create_connection(("localhost", port), 60)
    context = shows("front").context()
    with context.wrap_socket(plain, server_hostname="localhost") as sock:
        sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        server.running.stop()
        until(lambda: not server.running.is_alive(), 20)


def test_commands_use_tls(known, certificates):
    """`hps` with `--tls`, on the admin port and on the data port."""

    def hps(*words, who="operator"):
        key, certificate = certificates[who]
        tls = f"ca={certificates['ca'][1]},certificate={certificate},key={key}"
        return CliRunner().invoke(app, [*words, "--tls", tls, "--output", "json"])

    ways = [
        ["status"],
        ["tables", "words"],
        ["lookup", "words", "left", "1"],
        ["updates", "status"],
    ]
    for words in ways:
        done = hps(*words, "--server", known)
        assert (done.exit_code, bool(json.loads(done.stdout))) == (0, words[0] != "updates")
    done = hps("status", "--server", known, who="front")
    assert (done.exit_code, "certificate of 'front' has role read" in done.stderr) == (1, True)
    predict = "predict", "words", "--json", '{"left": [1], "right": [2]}', "--server", known
    done = hps(*predict, who="front")
    assert json.loads(done.stdout)["outputs"]["left"][0][0] == 1.0
    done = hps("doctor", "-s", known)
    assert {c["name"]: c["verdict"] for c in json.loads(done.stdout)}["server"] == "OK"
    done = CliRunner().invoke(app, ["status", "--server", known, "--tls", "ca.pem"])
    assert (done.exit_code, "must look like ca=FILE" in done.stderr) == (2, True)


def test_doctor_checks_a_port_with_tls(serve, tls, certificates):
    port = int(serve({**tls, "client_ca_file": None}).url.rpartition(":")[2])
    at = HttpSettings(host="localhost", port=port, tls=TlsSettings(**tls))
    own = ports.RunningServer(True, "", frozenset([port]))
    unknown = ports.RunningServer(None, "its admin port does not report it")
    trusted = Tls(certificates["ca"][1])
    assert ports.port("http port", at, own, None, trusted).verdict == "OK"
    found = ports.port("http port", at, unknown, None, trusted)
    assert (found.verdict, "is served by hps" in found.found) == ("WARN", True)
    found = ports.port("http port", at, unknown)
    assert (found.verdict, "give --tls" in found.remedy) == ("WARN", True)
    assert "not trusted" in found.found
    found = ports.certificates("http", at)
    assert (found.verdict, "days" in found.found) == ("WARN", True)  # it is valid for two days
    wrong = at.model_copy(update={"tls": TlsSettings(**{**tls, "key_file": tls["client_ca_file"]})})
    found = check.attempt("http certificates", lambda: ports.certificates("http", wrong))
    assert (found.verdict, "cannot be used" in found.found) == ("FAIL", True)
