"""Who counts: the observers that lookups, tiers and the dense model are given, over ``Metrics``.

Called on every request, so they keep their counters at hand: two or three microseconds in all.
"""

from __future__ import annotations

from hps.metrics import (
    DENSE_SECONDS,
    LOOKUP_DEGRADED,
    LOOKUP_KEYS,
    LOOKUP_SECONDS,
    SCORES_NOT_FINITE,
    TIER_KEYS,
    TIER_SECONDS,
    Counter,
    Metrics,
)
from hps.types import EmbeddingTable, Source

# Every source once, the likeliest first.
_SOURCES = tuple(dict.fromkeys((Source.CPU, Source.GPU, Source.ROCKSDB, Source.DEFAULT, *Source)))


class LookupMeter:
    """Counts what the lookups of one model did (a ``LookupObserver``)."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._seconds = metrics.histogram(LOOKUP_SECONDS, model)
        self._keys: dict[tuple[EmbeddingTable, int], Counter] = {}

    def answered(self, table: EmbeddingTable, sources: bytes) -> None:
        left = len(sources)
        for source in _SOURCES:
            if not left:
                return
            if keys := sources.count(source):
                left -= keys
                counter = self._keys.get((table, source))
                if counter is None:
                    counter = self._metrics.counter(
                        LOOKUP_KEYS, self._model, table.name, Source(source).name.lower()
                    )
                    self._keys[table, source] = counter
                counter.add(keys)

    def finished(self, seconds: float, degraded: tuple[str, ...]) -> None:
        self._seconds.observe(seconds)
        for tier in degraded:
            self._metrics.counter(LOOKUP_DEGRADED, self._model, tier).add()


class DenseMeter:
    """Counts what the dense model of one model did (a ``PipelineObserver``)."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._seconds = metrics.histogram(DENSE_SECONDS, model)

    def ran(self, seconds: float) -> None:
        self._seconds.observe(seconds)

    def not_finite(self, output: str, values: int) -> None:
        self._metrics.counter(SCORES_NOT_FINITE, self._model, output).add(values)


class TierMeter:
    """Counts what one tier was asked and found (the ``observe`` of ``Metered``)."""

    def __init__(self, metrics: Metrics, tier: str) -> None:
        self._metrics = metrics
        self._tier = tier
        self._seconds = metrics.histogram(TIER_SECONDS, tier)
        self._keys: dict[EmbeddingTable, tuple[Counter, Counter]] = {}

    def __call__(
        self, table: EmbeddingTable, _info: object, asked: int, found: int, seconds: float
    ) -> None:
        counters = self._keys.get(table)
        if counters is None:
            labels = (self._tier, table.model, table.name)
            counters = (
                self._metrics.counter(TIER_KEYS, *labels, "found"),
                self._metrics.counter(TIER_KEYS, *labels, "missed"),
            )
            self._keys[table] = counters
        if found:
            counters[0].add(found)
        if asked > found:
            counters[1].add(asked - found)
        self._seconds.observe(seconds)
