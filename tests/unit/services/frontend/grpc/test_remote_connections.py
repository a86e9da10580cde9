"""Connections to lookup nodes: lost silently, renewed with their certificates and keys."""

import contextlib
import logging
import time

import numpy as np
import pytest

from hps.config.secrets import Secret
from hps.config.server_settings import TlsSettings
from hps.errors import DeadlineExceeded, Unavailable
from hps.lookup.base import LookupModel
from hps.lookup.remote import Candidates, ClientTls, NodeRegistry, RemoteLookup, connection
from hps.tracing import RequestContext
from hps.types import JaggedKeys, LookupRequest
from services.frontend.request_observer import RequestObserver
from tests.support import redis_servers
from tests.support.network import Network
from tests.support.waiting import until
from tests.unit.services.conftest import row
from tests.unit.services.frontend.grpc.conftest import running

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def left(*keys, **more):
    return LookupRequest({"left": JaggedKeys(np.array(keys, np.int64), len(keys))}, **more)


@contextlib.contextmanager
def asking(small, nodes):
    served = small.node.models["words"]
    model = LookupModel(served.name, served.version, served.tables, served.engine.features)
    with contextlib.closing(nodes), contextlib.closing(Candidates(model, nodes)) as candidates:
        yield RemoteLookup(candidates)


def test_silently_lost_connection_is_closed(small, monkeypatch):
    soon = {"keepalive_time_ms": 300, "keepalive_timeout_ms": 2000, "http2.ping_timeout_ms": 2000}
    soon = {f"grpc.{name}": ms for name, ms in soon.items()}
    monkeypatch.setattr(connection, "OPTIONS", connection.OPTIONS | soon)
    with (
        running(small) as node,
        contextlib.closing(Network(int(node.server.url.rpartition(":")[2]))) as network,
        asking(small, NodeRegistry([network.address])) as remote,
    ):

        def answers():
            with contextlib.suppress(Unavailable, DeadlineExceeded):
                return remote.lookup(left(1)).vectors["left"].tolist() == [row(1, 3)]

        (target,) = remote._candidates.nodes.all
        until(answers)
        network.lose()
        until(lambda: target.standing == "unreachable")
        until(answers)


def test_proxy_of_the_environment_is_not_used(small, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with running(small) as node, asking(small, NodeRegistry([node.server.url])) as remote:
        assert remote.lookup(left(1)).vectors["left"].tolist() == [row(1, 3)]


def test_renewed_certificates_are_used(small, tmp_path):
    authority = redis_servers.Certificates(tmp_path / "ca")
    stranger = redis_servers.Certificates(tmp_path / "stranger")
    certificate, key = authority.make("node", host="lookup.test")
    tls = TlsSettings(certificate_file=certificate, key_file=key)
    roots = [authority.ca.read_bytes()]
    with running(small, grpc={"tls": tls}) as node:
        at = f"dns:///lookup.test:{node.server.url.rpartition(':')[2]}"
        nodes = NodeRegistry([at], lambda: ClientTls(roots[0]), resolve=lambda _host: ["127.0.0.1"])
        with asking(small, nodes) as remote:
            (target,) = nodes.all
            small.store.gate.clear()
            under_way = remote.submit(left(15, deadline=time.monotonic() + 60))
            until(lambda: target.in_flight)
            roots[0] = stranger.ca.read_bytes()
            until(lambda: "UNAVAILABLE" in target.problem)
            small.store.gate.set()
            assert under_way.result(60).vectors["left"].tolist() == [row(15, 3)]
            roots[0] = authority.ca.read_bytes()
            until(lambda: target.standing == "ready")
            assert remote.lookup(left(1)).vectors["left"].tolist() == [row(1, 3)]


def test_renewed_key_is_used(small, tmp_path, key_guard):
    path = tmp_path / "key"
    path.write_text("x" * 16)
    with running(small, key_guard) as node:
        nodes = NodeRegistry([node.server.url], None, Secret(None, path, "lookup.api_key_file"))
        with asking(small, nodes) as remote:
            assert "UNAUTHENTICATED" in nodes.problem
            path.write_text("r" * 16)
            until(lambda: remote._candidates.ready)
            assert remote.lookup(left(1)).vectors["left"].tolist() == [row(1, 3)]


@pytest.mark.parametrize("kept", [False, True])
def test_trace_is_passed_to_the_node(small, caplog, kept):
    small.state.observer = RequestObserver(1.0)
    caplog.set_level(logging.INFO, "hps.access")
    origin = RequestContext("", CALLER, "")
    with running(small) as node, asking(small, NodeRegistry([node.server.url])) as remote:
        if kept:
            submit = remote.prepare(left(1))
            submit([np.array([2])], None, origin).result(60)
        else:
            remote.lookup(left(2, origin=origin))
        until(lambda: caplog.records)
    assert caplog.records[0].args["trace_id"] == CALLER[3:35]
