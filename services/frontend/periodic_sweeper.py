"""What is to be looked at now and then, as long as there is any of it: by a thread that comes and goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from services.frontend.logs import log

# Looks that find nothing before the thread goes: another would be begun soon after.
_IDLE_LOOKS = 50


class PeriodicSweeper:
    """Calls ``look`` every ``every_s()`` seconds on a thread named ``name``, from `begin` on, until it has
    found nothing for a while. ``look`` says whether there is anything; it holds on to nothing in between.

    Any thread may call `begin`, each time it has added something: once the thread runs that costs nothing.
    """

    def __init__(self, look: Callable[[], bool], every_s: Callable[[], float], name: str) -> None:
        self._look, self._every_s, self._name = look, every_s, name
        self._runs = threading.Lock()
        self._failed = False  # the last time, which was logged

    def begin(self) -> None:
        if self._runs.acquire(blocking=False):
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            except RuntimeError as error:  # tried again when more is added, which goes on meanwhile
                self._runs.release()
                if not self._failed:
                    self._failed = True
                    log.error("failed to start thread %s: %s", self._name, error)

    def _run(self) -> None:
        self._failed = False
        idle = 0
        try:
            while idle < _IDLE_LOOKS:
                time.sleep(self._every_s())
                idle = 0 if self._look() else idle + 1
        finally:
            self._runs.release()
        if self._look():  # came in between
            self.begin()
