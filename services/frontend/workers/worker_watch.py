"""Watchdog of a running worker: not ready while it does not answer heartbeats, finally killed."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from services.frontend.logs import fields, log
from services.frontend.workers.heartbeat import WAIT_S, Heartbeat

# Seconds between checks.
BEAT_S = 1.0
# A worker without an answer for this long counts as not ready.
UNREADY_S = 5.0
# Time for a worker to write the stacks of its threads before it is killed.
_TRACE_S = 0.5


class WorkerWatch:
    """Watchdog of worker ``number`` and its successors.

    ``timeout_s``: the longest time without an answer, see `Heartbeat.stuck_s`. ``ready`` is called when it
    starts or stops answering."""

    def __init__(self, number: int, timeout_s: float, ready: Callable[[bool], None]) -> None:
        self.timeouts = 0
        """Number of processes killed because they did not answer."""
        self.unresponsive = False
        self._number, self._timeout_s, self._ready = number, timeout_s, ready

    def wait(
        self, process: subprocess.Popen[bytes], heartbeat: Heartbeat, stopping: threading.Event
    ) -> int:
        """Watch until the process ends; return its exit code. A stopping process is only awaited."""
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(None if stopping.is_set() else BEAT_S)
                heartbeat.check(BEAT_S + WAIT_S)
                if not stopping.is_set() and process.poll() is None:
                    self._check(process, heartbeat)
        finally:
            self.unresponsive = False

    def _check(self, process: subprocess.Popen[bytes], heartbeat: Heartbeat) -> None:
        event = fields(
            worker=self._number,
            pid=process.pid,
            silent_s=round(heartbeat.unanswered_s, 1),
            on=",".join(heartbeat.unanswered),
        )
        if heartbeat.stuck_s > self._timeout_s:
            self.timeouts += 1
            log.error(
                "worker killed: it does not answer; the stacks of its threads follow %s", event
            )
            process.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TRACE_S)
            process.kill()
        unresponsive = heartbeat.unanswered_s > min(UNREADY_S, self._timeout_s)
        if unresponsive != self.unresponsive:
            self.unresponsive = unresponsive
            if unresponsive:
                log.warning("worker does not answer %s", event)
            else:
                log.info("worker answers again %s", event)
            self._ready(not unresponsive)
