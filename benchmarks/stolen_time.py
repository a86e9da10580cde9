"""The times in which other machines of a shared host took the processors, and the times after these."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

WINDOW_S, DRAIN_S = 0.25, 2.0
STOLEN = 0.04
"""Share of the processors' time that others take in a disturbed window."""


class StolenTime:
    """Samples the stolen time in a thread, until it is closed. ``windows``: begin and end (ns), share."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, int, float]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> StolenTime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        begin, before = time.monotonic_ns(), psutil.cpu_times()
        while not self._closed.wait(WINDOW_S):
            end, now = time.monotonic_ns(), psutil.cpu_times()
            self.windows.append((begin, end, stolen(before, now)))
            begin, before = end, now


def disturbed(windows: list[tuple[int, int, float]]) -> list[tuple[int, int]]:
    """Return the disturbed times, begin and end (ns), with the time in which a queue drains."""
    found: list[tuple[int, int]] = []
    for begin, end, share in windows:
        if share <= STOLEN:
            continue
        end += int(DRAIN_S * 1e9)
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def inside(times: list[tuple[int, int]], at: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the instants ``at (n,)`` in ns that are in one of ``times``."""
    mask = np.zeros(len(at), bool)
    for begin, end in times:
        mask |= (at >= begin) & (at < end)
    return mask


def share_of(times: list[tuple[int, int]], begin: int, end: int) -> float:
    """Return the share of the time from ``begin`` to ``end`` that is in one of ``times``."""
    taken = sum(max(0, min(end, until) - max(begin, since)) for since, until in times)
    return taken / max(1, end - begin)


def stolen(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the stolen share between two `psutil.cpu_times` (times of guests are in others)."""
    spent = [late - early for early, late in zip(before[:8], after[:8], strict=True)]
    return spent[7] / (sum(spent) or 1)
