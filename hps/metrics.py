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
        if len(self._notes) >= _NOTES:
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


class Numbers(dict[str, dict[tuple[str, ...], Any]]):
    """What metrics stand at, by name and label values: a number, or of a histogram the counts of its buckets
    and their sum. Numbers of several processes can be added up."""

    def add(self, others: Numbers) -> None:
        """Add ``others`` to these."""
        for name, values in others.items():
            mine = self.setdefault(name, {})
            for labels, value in values.items():
                mine[labels] = _sum(mine[labels], value) if labels in mine else value

    def grown(self) -> Numbers:
        """Those that only grow: what remains of a process that has ended."""
        return Numbers({n: values for n, values in self.items() if _BY_NAME[n].kind != "gauge"})

    def as_json(self) -> dict[str, Any]:
        return {name: [*map(list, values.items())] for name, values in self.items() if values}

    @staticmethod
    def from_json(told: dict[str, Any]) -> Numbers:
        """What `as_json` gave, on another process; of metrics that are known here."""
        return Numbers(
            {
                name: {tuple(labels): value for labels, value in values}
                for name, values in told.items()
                if name in _BY_NAME
            }
        )


def _sum(one: Any, other: Any) -> Any:
    if not isinstance(one, list | tuple):
        return one + other
    (counts, total), (more, more_total) = one, other
    return [a + b for a, b in zip(counts, more, strict=True)], total + more_total


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
        self._included: list[Callable[[], Numbers]] = []
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

    def numbers(self) -> Numbers:
        """All of them as they are now."""
        found = Numbers()
        for spec in METRICS:
            with self._lock:
                children = list(self._children[spec.name].items())
            values = found.setdefault(spec.name, {})
            for labels, child in children:
                values[labels] = child.value if isinstance(child, Counter) else child.read()
            for read in self._gauges[spec.name]:
                values.update(read())
        return found

    def include(self, read: Callable[[], Numbers]) -> None:
        """Have the numbers of other processes, which ``read`` brings, added to those that are exposed."""
        self._included.append(read)

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client."""
        from prometheus_client import core

        families = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        found = self.numbers()
        for read in self._included:
            found.add(read())
        for spec in METRICS:
            family = families[spec.kind](spec.name, spec.help, labels=spec.labels)
            for labels, value in found[spec.name].items():
                shown = _cumulative(spec.buckets, *value) if spec.kind == "histogram" else (value,)
                family.add_metric(labels, *shown)
            yield family


def _cumulative(
    buckets: tuple[float, ...], counts: list[int], total: float
) -> tuple[list[tuple[str, float]], float]:
    bounds = [str(bound) for bound in buckets] + ["+Inf"]
    running, shown = 0, []
    for bound, count in zip(bounds, counts, strict=True):
        running += count
        shown.append((bound, float(running)))
    return shown, total
