"""Work that is repeated on a thread: sweeps, polls and retries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
SWEEP_IDLE_ROUNDS = 50
"""For sweepers: enough that a busy server does not start threads all the time."""


class PeriodicThread:
    """Calls ``work`` every ``interval_s`` seconds on a daemon thread called ``name``.

    ``interval_s`` may be a function, called before each wait (`Backoff.next_s`, the time to the next
    deadline). Errors of ``work`` are logged, each type once, and do not end the thread.

    With ``idle_rounds`` the thread exits after so many rounds in a row in which ``work`` returned False:
    there is nothing to sweep, or a retry succeeded. `start` starts it again.
    """

    def __init__(
        self,
        work: Callable[[], object],
        interval_s: float | Callable[[], float],
        name: str,
        *,
        idle_rounds: int | None = None,
    ) -> None:
        self._work = work
        self._interval_s = interval_s if callable(interval_s) else lambda: interval_s
        self._name = name
        self._idle_rounds = idle_rounds
        self._requested = False  # `start` was called since the last round began
        self._runs = threading.Lock()  # held while a thread exists
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._logged: set[type[Exception]] = set()
        self._thread: threading.Thread | None = None

    def start(self, after_s: float | None = None) -> None:
        """Run the first round after ``after_s`` (default: an interval), unless the thread runs already.

        Cheap enough to call, from any thread, each time something to sweep was added."""
        self._requested = True
        if not self._runs.acquire(blocking=False):
            return
        thread = threading.Thread(target=self._run, args=(after_s,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is available; the next `start` tries again
            self._runs.release()
            if self._idle_rounds is None:
                raise
            self._log_error(error, "could not start")
        else:
            self._thread = thread

    def wake(self) -> None:
        """End the current wait, so that the next round runs now. The next interval is computed again."""
        self._wake.set()

    def wait(self, seconds: float) -> bool:
        """Wait for ``seconds``, or until closed; return whether it is closed."""
        return self._closed.wait(seconds)

    def close(self, timeout_s: float | None = 1.0) -> None:
        """Stop, and wait up to ``timeout_s`` for a running round. Idempotent."""
        self._closed.set()
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self, after_s: float | None) -> None:
        idle = 0
        pause_s = self._interval_s() if after_s is None else after_s
        while not self._is_closed_after(pause_s):
            self._requested = False
            idle = 0 if self._round() else idle + 1
            if idle == self._idle_rounds:
                break
            pause_s = self._interval_s()
        self._runs.release()
        if self._requested and not self._closed.is_set():  # while this thread was exiting
            self.start()

    def _is_closed_after(self, pause_s: float) -> bool:
        self._wake.wait(pause_s)
        self._wake.clear()
        return self._closed.is_set()

    def _round(self) -> bool:
        """False if there was nothing to do."""
        try:
            return self._work() is not False
        except Exception as error:
            self._log_error(error, "failed; retrying")
            return True

    def _log_error(self, error: Exception, what: str) -> None:
        level = logging.DEBUG if type(error) in self._logged else logging.ERROR
        self._logged.add(type(error))
        log.log(level, "%s %s: %s", self._name, what, error, exc_info=error)
