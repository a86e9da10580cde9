"""A worker that is stopped before its node is available."""

from __future__ import annotations

import socket
import tempfile
import threading
from pathlib import Path

import pytest

from hps.config import as_configuration
from services.frontend.listening import listen
from services.frontend.workers.channel import ControlChannelWorker
from services.frontend.workers.process import WorkerProcess
from tests.support.waiting import until


class Started:
    """A worker of a node that loads forever."""

    def __init__(self, folder: Path, *, replaces: bool) -> None:
        self._settings = {"server": {"runtime": str(folder), "grpc": None}}
        self._replaces = replaces
        self.worker: WorkerProcess | None = None
        self.ours, self._theirs = socket.socketpair()
        # Daemon: a worker that hangs must not make the test hang.
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with listen("127.0.0.1", 0, "server.http") as listener, self._theirs:
            configuration = as_configuration(self._settings)
            worker = self.worker = WorkerProcess(
                configuration, 1, None, [listener], replaces=self._replaces
            )
            worker.run(ControlChannelWorker(self._theirs, worker.on_channel_closed))

    def waits(self) -> bool:
        return self.worker is not None and bool(self.worker.state.loading)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="hps-") as path:  # pytest's names are too long
        yield Path(path)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("early", [False, True], ids=["while it waits", "before it waits"])
def test_worker_ends_with_the_node_that_it_waits_for(folder, replaces, early):
    started = Started(folder, replaces=replaces)
    if early:
        started.ours.close()
    started.thread.start()
    if not early:
        until(started.waits)
        started.ours.close()
    started.thread.join(60)
    assert not started.thread.is_alive()


def test_stop_before_the_start_ends_the_server(folder):
    with listen("127.0.0.1", 0, "server.http") as listener:
        settings = {"server": {"runtime": str(folder), "grpc": None}}
        worker = WorkerProcess(as_configuration(settings), 1, None, [listener])
        worker.stop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            control = ControlChannelWorker(theirs, lambda: None)
            ended = threading.Thread(target=worker.run, args=(control,), daemon=True)
            ended.start()
            ended.join(60)
            assert not ended.is_alive()
