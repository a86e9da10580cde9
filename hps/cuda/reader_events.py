"""CUDA events of running readers, for which a writer waits before its next step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hps.cuda.loader import cupy
from hps.native import COMPILED

if COMPILED:
    from hps.native import launching


class ReaderEvents:
    """Records, per CUDA stream, the end of the last reading kernel launched on it.

    `run` may be called from many threads; `hold_back` by the one writer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, Any] = {}
        self.others: list[Callable[[int], object]] = []
        """Functions that make later work on a stream, by its address, wait for further readers."""

    def run(self, stream: Any, launch: Callable[[], None]) -> None:
        """Call ``launch``, which starts reading kernels on ``stream``, and record their end."""
        with self._lock:
            launch()
            end = self._ends.get(stream.ptr)
            if end is None:
                end = self._ends[stream.ptr] = cupy().cuda.Event(disable_timing=True)
            end.record(stream)

    def end_of(self, stream: Any) -> Any:
        """Return the event that the compiled core records after reading kernels on ``stream``."""
        end = self._ends.get(stream.ptr)
        if end is None:
            with self._lock:
                end = self._ends.setdefault(stream.ptr, cupy().cuda.Event(disable_timing=True))
        return end

    def hold_back(self, stream: Any) -> None:
        """Make later work on the writer's ``stream`` wait for every reader that may have seen the tables as
        they were before the writer's last step.

        That step must be complete, and the host must know it: readers launched from then on see its
        result, so only those launched before must be waited for, and the device does that."""
        with self._lock:
            ends = list(self._ends.values())
            if COMPILED:
                launching.hold_back(stream.ptr, [end.ptr for end in ends])
            else:
                for end in ends:
                    stream.wait_event(end)
        for hold_back in self.others:
            hold_back(stream.ptr)
