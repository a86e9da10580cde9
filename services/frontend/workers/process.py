"""A worker: a process that answers requests from the node's shared cache, started by `Supervisor`.

``python -m services.frontend.workers.process NUMBER CONTROL [HEARTBEAT HTTP…]``: the worker's number,
counted from 1, and the file descriptors that it inherits: its end of the control channel and, if
workers answer HTTP, a connection for the heartbeat and the listening sockets of all workers."""

from __future__ import annotations

import asyncio
import faulthandler
import pickle
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hps.config import Configuration
from hps.config.server_settings import HttpListener
from hps.errors import ConfigError, HpsError, ModelError, TierError, Unavailable
from hps.node.attached import Attached, attach
from hps.node.key_traces import end_recording, record_keys, recorded_keys
from hps.node.served_models import OpenModels
from hps.observability.otel import Tracer
from hps.types import Progress
from services.frontend import logs
from services.frontend.certificates import server_context
from services.frontend.grpc.server import GrpcServer
from services.frontend.http.app import data_app
from services.frontend.http.application import PortApplication
from services.frontend.http.server import HttpPortOptions
from services.frontend.logs import log
from services.frontend.request_observer import RequestObserver
from services.frontend.state import FrontendState
from services.frontend.workers.channel import ControlChannelWorker
from services.frontend.workers.scheduler_slice import request_short_slices
from services.frontend.workers.server import WorkerServer
from services.process import PortServer, ServerProcess

BROKEN = 2
"""Exit code: the configuration or a model is wrong, so that a restart would fail, too."""
# No timeout: the node may load for any time, and when it ends, its workers notice.
_NO_TIMEOUT_S = 1e9


class WorkerProcess(ServerProcess[OpenModels]):
    """The data port, and gRPC's, of worker ``number``.

    ``listeners``: sockets of all workers, if they answer HTTP. ``replaces``: it succeeds another worker, so
    clients that connect wait for the answer instead of getting an error that models are being loaded."""

    def __init__(
        self,
        configuration: Configuration,
        number: int,
        heartbeat: socket.socket | None,
        listeners: Sequence[socket.socket],
        grpc_heartbeat: Path | None = None,
        *,
        replaces: bool = False,
    ) -> None:
        """``heartbeat``: its connection; ``grpc_heartbeat``: the path of its socket."""
        self.state = FrontendState("worker", configuration.settings)
        super().__init__(configuration, self.state, None)
        self.state.propagate_log_level = None  # the node's process sets it in all workers
        self._number, self._listeners = number, listeners
        self._heartbeat, self._grpc_heartbeat = heartbeat, grpc_heartbeat
        self._http: WorkerServer | None = None
        self._replaces = replaces
        self._attached: Attached | None = None

    def run(self, control: ControlChannelWorker) -> None:
        """Answer requests until it is stopped, or the node's process has ended."""
        control.start(
            {
                "numbers": self._numbers,
                "log": logs.set_level,
                "accept_for": self._accept_for,
                "set_not_ready": self._set_not_ready,
                "record_keys": self._record_keys,
                "recorded_keys": self._recorded_keys,
                "watched": self.state.take_watched,
                "end_recording": self._end_recording,
            }
        )
        if self._replaces:
            # Unavailable if it is stopped meanwhile: then the servers below end immediately.
            with suppress(Unavailable):
                self._attached = self._attach(self._progress)
                self.state.serve(self._attached)
        self._run(lambda _: control.send_first("ready"), None)

    def on_channel_closed(self) -> None:
        """Drain and end: the control channel has closed, usually because the node's process has ended."""
        log.info("the control channel to the node's process has closed")
        if self._grpc_heartbeat is not None:
            with suppress(OSError):  # the sockets of other workers still exist
                self._grpc_heartbeat.unlink(missing_ok=True)
                self._grpc_heartbeat.parent.rmdir()
        self.stop()

    def _ports(self) -> Mapping[str, HttpListener]:
        return {}

    def _other_servers(self) -> Mapping[str, PortServer]:
        settings = self._settings
        servers: dict[str, PortServer] = {}
        if self._listeners:
            tls = server_context(settings.http, "server.http")
            options = HttpPortOptions(settings.drain_s, tls, settings.http.protocol)
            self._http = servers["http"] = WorkerServer(
                self._app("http"), self._listeners, self._number, options, self._heartbeat
            )
        if settings.grpc is not None:
            servers["grpc"] = GrpcServer(
                settings.grpc,
                self.state,
                settings,
                self._guard,
                one_of_many=True,
                also_at=self._grpc_heartbeat,
            )
        return servers

    def _app(self, port: str) -> PortApplication:
        return data_app(self.state, self._settings, self._guard)

    def _open(self, progress: Progress) -> OpenModels:
        return self._attached or self._attach(progress)

    def _opened(self, node: OpenModels) -> None:
        assert self._attached is not None
        self.state.loop = asyncio.get_running_loop()
        self._attached.complete_on(self.state.loop)
        self._attached.watch(self.state.refresh_models)
        super()._opened(node)

    def _attach(self, progress: Progress) -> Attached:
        attached = attach(self._configuration, wait_s=_NO_TIMEOUT_S, progress=progress)
        self.state.set_statistics_source(partial(_node_statistics, attached))
        self._attached = attached
        return attached

    def _accept_for(self, numbers: Collection[int]) -> None:
        """Also accept connections for exactly these other workers. Thread-safe."""
        if self._http is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._http.accept_for, numbers)

    def _set_not_ready(self, reason: str) -> None:
        """Set the reason for not being ready; empty: ready."""
        if self.state.not_ready_reason() != reason:
            self.state.not_ready_reason = lambda: reason
            self.state.notify_phase_watchers()

    def _record_keys(self, model: str, seconds: float, keys: int) -> None:
        """Record the keys of lookups; without effect for a model that is not served here (yet)."""
        with suppress(HpsError):
            record_keys(self.state.require_node().model(model), seconds, keys)

    def _recorded_keys(self, model: str, folder: str) -> str | None:
        """Write what is recorded into ``folder``; returns the file, or None."""
        path = Path(folder) / str(self._number)
        try:
            path.write_bytes(recorded_keys(self.state.require_node().model(model)))
        except (HpsError, OSError):
            return None
        return str(path)

    def _end_recording(self, model: str) -> None:
        with suppress(HpsError):
            end_recording(self.state.require_node().model(model))

    def _trace(self, tracer: Tracer) -> None:
        self.state.observer = RequestObserver(self._settings.access_log, tracer)

    def _numbers(self) -> dict[str, Any]:
        """Metrics and statistics of this process."""
        return {
            "metrics": self.state.metrics.numbers().as_json(),
            "statistics": self.state.own_statistics(),
        }


def _node_statistics(attached: Attached) -> Mapping[str, Any] | None:
    """The statistics of all processes; None if they are not available."""
    try:
        found: Mapping[str, Any] = attached.ask_node("statistics")
        return found
    except (TierError, Unavailable):
        return None


def main() -> None:
    request_short_slices()
    # The node's process requests the stacks of all threads, on standard error.
    faulthandler.register(signal.SIGUSR1)
    number, control, *http = map(int, sys.argv[1:])
    channel = ControlChannelWorker(
        socket.socket(fileno=control), lambda: worker.on_channel_closed()
    )
    configuration, grpc_heartbeat, replaces = pickle.loads(channel.receive())
    logs.setup_logging(configuration.settings.server, worker=number)
    try:
        listeners = [socket.socket(fileno=each) for each in http]
        heartbeat = listeners.pop(0) if listeners else None
        worker = WorkerProcess(
            configuration, number, heartbeat, listeners, grpc_heartbeat, replaces=replaces
        )
        worker.run(channel)
    except HpsError as error:
        log.error("%s", error)
        sys.exit(BROKEN if isinstance(error, ConfigError | ModelError) else 1)


if __name__ == "__main__":
    main()
