"""Supervision of a worker in failures, with simulated processes."""

from __future__ import annotations

import errno
import os
import queue
import socket
import subprocess
import threading

from hps.backoff import Backoff
from hps.config import as_configuration
from hps.observability import metric_names as m
from services.frontend.statistics import Statistics
from services.frontend.workers import supervised_worker as supervised
from services.frontend.workers.channel import ControlChannelWorker
from services.frontend.workers.process import BROKEN
from services.frontend.workers.supervised_worker import SupervisedWorker
from tests.support.waiting import until


class Life:
    """A simulated worker process: becomes ready or not, then ends with ``code``, or when terminated."""

    pid = 1

    def __init__(self, *, ready: bool = True, code: int | None = None) -> None:
        self._ready = ready
        self._codes: queue.SimpleQueue[int] = queue.SimpleQueue()
        if code is not None:
            self._codes.put(code)

    def begin(self, end: socket.socket) -> Life:
        self._end = end
        if self._ready:
            ControlChannelWorker(end, lambda: None).send_first("ready")
        else:
            end.close()
        return self

    def terminate(self) -> None:
        self._codes.put(0)

    def wait(self, timeout_s: float | None = None) -> int:
        try:
            code = self._codes.get(timeout=timeout_s or 60)
        except queue.Empty:
            raise subprocess.TimeoutExpired([], timeout_s or 60) from None
        self._end.close()
        return code

    def poll(self) -> None:
        """None: it runs."""


class Run:
    """A supervised worker with these simulated processes; an error is raised in place of one."""

    def __init__(self, monkeypatch, *lives):
        left = iter(lives)

        def popen(_command, *, pass_fds, **_given):
            life = next(left)
            if isinstance(life, OSError):
                raise life
            return life.begin(socket.socket(fileno=os.dup(pass_fds[0])))

        monkeypatch.setattr(supervised.subprocess, "Popen", popen)
        monkeypatch.setattr(supervised, "_BACKOFF", Backoff(0, 0))
        self.broke = threading.Event()
        self.worker = SupervisedWorker(
            1, as_configuration({}), [], None, self.broke.set, self._changed
        )
        self.states: list[bool] = []

    def __enter__(self):
        self.worker.start()
        return self

    def _changed(self):
        self.states.append(self.worker.ready)

    def __exit__(self, *_):
        self.worker.stop()
        self.worker.join(60)


def test_failed_process_start_is_retried(monkeypatch, caplog):
    lack = OSError(errno.ENOMEM, "Cannot allocate memory")
    pairs = []
    pair = socket.socketpair

    def socketpair():
        if not pairs:
            pairs.append(())
            raise OSError(errno.EMFILE, "Too many open files")
        pairs.append(pair())
        return pairs[-1]

    monkeypatch.setattr(supervised.socket, "socketpair", socketpair)
    with Run(monkeypatch, lack, Life()) as run:
        until(lambda: run.worker.ready)
        assert run.worker.restarts == 2
        assert [end.fileno() for end in pairs[1]] == [-1, -1]
    assert not run.broke.is_set()
    assert "Cannot allocate memory" in caplog.text
    assert "Too many open files" in caplog.text


def test_invalid_configuration_ends_the_server_unless_it_was_ready_before(monkeypatch):
    lives = Life(code=1), Life(ready=False, code=BROKEN), Life()
    with Run(monkeypatch, *lives) as run:
        until(lambda: run.worker.ready and run.worker.restarts == 2)
        assert not run.broke.is_set()
        assert not run.worker.broken
    with Run(monkeypatch, Life(ready=False, code=BROKEN)) as run:
        assert run.broke.wait(60)
        assert run.worker.broken


def test_values_count_once_if_a_worker_ends_during_a_query(monkeypatch):
    def ended_meanwhile():
        reported = ask()
        worker._keep_last_values()
        return reported

    class Channel:
        def query(self, *_):
            own = Statistics()
            own.succeeded(1, (0, 1, 2, 3))
            metrics = {m.LOOKUP_KEYS: [[["words", "cpu"], 7]]}
            return {"metrics": metrics, "statistics": {"words": own.numbers()}}

    worker = SupervisedWorker(1, as_configuration({}), [], None, lambda: None, lambda: None)
    ask = worker._fetch_values
    monkeypatch.setattr(worker, "_fetch_values", ended_meanwhile)
    worker._channel, worker.ready = Channel(), True
    assert worker.metrics()[m.LOOKUP_KEYS] == {("words", "cpu"): 7}
    worker._channel = Channel()
    counted = worker.statistics()["words"]
    assert sum(each["success_count"] for each in counted) == 2  # one of each worker


def test_values_of_ended_workers_are_dropped_with_their_version():
    """The next version does not inherit them: metrics, and the protocol's statistics."""

    def reported(version):
        own = Statistics()
        own.succeeded(1, (0, 1, 2, 3))
        labels = ["words", version, "words", "cpu"]
        statistics = {f"{name}/{version}": own.numbers() for name in ("words", "words.lookup")}
        return {"metrics": {m.LOOKUP_KEYS: [[labels, 7]]}, "statistics": statistics}

    worker = SupervisedWorker(1, as_configuration({}), [], None, lambda: None, lambda: None)
    for version in ("1", "2"):
        worker._values = reported(version)
        worker._keep_last_values()
    worker._values = reported("1")
    assert len(worker.statistics()["words/1"]) == 2
    worker.drop_version("words", 1)
    assert worker.metrics()[m.LOOKUP_KEYS] == {("words", "2", "words", "cpu"): 7}
    assert worker.statistics().keys() == {"words/2", "words.lookup/2"}
    assert worker.statistics()["words/2"][0]["success_count"] == 1
