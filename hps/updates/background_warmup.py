"""Fills caches on a thread while the node serves."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hps.errors import HpsError
from hps.updates.cache_warmup import CacheWarmup
from hps.updates.cache_writer import CacheWriter

log = logging.getLogger(__name__)

FillStep = Callable[[CacheWarmup], None]


class _Closed(Exception):
    """The warm-up was closed before it was done."""


class BackgroundWarmup:
    """Runs ``steps``, in order, on a thread. Close it before ``writer`` and the stores."""

    def __init__(self, writer: CacheWriter, steps: Sequence[FillStep]) -> None:
        self._writer, self._steps = writer, steps
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hps-warmup", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after at most some thousand more rows."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        warming = CacheWarmup(self._writer, self, limit_s=math.inf)
        for step in self._steps:
            try:
                self._check(0)
                step(warming)
            except _Closed:
                return
            except HpsError as error:
                log.warning("a step of the warm-up in the background failed: %s", error)
            except Exception:  # such as a table that was dropped meanwhile: the others are filled
                log.exception("a step of the warm-up in the background failed")

    @contextmanager
    def task(self, title: str, total: int, unit: str = "rows") -> Iterator[Callable[[int], None]]:
        """See `Progress`: after each step, the warm-up ends if it was closed."""
        yield self._check

    def _check(self, _rows: int) -> None:
        if self._closed.is_set():
            raise _Closed
