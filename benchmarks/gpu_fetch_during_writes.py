"""Fetches from the GPU cache while a thread writes."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np

from benchmarks.common import Report
from benchmarks.gpu import CALL, ROUNDS, WARM_UP, FilledTable
from hps.cuda.loader import cupy


def measure_with_writer(report: Report, filled: FilledTable, quiet: float) -> float:
    """Fetch rate while a thread alternately updates and replaces 1 % of the rows, relative to ``quiet``.

    One write begins with each fetch and ends before the next; a figure reports a writer without pauses. The
    table stays three quarters full, since fetches from a full table take longer even without a writer. New
    rows have other positions than the rows they replace; a figure reports the cost of that alone."""
    changes = Changes(filled)
    busy = fetch_during_writes(changes, paced=True)
    before = changes.rounds
    report.figures["writer without a pause: of the quiet rate"] = quiet / fetch_during_writes(
        changes
    )
    writes = (changes.rounds - before) / (ROUNDS + WARM_UP)
    report.figures["writer without a pause: writes of 1 % a fetch"] = writes
    filled.settle()
    settled = filled.fetch_time(CALL)
    report.figures["after these writes, quiet: of the quiet rate before"] = quiet / settled
    return quiet / busy


class Changes:
    """Writes of 1 % of a table's rows."""

    def __init__(self, filled: FilledTable) -> None:
        self.filled = filled
        self.rounds = 0

    def write(self) -> None:
        filled, cp = self.filled, cupy()
        hundredth = filled.held // 100
        filled.version += 1
        if self.rounds % 2:
            filled.write(filled.keys(hundredth), "update")
        else:
            oldest = cp.arange(filled.first, filled.first + hundredth)
            filled.cache.evict(filled.table, oldest)
            filled.write(oldest + filled.held)
            filled.first += hundredth
        self.rounds += 1


def fetch_during_writes(changes: Changes, *, paced: bool = False) -> float:
    """Seconds of a fetch while a thread writes: once per fetch if ``paced``, else without a pause."""
    cp, filled = cupy(), changes.filled
    stop, begun = threading.Event(), cp.cuda.Event()
    go, written = threading.Semaphore(0), threading.Semaphore(1)

    def write() -> None:
        with cp.cuda.Stream(non_blocking=True):
            while not stop.is_set():
                if paced:
                    go.acquire()
                    begun.synchronize()
                changes.write()
                written.release()

    usual = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)  # the writer's Python must not delay the launch that is timed
    writer = threading.Thread(target=write)
    writer.start()
    with cp.cuda.Stream(non_blocking=True):
        held = filled.cache.held(filled.table)
        out = cp.empty((CALL, filled.table.dim), np.float32)
        misses = cp.zeros(4 + CALL, np.uint32)

        def prepare() -> Any:
            done = changes.rounds
            if paced:
                written.acquire()
            while not paced and changes.rounds == done:
                time.sleep(1e-4)
            misses[:4] = 0
            return filled.keys(CALL)

        def fetch(keys: Any) -> None:
            begun.record()
            go.release()
            filled.cache.direct.fetch(held, keys, out, misses)

        busy = filled.clock.median(prepare, fetch)
    stop.set()
    go.release()
    writer.join()
    sys.setswitchinterval(usual)
    return busy
