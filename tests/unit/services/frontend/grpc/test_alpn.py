"""TLS clients that negotiate HTTP/2, another protocol, or none (ALPN)."""

from __future__ import annotations

import socket
import ssl

import pytest

from services.frontend.grpc.http2 import frames
from services.frontend.grpc.http2.preface import PREFACE
from tests.unit.services.frontend.grpc.test_server import certified

SETTINGS = PREFACE + frames.frame(frames.SETTINGS, 0, 0, b"")


@pytest.fixture
def connect(serve, tmp_path):
    """``connect(protocols)``: a TLS connection to a server."""
    key, certificate = certified(tmp_path, "localhost")
    tls = {"key_file": key, "certificate_file": certificate}
    port = int(serve(grpc={"tls": tls}).server.url.rpartition(":")[2])
    opened = []

    def make(*protocols):
        context = ssl.create_default_context(cafile=certificate)
        if protocols:
            context.set_alpn_protocols(protocols)
        plain = socket.create_connection(("127.0.0.1", port), 20)
        opened.append(context.wrap_socket(plain, server_hostname="localhost"))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.mark.parametrize("protocols", [("h2",), ("http/1.1", "h2"), ()])
def test_http2_is_spoken_if_negotiated_or_known(connect, protocols):
    client = connect(*protocols)
    assert client.selected_alpn_protocol() == ("h2" if protocols else None)
    client.sendall(SETTINGS)
    assert client.recv(9)[3] == frames.SETTINGS


def test_http1_client_is_told_of_http2(connect):
    client = connect("http/1.1")
    assert client.selected_alpn_protocol() is None
    client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert client.recv(100).startswith(b"HTTP/1.1 400 ")
