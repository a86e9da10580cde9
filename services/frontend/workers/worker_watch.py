"""Watch over a running worker: not ready while it does not answer its heartbeat, killed in the end."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

from services.frontend.logs import fields, log
from services.frontend.workers.heartbeat import WAIT_S, Heartbeat

# The time between two checks.
BEAT_S = 1.0
# A worker that has not answered for so long counts as not ready.
UNREADY_S = 5.0
# For a worker that is to be killed to write where its threads are.
_TRACE_S = 0.5


class WorkerWatch:
    """Watch over worker ``number``, one process after another. ``timeout_s``: how long it may be without an
    answer, see `Heartbeat.stuck_s`. ``ready`` is called with whether it answers, when that changes."""

    def __init__(self, number: int, timeout_s: float, ready: Callable[[bool], None]) -> None:
        self.timeouts = 0
        """Number of processes killed because they did not answer."""
        self.unresponsive = False
        self._number, self._timeout_s, self._ready = number, timeout_s, ready

    def until_it_ends(
        self, process: subprocess.Popen[bytes], heartbeat: Heartbeat, stopping: threading.Event
    ) -> int:
        """Its exit code. A process that was asked to stop is only waited for."""
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(None if stopping.is_set() else BEAT_S)
                heartbeat.check(BEAT_S + WAIT_S)
                if not stopping.is_set() and process.poll() is None:
                    self._judge(process, heartbeat)
        finally:
            self.unresponsive = False

    def _judge(self, process: subprocess.Popen[bytes], heartbeat: Heartbeat) -> None:
        told = fields(
            worker=self._number,
            pid=process.pid,
            silent_s=round(heartbeat.silent_s, 1),
            on=",".join(heartbeat.silent),
        )
        if heartbeat.stuck_s > self._timeout_s:
            self.timeouts += 1
            log.error(
                "worker killed: it does not answer; the stacks of its threads follow %s", told
            )
            process.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TRACE_S)
            process.kill()
        unresponsive = heartbeat.silent_s > min(UNREADY_S, self._timeout_s)
        if unresponsive != self.unresponsive:
            self.unresponsive = unresponsive
            if unresponsive:
                log.warning("worker does not answer %s", told)
            else:
                log.info("worker answers again %s", told)
            self._ready(not unresponsive)
