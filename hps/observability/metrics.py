"""The metrics of a node, and their exposition: the only import of prometheus_client.

Hot paths keep references to bound children and add to plain numbers under a lock (a few tenths of a
microsecond); the exposition is made on request. Each node has its ``Metrics``, so several can live in one
process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from hps.observability.counters import (
    Amounts,
    BatchedCounters,
    BatchRegistry,
    Counter,
    MetricHistogram,
    add_all,
)
from hps.observability.exposition import render_metric
from hps.observability.metric_spec import MetricSpec
from hps.observability.metric_table import METRICS

__all__ = ["BatchedCounters", "Counter", "MetricHistogram", "MetricValues", "Metrics", "add_all"]

_BY_NAME = {spec.name: spec for spec in METRICS}
# Positions of the model's and the version's label values in metrics per model.
_OF_MODELS = {
    spec.name: (
        spec.labels.index("model"),
        spec.labels.index("version") if "version" in spec.labels else None,
    )
    for spec in METRICS
    if "model" in spec.labels
}


class MetricValues(dict[str, dict[tuple[str, ...], Any]]):
    """Values of metrics, by name and label values; they can be added over several processes.

    A value is a number, or for a histogram the counts of its buckets and their sum."""

    def add(self, others: MetricValues) -> None:
        """Add ``others`` to these."""
        for name, values in others.items():
            own = self.setdefault(name, {})
            for labels, value in values.items():
                own[labels] = _sum(own[labels], value) if labels in own else value

    def grown(self) -> MetricValues:
        """Return only the monotonic values, which must remain after a process has ended."""
        return MetricValues(
            {n: values for n, values in self.items() if _BY_NAME[n].kind != "gauge"}
        )

    def as_json(self) -> dict[str, Any]:
        return {name: [*map(list, values.items())] for name, values in self.items() if values}

    def drop(self, model: str, version: int) -> None:
        """Remove the values of a version of a model."""
        for name, values in self.items():
            of_model, of_version = _OF_MODELS.get(name, (0, None))
            if of_version is not None:
                for labels in list(values):
                    if labels[of_model] in names_of(model) and labels[of_version] == str(version):
                        del values[labels]

    @staticmethod
    def from_json(encoded: dict[str, Any]) -> MetricValues:
        """Decode `as_json` of another process; unknown metrics are dropped."""
        return MetricValues(
            {
                name: {tuple(labels): value for labels, value in values}
                for name, values in encoded.items()
                if name in _BY_NAME
            }
        )


def names_of(model: str) -> tuple[str, str]:
    """Return the name of a model in requests, and the label ``model`` of their metrics."""
    return model, f"{model}.lookup"


def _sum(one: Any, other: Any) -> Any:
    if not isinstance(one, list | tuple):
        return one + other
    (counts, total), (more, more_total) = one, other
    return [a + b for a, b in zip(counts, more, strict=True)], total + more_total


Read = Callable[[], float]
# Values read for each exposition: label values (in the metric's order) and number.
ReadMany = Callable[[], Iterable[tuple[tuple[str, ...], float]]]
OnRelease = Callable[[str, int], None]


class Metrics:
    """The metrics of one node. Children are created once and kept by their users."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._children: dict[str, dict[tuple[str, ...], Counter | MetricHistogram]] = {
            spec.name: {} for spec in METRICS
        }
        self._gauges: dict[str, list[ReadMany]] = {spec.name: [] for spec in METRICS}
        self._included: list[Callable[[], MetricValues]] = []
        self._others: list[tuple[Sequence[MetricSpec], Callable[[MetricValues], MetricValues]]] = []
        self._batches = BatchRegistry()
        self._held: dict[tuple[str, str], int] = {}
        self._on_release: list[weakref.WeakMethod[OnRelease]] = []
        self._lock = threading.Lock()
        self._registry: Any = None

    def counter(self, name: str, *labels: str) -> Counter:
        """Return the counter ``name`` with these label values, in the order of its table entry."""
        child: Counter = self._child(name, labels, "counter", Counter)
        return child

    def histogram(self, name: str, *labels: str) -> MetricHistogram:
        make = partial(MetricHistogram, _BY_NAME[name].buckets)
        child: MetricHistogram = self._child(name, labels, "histogram", make)
        return child

    def batched_counters(self, amounts: Amounts) -> BatchedCounters:
        """Return an object that adds these amounts to these counters at each `add`."""
        return BatchedCounters(amounts, self._batches)

    def gauge(self, name: str, read: Read, *labels: str) -> None:
        """Call ``read`` at every exposition; also for counters that other objects keep."""
        self.gauges(name, lambda: [(labels, read())])

    def gauges(self, name: str, read: ReadMany) -> None:
        """Call ``read`` at every exposition for all current label values."""
        self._gauges[name].append(read)

    def retain(self, model: str, version: int) -> None:
        """Expose the metrics of a served version until `release` was called as often."""
        with self._lock:
            key = model, str(version)
            self._held[key] = self._held.get(key, 0) + 1

    def release(self, model: str, version: int) -> None:
        """Undo one `retain`; the last call removes the version's metrics.

        Releasing the last version of a model also removes metrics that have only the model's name."""
        with self._lock:
            key = model, str(version)
            self._held[key] = self._held.get(key, 1) - 1
            if self._held[key] > 0:
                return
            del self._held[key]
            others = any(name == model for name, _ in self._held)
            for name, (of_model, of_version) in _OF_MODELS.items():
                children = self._children[name]
                for labels in list(children):
                    if labels[of_model] not in names_of(model):
                        continue
                    if labels[of_version] == key[1] if of_version is not None else not others:
                        del children[labels]
        for reference in self._on_release:
            if (release := reference()) is not None:
                release(model, version)

    def on_release(self, release: OnRelease) -> None:
        """Call ``release``, a method, with each version that is released.

        The method's object is held weakly, since each model has its meters. It must not wait."""
        with self._lock:
            self._on_release = [each for each in self._on_release if each() is not None]
            self._on_release.append(weakref.WeakMethod(release))

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
        """Prometheus' text exposition of all metrics that have a value, and of this process."""
        import prometheus_client as prometheus

        if self._registry is None:
            registry = prometheus.CollectorRegistry()
            prometheus.ProcessCollector(registry=registry)
            prometheus.GCCollector(registry=registry)
            self._registry = registry
        process_metrics: bytes = prometheus.generate_latest(self._registry)
        return process_metrics + "".join(self._lines()).encode()

    def numbers(self) -> MetricValues:
        """Current values of all metrics."""
        self._batches.flush()
        all_values = MetricValues()
        for spec in METRICS:
            with self._lock:
                children = list(self._children[spec.name].items())
            values = all_values.setdefault(spec.name, {})
            for labels, child in children:
                values[labels] = child.value if isinstance(child, Counter) else child.read()
            for read in self._gauges[spec.name]:
                values.update(read())
        return all_values

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Current values of the counter ``name``, by label values."""
        self._batches.flush()
        with self._lock:
            children = list(self._children[name].items())
        return {labels: child.value for labels, child in children if isinstance(child, Counter)}

    def include(self, read: Callable[[], MetricValues]) -> None:
        """Add the values of other processes, which ``read`` returns, to the exposition."""
        self._included.append(read)

    def expose(
        self, specs: Sequence[MetricSpec], make: Callable[[MetricValues], MetricValues]
    ) -> None:
        """Expose further metrics, which ``make`` computes from all values."""
        self._others.append((specs, make))

    def _lines(self) -> Iterator[str]:
        values = self.numbers()
        for read in self._included:
            values.add(read())
        for spec in METRICS:
            yield from render_metric(spec, values)
        for specs, make in self._others:
            derived = make(values)
            for spec in specs:
                yield from render_metric(spec, derived)
