"""The socket over which other processes get channels to the batch scheduler."""

import os
import socket
import threading
import time

import numpy as np
import pytest

from hps.errors import TierError, Unavailable
from hps.lookup.base import Feature
from hps.types import EmbeddingTable
from tests.support.waiting import until

pytest.importorskip("hps.native._core")
from hps.predict.scheduler import channel_socket
from hps.predict.scheduler.channel_socket import NODE_ENDED, ChannelListener, connect
from hps.predict.scheduler.client import SchedulerClient, Status
from hps.predict.scheduler.columns import ModelColumns, TensorColumn
from hps.predict.scheduler.host import SchedulerHost
from tests.support import native_scheduler

COLUMNS = ModelColumns(
    [Feature("key", EmbeddingTable.make("t", 4), hotness=1)],
    [],
    [TensorColumn("score", "<i8", ())],
    100,
)


class Lane(native_scheduler.Lane):
    context = stream = 0


@pytest.fixture
def host():
    host = SchedulerHost()
    yield host
    host.close()


@pytest.fixture
def listener(host, tmp_path):
    listener = ChannelListener(tmp_path, host)
    yield listener
    listener.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_connected_client_gets_answers_of_the_listeners_host(host, listener):
    model = host.add_model(COLUMNS, None)
    host.add_lane(model, Lane((1,), []))
    client = connect(listener.path)
    answer = client.submit(model, 1, [np.array([5])], (8, 8), None, lambda a: a).result(10)
    assert (answer.status, answer.data.view(np.int64).tolist()) == (Status.DONE, [15])
    client.close()


def test_end_of_the_listener_fails_its_clients_and_removes_its_file(listener):
    client = connect(listener.path)
    listener.close()
    listener.close()
    until(lambda: client.has_failed)
    with pytest.raises(Unavailable, match=NODE_ENDED):
        client.submit(1, 1, [np.array([5])], (8, 8), None, lambda a: a)
    assert not listener.path.exists()
    with pytest.raises(TierError, match="no channel to its GPU"):
        connect(listener.path)
    client.close()


def test_clients_that_come_and_go_leave_no_open_file(host, listener):
    connect(listener.path).close()  # whatever is opened once
    time.sleep(0.05)
    before = open_files()
    for _ in range(10):
        connect(listener.path).close()
    until(lambda: open_files() <= before, 10)


def test_files_of_a_channel_are_not_inherited(listener, monkeypatch):
    opened = []

    class Client(SchedulerClient):
        def __init__(self, files, close):
            opened.extend((files.memory, files.wake, files.woken))
            super().__init__(files, close)

    monkeypatch.setattr(channel_socket, "SchedulerClient", Client)
    client = connect(listener.path)
    assert [os.get_inheritable(each) for each in opened] == [False] * 3
    client.close()


def serve(path, answer):
    """Listen at ``path`` for one connection, and pass it to ``answer``."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def run():
        connection, _ = listener.accept()
        with connection, listener:
            answer(connection)

    threading.Thread(target=run, daemon=True).start()


@pytest.mark.parametrize(
    ("hello", "files", "why"),
    [
        (b"hps-scheduler-9", 3, "another version"),
        (b"hps-scheduler-1", 2, "another version"),
        (b"", 0, "it is stopping"),
    ],
)
def test_node_that_answers_otherwise_is_an_error_without_open_files(tmp_path, hello, files, why):
    def answer(connection):
        if hello:
            pipes = [each for _ in range(2) for each in os.pipe()]
            socket.send_fds(connection, [hello], pipes[:files])
            for each in pipes:
                os.close(each)

    before = open_files()
    serve(tmp_path / "s", answer)
    with pytest.raises(TierError, match=why):
        connect(tmp_path / "s")
    until(lambda: open_files() <= before, 10)


def test_node_that_does_not_answer_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(channel_socket, "_TIMEOUT_S", 0.05)
    serve(tmp_path / "s", lambda _connection: time.sleep(1))
    with pytest.raises(TierError, match="timed out"):
        connect(tmp_path / "s")


def test_closed_host_ends_a_new_connection_with_a_warning(host, listener, caplog):
    host.close()
    with pytest.raises(TierError, match="it is stopping"):
        connect(listener.path)
    until(lambda: "a process got no channel to the GPU" in caplog.text)
    assert not listener._connections


def test_client_that_left_before_it_got_its_files_leaves_none_open(listener, monkeypatch, caplog):
    def fail(*_arguments):
        raise OSError("broken pipe")

    before = open_files()
    monkeypatch.setattr(socket, "send_fds", fail)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(listener.path))
        until(lambda: "broken pipe" in caplog.text)
    until(lambda: open_files() <= before, 10)
