"""One worker, supervised by the node's process: started, queried, replaced when it ends or is stuck."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hps.backoff import Backoff
from hps.config import Configuration
from hps.observability.metrics import MetricValues, names_of
from services.frontend.logs import Level, fields, log
from services.frontend.statistics import Statistics
from services.frontend.workers.channel import ControlChannelSupervisor
from services.frontend.workers.heartbeat import (
    GrpcHeartbeat,
    Heartbeat,
    HeartbeatTransport,
    HttpHeartbeat,
)
from services.frontend.workers.process import BROKEN
from services.frontend.workers.worker_watch import WorkerWatch

_BACKOFF = Backoff(0.1, 5.0)
# A worker that ran for this long did not fail because of its start.
_STABLE_S = 60.0
# Timeout for fetching a worker's metrics; after it, the last ones are used.
_QUERY_TIMEOUT_S = 2.0
_LONG_QUERY_TIMEOUT_S = 20.0


class SupervisedWorker:
    """Worker ``number``, counted from 1, and its successors.

    ``listeners``: sockets of all workers, if they answer HTTP; the kernel sends the worker the
    connections of
    its number. ``grpc_heartbeat``: path of the socket to create, if it answers gRPC. ``on_broken`` is
    called on a
    thread if it can't start because its configuration is wrong, ``on_change`` when it becomes ready or not
    ready. A worker that was ready once is always replaced, and its start retried."""

    def __init__(
        self,
        number: int,
        configuration: Configuration,
        listeners: Sequence[socket.socket],
        grpc_heartbeat: Path | None,
        on_broken: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        self.number = number
        self.ready = False
        self.broken = False
        self._was_ready = False
        self.restarts = 0
        self._configuration = configuration
        self._listeners, self._grpc_heartbeat = listeners, grpc_heartbeat
        self.watch = WorkerWatch(
            number, configuration.settings.server.worker_timeout_s, self._set_ready
        )
        self._on_broken, self._on_change = on_broken, on_change
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: ControlChannelSupervisor | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {}
        self._metrics_before = MetricValues()
        self._statistics_before: dict[str, Statistics] = {}
        self._thread = threading.Thread(target=self._run, name=f"hps-worker-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Drain and end the worker; a second call drops the requests that it still answers.

        Works before the start, too."""
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                self._process.terminate()

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended; kill it after ``timeout_s``."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("worker killed %s", fields(worker=self.number, after_s=timeout_s))
            assert self._process is not None
            self._process.kill()
            self._thread.join()

    def describe(self) -> dict[str, Any]:
        """The worker's state as plain data, for JSON."""
        pid = None if self._process is None else self._process.pid
        state = "ready" if self.ready else "starting"
        if self.watch.unresponsive:
            state = "unresponsive"
        return {
            "role": "worker",
            "number": self.number,
            "pid": pid,
            "state": "stopping" if self._stopping.is_set() else state,
            "restarts": self.restarts,
        }

    # -- metrics and statistics -------------------------------------------------------------------

    def metrics(self) -> MetricValues:
        """Metrics of the worker and its predecessors."""
        self._fetch_values()
        with self._lock:  # `_keep_last_values` moves the worker's metrics to the predecessors'
            found = MetricValues.from_json(self._values.get("metrics", {}))
            if not self.ready:
                found = found.grown()
            found.add(self._metrics_before)
        return found

    def statistics(self) -> dict[str, list[Any]]:
        """Values of `Statistics` by key, of the worker and its predecessors."""
        self._fetch_values()
        with self._lock:
            found = {
                name: [reported] for name, reported in self._values.get("statistics", {}).items()
            }
            for name, before in self._statistics_before.items():
                found.setdefault(name, []).append(before.numbers())
        return found

    def drop_version(self, model: str, version: int) -> None:
        """Drop a version that no process serves any more."""
        with self._lock:
            reported = MetricValues.from_json(self._values.get("metrics", {}))
            for numbers in (reported, self._metrics_before):
                numbers.drop(model, version)
            self._values = {**self._values, "metrics": reported.as_json()}
            for name in names_of(model):
                self._values.get("statistics", {}).pop(f"{name}/{version}", None)
                self._statistics_before.pop(f"{name}/{version}", None)

    def set_level(self, level: Level) -> None:
        """Set the log level of the worker and its successors."""
        settings = self._configuration.settings
        server = settings.server.model_copy(update={"log_level": level})
        settings = settings.model_copy(update={"server": server})
        self._configuration = replace(self._configuration, settings=settings)
        channel = self._channel
        if self.ready and channel is not None:
            with suppress(OSError):  # it has ended, or is stuck
                channel.query("log", _QUERY_TIMEOUT_S, level)

    def ask(self, query: str, *arguments: Any) -> Any:
        """Return the worker's answer to a query; None if it is not ready, or has ended or timed out."""
        channel = self._channel
        if not self.ready or channel is None:
            return None
        try:
            return channel.query(query, _LONG_QUERY_TIMEOUT_S, *arguments)
        except OSError:
            return None

    def accept_for(self, numbers: Collection[int]) -> None:
        """Make the worker also accept connections for exactly these other workers."""
        self._notify("accept_for", list(numbers))

    def set_not_ready(self, reason: str) -> None:
        """Set the worker's reason for not being ready; empty: ready."""
        self._notify("set_not_ready", reason)

    def _notify(self, name: str, argument: Any) -> None:
        channel = self._channel
        if self.ready and channel is not None:
            with suppress(OSError):  # it has ended
                channel.notify(name, argument)

    def _fetch_values(self) -> None:
        """Fetch the worker's current metrics and statistics, if it answers."""
        channel = self._channel
        if self.ready and channel is not None:
            try:
                reported = channel.query("numbers", _QUERY_TIMEOUT_S)
            except OSError:
                pass  # it has ended, or is stuck
            else:
                with self._lock:
                    if self._channel is channel:
                        self._values = reported

    def _keep_last_values(self) -> None:
        """Keep the last values of an ended worker: sums must not decrease."""
        with self._lock:
            self._channel = None
            values, self._values = self._values, {}
            self._metrics_before.add(MetricValues.from_json(values.get("metrics", {})).grown())
            for name, reported in values.get("statistics", {}).items():
                self._statistics_before.setdefault(name, Statistics()).add(reported)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                end: dict[str, Any] = {"exit_code": self._run_process()}
            except OSError as error:
                end = {"error": error}
            if self._stopping.is_set():
                return
            if end.get("exit_code") == BROKEN and not self._was_ready:
                self.broken = True
                self._on_broken()
                return
            if time.monotonic() - began > _STABLE_S:
                failures = 0
            failures += 1
            self.restarts += 1
            pause_s = _BACKOFF.pause_s(failures)
            event = fields(worker=self.number, **end, restart_in_s=round(pause_s, 3))
            log.error("worker ended %s", event)
            self._stopping.wait(pause_s)

    def _run_process(self) -> int:
        """Run one worker process; return its exit code.

        Raises OSError if the system cannot create another process or file."""
        with ExitStack() as ours:
            with ExitStack() as theirs:
                end, control = _socket_pair(ours, theirs)
                channel, files = ControlChannelSupervisor(end), [control]
                transports: list[HeartbeatTransport] = []
                if self._listeners:
                    end, answering = _socket_pair(ours, theirs)
                    files += [answering, *self._listeners]
                    transports.append(HttpHeartbeat(end))
                process = self._start(channel, [each.fileno() for each in files])
            if process is None:
                return 0
            if self._grpc_heartbeat is not None:
                ours.callback(self._grpc_heartbeat.unlink, missing_ok=True)
                transports.append(GrpcHeartbeat(self._grpc_heartbeat))
            heartbeat = ours.enter_context(closing(Heartbeat(process.pid, transports)))
            try:
                startup = self._configuration, self._grpc_heartbeat, self.restarts > 0
                channel.send_first(pickle.dumps(startup))
                channel.receive_first()
            except OSError:
                code = process.wait()  # the exit code has the reason
            else:
                self._was_ready = True
                log.info("worker ready %s", fields(worker=self.number, pid=process.pid))
                self._set_ready(True)
                code = self.watch.wait(process, heartbeat, self._stopping)
            self._set_ready(False)
            self._keep_last_values()
            return code

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self._on_change()

    def _start(
        self, channel: ControlChannelSupervisor, files: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """Start the worker's process, which inherits ``files``; None while stopping."""
        with self._lock:
            if self._stopping.is_set():
                return None
            # In a new session: Ctrl-C reaches only the node's process, which stops its workers.
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "services.frontend.workers.process"]
                + [str(number) for number in (self.number, *files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._channel = channel
            return process


def _socket_pair(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, each closed with its stack."""
    end, other = socket.socketpair()
    return ours.enter_context(end), theirs.enter_context(other)
