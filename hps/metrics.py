"""Every metric of the product, in one table; the only import of prometheus_client.

Hot paths hold bound children and add to plain numbers under a lock (a few tenths of a microsecond);
the exposition is made when it is asked for. Each node has a ``Metrics`` of its own, so several can
live in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

# Sub-millisecond first: a lookup from memory takes tens of microseconds.
SECONDS_BUCKETS = (
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25,
    0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its name, what its labels are, and one sentence on what it counts."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


BUILD_INFO = "hps_build_info"
UPTIME = "hps_uptime_seconds"
REQUEST_SECONDS = "hps_request_duration_seconds"
REQUESTS_REFUSED = "hps_requests_refused_total"
LOOKUP_KEYS = "hps_lookup_keys_total"
LOOKUP_SECONDS = "hps_lookup_duration_seconds"
LOOKUP_DEGRADED = "hps_lookup_degraded_total"
LOOKUP_WAITING = "hps_lookup_waiting"
LOOKUP_SHARED = "hps_lookup_shared_keys_total"
TIER_KEYS = "hps_tier_keys_total"
TIER_SECONDS = "hps_tier_fetch_seconds"
TIER_SKIPPED = "hps_tier_skipped_total"
TABLE_ROWS = "hps_table_rows"
TIER_FACT = "hps_tier_fact"
PROMOTIONS = "hps_promotions_total"
PROMOTE_QUEUE = "hps_promote_queue_keys"
DENSE_SECONDS = "hps_dense_duration_seconds"
DENSE_WAITING = "hps_dense_waiting"
SCORES_NOT_FINITE = "hps_scores_not_finite_total"
MODEL_VERSION = "hps_model_version"

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(BUILD_INFO, "gauge", ("version", "native"), "Always 1; what is running."),
    MetricSpec(UPTIME, "gauge", (), "Seconds since the node was opened."),
    MetricSpec(MODEL_VERSION, "gauge", ("model",), "Version of the model that is being served."),
    MetricSpec(
        REQUEST_SECONDS,
        "histogram",
        ("protocol", "method", "model", "code"),
        "Time from a request's last byte to its answer's first, by protocol status.",
    ),
    MetricSpec(
        REQUESTS_REFUSED, "counter", ("reason",), "Requests refused before they were looked at."
    ),
    MetricSpec(
        LOOKUP_KEYS,
        "counter",
        ("model", "table", "tier"),
        "Keys answered, by the tier that had the row; tier=default: no tier had it.",
    ),
    MetricSpec(LOOKUP_SECONDS, "histogram", ("model",), "Time of one lookup of all its tables."),
    MetricSpec(
        LOOKUP_DEGRADED,
        "counter",
        ("model", "tier"),
        "Lookups that were answered without this tier because it was broken, late or full.",
    ),
    MetricSpec(
        LOOKUP_SHARED,
        "counter",
        (),
        "Keys that a lookup did not ask the stores for because another one was doing so.",
    ),
    MetricSpec(LOOKUP_WAITING, "gauge", (), "Lookups waiting for a thread to ask a store."),
    MetricSpec(
        TIER_KEYS,
        "counter",
        ("tier", "model", "table", "result"),
        "Keys a tier was asked for; result=found or missed, their ratio is the hit rate, or skipped: the "
        "tier was passed over. Repeated keys of a request count once, but where memory answered all of "
        "it they all count.",
    ),
    MetricSpec(
        TIER_SKIPPED,
        "counter",
        ("tier", "reason"),
        "Fetches that passed over a tier; reason=open (its circuit), failed, late, full (all of its "
        "threads were busy), no_time (the request's deadline had passed), refused (tables that do not fit).",
    ),
    MetricSpec(
        TIER_SECONDS,
        "histogram",
        ("tier",),
        "Time of one fetch from one tier, for all tables of a batch.",
    ),
    MetricSpec(TABLE_ROWS, "gauge", ("tier", "model", "table"), "Rows a tier holds of a table."),
    MetricSpec(
        TIER_FACT,
        "gauge",
        ("tier", "fact"),
        "What a tier states of itself. Of rocksdb: table_bytes, free_bytes (of its disk), "
        "pending_compaction_bytes, running_compactions, writes_stopped (1: writes wait for compactions), "
        "delayed_write_rate (bytes/s they are slowed down to; 0: they are not), background_errors, "
        "stalled_seconds (that writes have waited since the start).",
    ),
    MetricSpec(
        PROMOTIONS,
        "counter",
        ("tier", "result"),
        "Keys to be copied into a tier: inserted, gone (no store has them any more), degraded (a "
        "store could not be asked), dropped (the queue was full), failed.",
    ),
    MetricSpec(PROMOTE_QUEUE, "gauge", ("tier",), "Keys waiting to be copied into a tier."),
    MetricSpec(DENSE_SECONDS, "histogram", ("model",), "Time of one run of the dense model."),
    MetricSpec(DENSE_WAITING, "gauge", (), "Runs of dense models waiting for a thread."),
    MetricSpec(
        SCORES_NOT_FINITE,
        "counter",
        ("model", "output"),
        "Output values of the dense model that were NaN or infinite; they are served as they are.",
    ),
)
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
    """Observations in ``SECONDS_BUCKETS``. Thread-safe.

    An observation is only noted; notes are sorted into their buckets some hundreds at a time, and when
    the numbers are asked for, so that no request pays for the sorting and its lock.
    """

    __slots__ = ("_counts", "_lock", "_notes", "_total")

    def __init__(self) -> None:
        self._counts = np.zeros(len(SECONDS_BUCKETS) + 1, np.int64)
        self._total = 0.0
        self._notes: list[float] = []
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        self._notes.append(seconds)
        if len(self._notes) >= _NOTES:
            self.read()

    def read(self) -> tuple[list[int], float]:
        """Observations per bucket, the last one without an upper bound, and their sum."""
        with self._lock:
            notes = self._notes[:]
            del self._notes[: len(notes)]  # others may append meanwhile, never remove
            if notes:
                buckets = np.searchsorted(SECONDS_BUCKETS, notes)
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
        child: Histogram = self._child(name, labels, "histogram", Histogram)
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
    bounds = [str(bound) for bound in SECONDS_BUCKETS] + ["+Inf"]
    running, buckets = 0, []
    counts, total = histogram.read()
    for bound, count in zip(bounds, counts, strict=True):
        running += count
        buckets.append((bound, float(running)))
    return buckets, total
