"""Accepting connections: all that wait at once, through failures, and with TLS."""

import asyncio
import errno
import logging
import socket
import ssl
from contextlib import suppress
from functools import partial

import pytest
import uvloop

from services.frontend import acceptor
from services.frontend.acceptor import Acceptor
from services.frontend.listening import listen
from tests.support.certificates import made

MANY = 60


class Echo(asyncio.Protocol):
    def __init__(self, open_ones):
        self._open = open_ones

    def connection_made(self, transport):
        self.transport = transport
        self._open.append(transport)

    def data_received(self, data):
        self.transport.write(data)


@pytest.fixture
def opened():
    return []


@pytest.fixture
def echo(opened):
    return partial(Echo, opened)


@pytest.fixture
def sock():
    with listen("127.0.0.1", 0, "a test") as made:
        yield made


def run(main, opened):
    """A loop that ends with open connections would hang: their warnings are errors in tests."""

    async def whole():
        result = await main()
        for transport in opened:
            transport.abort()
        await asyncio.sleep(0.05)
        return result

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(whole(), 60))


def connect(sock):
    return socket.create_connection(sock.getsockname(), timeout=20)


def answer(client):
    client.sendall(b"hello")
    return client.recv(100)


def test_all_waiting_connections_are_opened_in_a_few_iterations(sock, echo, opened):
    """As many iterations as connections would take seconds on a busy loop."""
    clients = [connect(sock) for _ in range(MANY)]

    async def main():
        accepting, iterations = Acceptor(sock, echo), 0
        while len(opened) < MANY:
            await asyncio.sleep(0)
            iterations += 1
        accepting.close()
        return iterations

    assert run(main, opened) < 10
    for client in clients:
        client.close()


def test_connections_stay_open_and_no_others_are_accepted_after_a_close(sock, echo, opened):
    address = sock.getsockname()

    async def main():
        accepting = Acceptor(sock, echo)
        client = await asyncio.to_thread(socket.create_connection, address, 20)
        assert await asyncio.to_thread(answer, client) == b"hello"
        accepting.close()
        accepting.close()
        assert await asyncio.to_thread(answer, client) == b"hello"
        client.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(socket.create_connection, address, 20)

    run(main, opened)


class Exhausted(socket.socket):
    """A listening socket for whose connections the system has no descriptors at first."""

    failures = 2

    def accept(self):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_connections_wait_while_the_system_has_no_descriptors(
    sock, echo, opened, caplog, monkeypatch
):
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.01)

    async def main():
        accepting = Acceptor(Exhausted(fileno=sock.detach()), echo)
        client = await asyncio.to_thread(connect, accepting._sock)
        assert await asyncio.to_thread(answer, client) == b"hello"
        client.close()
        accepting.close()

    with caplog.at_level(logging.WARNING):
        run(main, opened)
    assert [each.message for each in caplog.records] == [
        "connections wait: the system cannot accept one: Too many open files"
    ] * 2


def test_connections_that_do_not_complete_the_handshake_are_closed(sock, echo, opened, tmp_path):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key, certificate = made(tmp_path, "localhost")
    tls.load_cert_chain(certificate, key)

    async def main():
        accepting = Acceptor(sock, echo, tls, handshake_s=0.2)
        plain = await asyncio.to_thread(connect, sock)
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        silent = await asyncio.to_thread(connect, sock)
        for client in (plain, silent):
            await asyncio.to_thread(read_to_end, client)
        assert not accepting._opening
        accepting.close()

    run(main, opened)
    assert not opened


def read_to_end(client):
    with client, suppress(ConnectionError):
        while client.recv(1000):
            pass
