"""Thread of an ingestor: pause, resume, and calls between two batches."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from hps.errors import HpsError
from hps.threads import SWITCH_S, run_into
from hps.updates.ingestor import BACKOFF, POLL_S, Ingestor
from hps.updates.source import UpdateSource

log = logging.getLogger(__name__)


class IngestThread:
    """Runs an ingestor until it is closed; `call` runs a function between two steps."""

    def __init__(self, ingestor: Ingestor, source: UpdateSource, name: str) -> None:
        self._ingestor = ingestor
        self._source = source
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._closed = threading.Event()
        self._resumed = threading.Event()
        self._resumed.set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread.start()

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    def pause(self) -> Future[None]:
        """Stop after the current batch, which is finished when the future is done.

        The source stays connected."""
        self._resumed.clear()
        return self.call(lambda: None)

    def resume(self) -> None:
        self._resumed.set()

    def call(self, work: Callable[[], None]) -> Future[None]:
        """Queue ``work`` for the ingest thread, the only one that may use the source."""
        done: Future[None] = Future()
        self._calls.append((work, done))
        if self._closed.is_set():
            done.cancel()
        return done

    def close(self) -> None:
        """Finish or give up the current batch, record positions, close the source. Idempotent."""
        self._closed.set()
        self._ingestor.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        failures, broken = 0, False
        try:
            while not self._closed.is_set():
                self._do_calls()
                try:
                    if broken or self.paused:
                        self._source.keep_alive()
                    if self.paused:
                        self._resumed.wait(POLL_S)
                        continue
                    if broken:
                        self._source.rewind()
                        broken = False
                    self._ingestor.step()
                    if not self._ingestor.is_waiting:
                        self._ingestor.problem = None
                    failures = 0
                except HpsError as error:
                    # The start position is unknown yet, or a batch was given up: it is polled again.
                    broken = True
                    self._waits(str(error))
                    self._closed.wait(BACKOFF.first_s)
                except Exception as error:
                    # Not even a bug may end the stream: the current batch is polled again.
                    broken = True
                    self._ingestor.problem = f"{type(error).__name__}: {error}"
                    failures += 1
                    pause_s = BACKOFF.pause_s(failures)
                    log.exception("updates failed; retrying in %.1f s", pause_s)
                    self._closed.wait(pause_s)
        finally:
            with suppress(HpsError):
                self._ingestor.record_positions()
            for _work, done in self._calls:
                done.cancel()
            self._source.close()

    def _waits(self, why: str) -> None:
        if self._ingestor.problem != why and not self._closed.is_set():
            self._ingestor.problem = why
            log.warning("updates wait: %s", why)

    def _do_calls(self) -> None:
        while self._calls:
            work, done = self._calls.popleft()
            run_into(done, work)
