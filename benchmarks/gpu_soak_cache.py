"""The cache's part of `benchmarks.gpu_soak`: keys read and checked in this process, beside a writer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.common import Report
from benchmarks.gpu_soak_scene import DIM
from hps.tiers.base import FetchContext, Part
from hps.types import EmbeddingTable, make_version


@dataclass
class CacheSoak:
    """Readers and a writer of one table of ``cache``; ``xp`` is the module of its arrays, NumPy or CuPy."""

    cache: Any
    table: EmbeddingTable
    xp: Any
    key_count: int
    call: int
    target: int
    readers: int = 3
    written: int = 0
    checked: int = 0
    wrong: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    base: int = make_version(time.time_ns() // 1_000_000)
    spoil: bool = False  # write wrong rows, to see that they are noticed

    def __post_init__(self) -> None:
        self.positions = np.arange(self.call)

    def run(self, limit_s: float) -> None:
        """Until ``target`` keys are checked. Raises what a thread raised."""
        for start in range(0, self.key_count, self.call):
            self.write(self.xp.arange(start, min(start + self.call, self.key_count)))
        failures: list[BaseException] = []

        def guard(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)
                self.stop.set()

        works = [self.write_on, *(lambda seed=i: self.read_on(seed) for i in range(self.readers))]
        threads = [threading.Thread(target=guard, args=(each,)) for each in works]
        for thread in threads:
            thread.start()
        end = time.monotonic() + limit_s
        while self.checked < self.target and not self.stop.wait(0.05) and time.monotonic() < end:
            pass
        self.stop.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def rows(self, keys: Any, versions: Any) -> Any:
        """(n, dim) float32 whose bits are a checksum of key and version, different at each position."""
        xp = self.xp
        mark = keys.astype(xp.uint32) * np.uint32(2654435761)
        mark ^= (versions - np.uint64(self.base)).astype(xp.uint32) * np.uint32(40503)
        return (mark[:, None] + xp.arange(self.table.dim, dtype=xp.uint32)).view(xp.float32)

    def write(self, keys: Any) -> None:
        self.written += 1
        versions = self.xp.full(len(keys), self.base + self.written, np.uint64)
        rows = self.rows(keys, versions)
        if self.spoil:
            rows[:, -1] = 0
        self.cache.insert(self.table, keys, rows, versions)

    def write_on(self) -> None:
        rng = np.random.default_rng(0)
        with _stream(self.xp):
            while not self.stop.wait(0.002):
                first = int(rng.integers(self.key_count))
                self.write((first + self.xp.arange(self.call // 64) * 7919) % self.key_count)

    def read_on(self, seed: int) -> None:
        xp, rng = self.xp, np.random.default_rng(seed + 1)
        with _stream(xp):
            newest = xp.zeros(self.key_count, xp.uint64)
            while not self.stop.is_set():
                first = int(rng.integers(self.key_count))
                keys = (first + xp.arange(self.call) * 7919) % self.key_count
                found, wrong = self.check(self.fetch(keys), newest)
                with self.lock:
                    self.checked += found
                    self.wrong += wrong

    def fetch(self, keys: Any) -> Part:
        n, xp = len(keys), self.xp
        out = xp.empty((n, self.table.dim), self.table.dtype)
        versions, source = xp.zeros(n, xp.uint64), xp.zeros(n, xp.uint8)
        part = Part(self.table, keys, out, versions, source, self.positions)
        self.cache.fetch([part], FetchContext())
        return part

    def check(self, part: Part, newest: Any) -> tuple[int, int]:
        """Rows found, and wrong ones of them; ``newest`` are the versions seen until now, by key."""
        xp = self.xp
        found = part.source > 0
        held = part.out.view(xp.uint32)
        right = (held == self.rows(part.keys, part.versions).view(xp.uint32)).all(axis=1)
        right &= part.versions >= newest[part.keys]
        newest[part.keys] = xp.maximum(
            newest[part.keys], xp.where(found, part.versions, np.uint64(0))
        )
        count = int(found.sum())
        return count, int((found & ~right).sum()) + abs(len(part.keys) - count - len(part.missing))


@contextmanager
def _stream(xp: Any) -> Iterator[None]:
    """A stream of the present thread, if arrays are on a device."""
    if xp is np:
        yield
    else:
        with xp.cuda.Stream(non_blocking=True):
            yield


def soak_cache(report: Report, target: int, limit_s: float, *, gpu: bool) -> None:
    """Four fifths of the keys fit, so rows are evicted and keys are missing all the time."""
    count, call = (1 << 22, 1 << 20) if gpu else (1 << 14, 1 << 12)
    table = EmbeddingTable.make("soak", DIM)
    if gpu:
        from hps.cuda.loader import cupy
        from hps.tiers.gpu.cache import GpuCache

        cache, xp = GpuCache({table: count * 4 // 5}), cupy()
    else:
        from hps.tiers.cpu.cache import CpuCache

        cache, xp = CpuCache({table: count * 4 // 5}), np
    soak = CacheSoak(cache, table, xp, count, call, target)
    start = time.monotonic()
    try:
        soak.run(limit_s)
    finally:
        cache.close()
    seconds = time.monotonic() - start
    report.figures["cache"] = {"keys": soak.checked, "seconds": seconds, "writes": soak.written}
    report.figures["cache"]["wrong"] = soak.wrong
    report.values["cache_keys"] = soak.checked / 1e10
