"""A worker's heartbeat: answered by the threads that serve clients; when the worker counts as stuck."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest
import uvloop

from hps.config.server_settings import GrpcSettings
from services.frontend.auth import Authorizer
from services.frontend.grpc.server import GrpcServer
from services.frontend.http.server import HttpPortOptions
from services.frontend.listening import listen
from services.frontend.workers.heartbeat import (
    GrpcHeartbeat,
    Heartbeat,
    HttpHeartbeat,
    _RunnableTime,
)
from services.frontend.workers.server import WorkerServer
from services.frontend.workers.worker_watch import WorkerWatch
from tests.support.fallbacks import HTTP_PROTOCOL
from tests.support.server_thread import Running
from tests.support.waiting import until


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def started(stack, server, loop):
    running = Running(server, loop)
    stack.callback(running.join)
    stack.callback(running.stop, force=True)
    until(lambda: server.started)
    return running


@pytest.fixture
def over_http(data, stack):
    """The transport to a worker, and its event loop."""
    loop = uvloop.new_event_loop()
    ours, theirs = socket.socketpair()
    listener = listen("127.0.0.1", 0, "server.http")
    started(
        stack,
        WorkerServer(data, [listener], 1, HttpPortOptions(60, protocol=HTTP_PROTOCOL), theirs),
        loop,
    )
    return stack.enter_context(closing(HttpHeartbeat(ours))), loop


def test_http_heartbeat_is_answered_by_the_event_loop(over_http):
    transport, loop = over_http
    assert all(transport.beat(60) for _ in range(3))
    goes_on = threading.Event()
    loop.call_soon_threadsafe(goes_on.wait)
    try:
        assert not transport.beat(0.05)
        assert not transport.beat(0.05)
    finally:
        goes_on.set()
    assert transport.beat(60)  # the late answer
    assert transport.beat(60)


def test_grpc_heartbeat_is_answered_by_the_event_loop_of_the_calls(
    small, stack, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # pytest's paths are too long
    at = GrpcSettings(port=0)
    server = GrpcServer(at, small.state, small.settings, Authorizer(), also_at=Path("beat"))
    started(stack, server, None)
    transport = stack.enter_context(closing(GrpcHeartbeat("beat")))
    assert all(transport.beat(60) for _ in range(3))
    begun, goes_on = threading.Event(), threading.Event()
    infer = server.context.methods["/inference.GRPCInferenceService/ModelInfer"]
    begin = infer.begin

    def stuck(message, reply):
        begun.set()
        assert goes_on.wait(60)
        begin(message, reply)

    monkeypatch.setattr(infer, "begin", stuck)
    with grpc.insecure_channel(server.url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(b"")
        assert begun.wait(60)
        try:
            assert not transport.beat(0.05)
            assert not transport.beat(0.05)
        finally:
            goes_on.set()
        assert transport.beat(60)
        assert call.exception(60).code() is grpc.StatusCode.NOT_FOUND


def test_heartbeat_on_a_closed_connection_is_unanswered(stack):
    ours, theirs = socket.socketpair()
    transport = stack.enter_context(closing(HttpHeartbeat(ours)))
    theirs.close()
    assert not transport.beat(60)
    assert not transport.beat(60)


class Played:
    """A heartbeat transport, answered or not."""

    name = "http"
    is_answered = True

    def beat(self, _wait_s):
        return self.is_answered


def test_time_without_answer_counts_until_the_next_answer():
    transport = Played()
    heartbeat = Heartbeat(os.getpid(), [transport, Played()])
    heartbeat.check()
    assert (heartbeat.unanswered, heartbeat.unanswered_s, heartbeat.stuck_s) == ([], 0.0, 0.0)
    transport.is_answered = False
    time.sleep(0.02)
    heartbeat.check(most_s=0.001)
    assert heartbeat.unanswered == ["http"]
    assert heartbeat.unanswered_s >= 0.02
    assert (
        heartbeat.stuck_s <= 0.001
    )  # as if this process had been stopped for the rest of the time
    transport.is_answered = True
    heartbeat.check()
    assert (heartbeat.unanswered, heartbeat.unanswered_s, heartbeat.stuck_s) == ([], 0.0, 0.0)


# -- runnable time of a process --------------------------------------------------------------------

LOOP = "print(1, flush=True)\nwhile True: pass"
SLEEP = "print(1, flush=True); input()"
TRACED = f"import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0); {SLEEP}"


@pytest.fixture
def process(stack):
    """``process(program, *before)``: one that has printed something, started by ``before``."""

    def start(program, *before):
        command = [*before, sys.executable, "-c", program]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(child.communicate)
        stack.callback(child.kill)
        assert child.stdout.read(1)
        return child

    return start


def test_waiting_process_was_runnable(process):
    opportunity = _RunnableTime(process(SLEEP).pid)
    until(lambda: opportunity.in_last(7.0) == 7.0)


def test_stopped_process_was_runnable(process):
    child = process(LOOP)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert _RunnableTime(child.pid).in_last(7.0) == 7.0


def test_process_stopped_by_a_debugger_was_not_runnable(process):
    assert _RunnableTime(process(TRACED).pid).in_last(7.0) == 0.0


def test_process_waiting_for_a_core_was_runnable_for_its_cpu_time(process):
    """A process that runs only on an idle core, beside one that always runs."""
    core = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    process(LOOP, *core)
    opportunity = _RunnableTime(process(LOOP, *core, "chrt", "--idle", "0").pid)
    opportunity.in_last(0.0)
    time.sleep(0.5)
    assert opportunity.in_last(7.0) < 0.3


def test_ended_process_counts_as_runnable(process):
    child = process(SLEEP)
    child.kill()
    child.wait()
    assert _RunnableTime(child.pid).in_last(7.0) == 7.0


# -- watchdog of a worker --------------------------------------------------------------------------


class Silent:
    """A heartbeat that is unanswered for the next of ``seconds`` at each check; 0: answered."""

    def __init__(self, *seconds):
        self._left = list(seconds)
        self.unanswered, self.unanswered_s, self.stuck_s = ["http"], 0.0, 0.0

    def check(self, _most_s):
        self.unanswered_s = self.stuck_s = self._left.pop(0) if self._left else self.unanswered_s


@pytest.fixture
def watched(process, monkeypatch):
    """``watched(*seconds)``: a watchdog with a `Silent` heartbeat, its reports, and the exit code."""
    monkeypatch.setattr("services.frontend.workers.worker_watch.BEAT_S", 0.01)

    def watch(*seconds):
        reported, stopping = [], threading.Event()
        watch = WorkerWatch(3, 10.0, reported.append)
        child = process(SLEEP)
        ends = threading.Timer(0.3, child.kill) if seconds[-1] <= 10 else None
        if ends is not None:
            ends.start()
        code = watch.wait(child, Silent(*seconds), stopping)
        return watch, reported, code

    return watch


def test_unresponsive_worker_is_not_ready_until_it_answers(watched, caplog):
    watch, reported, _ = watched(0.0, 2.0, 6.0, 7.0, 0.0, 0.0)
    assert reported == [False, True]
    assert watch.timeouts == 0
    assert not watch.unresponsive
    assert "worker does not answer worker=3" in caplog.text


def test_unresponsive_worker_is_killed_after_its_timeout(watched, caplog):
    watch, reported, code = watched(0.0, 6.0, 11.0)
    assert reported == [False]
    assert watch.timeouts == 1
    assert code in (-signal.SIGUSR1, -signal.SIGKILL)
    assert "worker killed: it does not answer" in caplog.text
    assert "silent_s=11.0 on=http" in caplog.text
