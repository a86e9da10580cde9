"""The data port of a worker: its listening socket, and those of workers that it accepts for."""

from __future__ import annotations

import asyncio
import http.client
import socket
from contextlib import ExitStack, contextmanager

import pytest
import uvloop

from services.frontend.http.server import HttpPortOptions
from services.frontend.listening import listen
from services.frontend.workers.server import WorkerServer
from tests.support.fallbacks import HTTP_PROTOCOL
from tests.support.server_thread import Running
from tests.support.waiting import until


class Worker:
    """The first of three workers; each listener has another port, so that a test can choose one."""

    def __init__(self, app):
        self.listeners = [listen("127.0.0.1", 0, "server.http") for _ in range(3)]
        self.ports = [each.getsockname()[1] for each in self.listeners]
        self._loop = uvloop.new_event_loop()
        options = HttpPortOptions(60, protocol=HTTP_PROTOCOL)
        self.server = WorkerServer(app, [each.dup() for each in self.listeners], 1, options)
        self.running = Running(self.server, self._loop)
        until(lambda: self.server.started)

    def accept_for(self, *numbers):
        async def accept():
            self.server.accept_for(numbers)

        asyncio.run_coroutine_threadsafe(accept(), self._loop).result(60)

    def end(self):
        self.running.stop(force=True)
        self.running.join()
        for each in self.listeners:
            each.close()


@pytest.fixture
def worker(data):
    with ExitStack() as stack:
        started = Worker(data)
        stack.callback(started.end)
        yield started


@contextmanager
def asking(port):
    """A connection with a sent request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/v2/health/live")
    yield connection
    connection.close()


def is_answered(connection, within_s=60.0):
    connection.sock.settimeout(within_s)
    try:
        return connection.getresponse().status == 200
    except TimeoutError:
        return False


def test_worker_accepts_connections_for_unready_workers(worker):
    own, second, third = worker.ports
    with asking(own) as mine, asking(second) as theirs:
        assert is_answered(mine)
        assert not is_answered(theirs, 0.1)
        worker.accept_for(2)
        assert is_answered(theirs)
        with asking(second) as one, asking(third) as another:
            assert is_answered(one)
            worker.accept_for(3)
            assert is_answered(another)
    worker.accept_for()
    with asking(second) as theirs, asking(third) as another, asking(own) as mine:
        assert is_answered(mine)
        assert not is_answered(theirs, 0.1)
        assert not is_answered(another, 0.1)
        worker.accept_for(1, 2, 3)  # its own number is ignored
        assert is_answered(another)


def test_stopping_worker_closes_all_sockets(worker):
    """Otherwise connections would still arrive, and be lost with the process."""
    worker.accept_for(2)
    worker.running.stop()
    worker.running.join()
    for each in worker.listeners:
        each.close()
    for port in worker.ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 60)
