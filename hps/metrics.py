"""The numbers of a node, and their exposition: the only import of prometheus_client.

Hot paths hold bound children and add to plain numbers under a lock (a few tenths of a microsecond);
the exposition is made when it is asked for. Each node has a ``Metrics`` of its own, so several can
live in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hps.metric_names import METRICS, SECONDS_BUCKETS

_BY_NAME = {spec.name: spec for spec in METRICS}
# Observations of a histogram that wait to be sorted.
_NOTES = 512


# One lock for all counters: it is held for a fraction of a microsecond, and never while waiting.
_counting = threading.Lock()


class Counter:
    """A number that grows. Thread-safe."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int = 1) -> None:
        with _counting:
            self.value += amount


def add_all(amounts: Iterable[tuple[Counter, int]]) -> None:
    """Add to many counters at half the price of one by one."""
    with _counting:
        for counter, amount in amounts:
            counter.value += amount


class Histogram:
    """Observations in buckets up to each of ``bounds``, and one beyond. Thread-safe.

    An observation is only noted; notes are sorted into their buckets some hundreds at a time, and when
    the numbers are asked for, so that no request pays for the sorting and its lock.
    """

    __slots__ = ("_counts", "_lock", "_notes", "_total", "bounds")

    def __init__(self, bounds: tuple[float, ...] = SECONDS_BUCKETS) -> None:
        self.bounds = bounds
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0
        self._notes: list[float] = []
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        self._notes.append(seconds)
        if len(self._notes) >= _NOTES:
            self.read()

    def observe_all(self, seconds: Iterable[float]) -> None:
        self._notes.extend(seconds)
        self.read()

    def read(self) -> tuple[list[int], float]:
        """Observations per bucket, the last one without an upper bound, and their sum."""
        with self._lock:
            notes = self._notes[:]
            del self._notes[: len(notes)]  # others may append meanwhile, never remove
            if notes:
                buckets = np.searchsorted(self.bounds, notes)
                self._counts += np.bincount(buckets, minlength=len(self._counts))
                self._total += sum(notes)
            return self._counts.tolist(), self._total


Read = Callable[[], float]
# Values made when the exposition is asked for: label values (in the metric's order) and number.
ReadMany = Callable[[], Iterable[tuple[tuple[str, ...], float]]]


class Metrics:
    """The numbers of one node. Children are made once and kept by their users."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._children: dict[str, dict[tuple[str, ...], Counter | Histogram]] = {
            spec.name: {} for spec in METRICS
        }
        self._gauges: dict[str, list[ReadMany]] = {spec.name: [] for spec in METRICS}
        self._lock = threading.Lock()
        self._registry: Any = None

    def counter(self, name: str, *labels: str) -> Counter:
        """The counter ``name`` with these label values, in the order of its table entry."""
        child: Counter = self._child(name, labels, "counter", Counter)
        return child

    def histogram(self, name: str, *labels: str) -> Histogram:
        make = partial(Histogram, _BY_NAME[name].buckets)
        child: Histogram = self._child(name, labels, "histogram", make)
        return child

    def gauge(self, name: str, read: Read, *labels: str) -> None:
        """Have ``read`` called at every exposition."""
        self.gauges(name, lambda: [(labels, read())])

    def gauges(self, name: str, read: ReadMany) -> None:
        """Have ``read`` called at every exposition for all label values it knows then."""
        self._gauges[name].append(read)

    def _child(self, name: str, labels: tuple[str, ...], kind: str, make: Callable[[], Any]) -> Any:
        children = self._children[name]
        child = children.get(labels)
        if child is None:
            spec = _BY_NAME[name]
            if spec.kind != kind or len(labels) != len(spec.labels):
                raise ValueError(f"{name} is a {spec.kind} with labels {spec.labels}, got {labels}")
            with self._lock:
                child = children.setdefault(labels, make())
        return child

    def render(self) -> bytes:
        """The Prometheus text exposition of every metric that has a value."""
        import prometheus_client as prometheus

        if self._registry is None:
            registry = prometheus.CollectorRegistry()
            prometheus.ProcessCollector(registry=registry)
            prometheus.GCCollector(registry=registry)
            registry.register(self)
            self._registry = registry
        text: bytes = prometheus.generate_latest(self._registry)
        return text

    def describe(self) -> list[Any]:
        return []  # prometheus_client would otherwise collect once at registration

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client."""
        from prometheus_client import core

        for spec in METRICS:
            with self._lock:
                children = list(self._children[spec.name].items())
            if spec.kind == "counter":
                counter = core.CounterMetricFamily(spec.name, spec.help, labels=spec.labels)
                for labels, child in children:
                    counter.add_metric(labels, child.value)  # type: ignore[union-attr] # by spec.kind
                yield counter
            elif spec.kind == "gauge":
                gauge = core.GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
                for read in self._gauges[spec.name]:
                    for labels, value in read():
                        gauge.add_metric(labels, value)
                yield gauge
            else:
                histogram = core.HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
                for labels, child in children:
                    histogram.add_metric(labels, *_cumulative(child))  # type: ignore[arg-type] # by spec.kind
                yield histogram


def _cumulative(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    bounds = [str(bound) for bound in histogram.bounds] + ["+Inf"]
    running, buckets = 0, []
    counts, total = histogram.read()
    for bound, count in zip(bounds, counts, strict=True):
        running += count
        buckets.append((bound, float(running)))
    return buckets, total
