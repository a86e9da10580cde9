"""Counts of this process's downloads, which its metrics read."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

Labelled = list[tuple[tuple[str, ...], float]]


class DownloadMeter:
    """Bytes, seconds and failures by model. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._failures: defaultdict[str, int] = defaultdict(int)

    def count_bytes(self, model: str, size: int) -> None:
        with self._lock:
            self._bytes[model] += size

    @contextmanager
    def measure(self, model: str) -> Iterator[None]:
        """Measure a download; an exception is a failure."""
        started = time.monotonic()
        self.count_bytes(model, 0)
        with self._lock:
            self._failures[model] += 0
        try:
            yield
        except Exception:
            with self._lock:
                self._failures[model] += 1
            raise
        finally:
            with self._lock:
                self._seconds[model] += time.monotonic() - started

    def bytes(self) -> Labelled:
        return self._read(self._bytes)

    def seconds(self) -> Labelled:
        return self._read(self._seconds)

    def failures(self) -> Labelled:
        return self._read(self._failures)

    def _read(self, counts: Mapping[str, float]) -> Labelled:
        with self._lock:
            return [((model,), float(count)) for model, count in counts.items()]


DOWNLOADS = DownloadMeter()
"""The process's one meter: a repository is opened before the metrics exist."""
