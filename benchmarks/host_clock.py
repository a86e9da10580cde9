"""Times of GPU calls by the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from hps.cuda.loader import cupy

_WARM_UPS, _RUNS, _PAUSE_S = 10, 10, 0.05


def median_us(call: Callable[[Any], Any], sets: list[Any], calls: int) -> float:
    """Median microseconds of ``call`` on the host's clock, the device idle before each call."""
    times, stream = [], cupy().cuda.get_current_stream()
    for i in range(calls + _WARM_UPS):
        stream.synchronize()
        start = time.perf_counter()
        call(sets[i % len(sets)])
        times.append(time.perf_counter() - start)
    return statistics.median(times[_WARM_UPS:]) * 1e6


def host_us(call: Callable[[Any], Any], sets: list[Any], calls: int) -> float:
    """Median microseconds of ``call``, which waits for its fetch, less that wait; calls follow one another.

    The lowest of several medians: other users of a shared machine make it half as fast for seconds."""
    from hps.native.launching import waited_ns  # of the compiled core

    medians = []
    for _ in range(_RUNS):
        times = []
        for i in range(calls + _WARM_UPS):
            waited, start = waited_ns(), time.perf_counter()
            call(sets[i % len(sets)])
            took = time.perf_counter() - start
            times.append(took - (waited_ns() - waited) / 1e9)
        medians.append(statistics.median(times[_WARM_UPS:]))
        time.sleep(_PAUSE_S)
    return min(medians) * 1e6
