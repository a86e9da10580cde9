"""Meters of lookups, tiers and networks, over ``Metrics``.

They run on every request, so they keep references to their counters, and count all tables of a request
in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.observability.metric_names import (
    DENSE_FALLBACKS,
    DENSE_SECONDS,
    EXPIRED_ROWS,
    FEATURE_KEYS,
    LOOKUP_DEGRADED,
    LOOKUP_KEYS,
    LOOKUP_SECONDS,
    PROMOTIONS,
    SCORES,
    SCORES_ABSOLUTE,
    SCORES_NOT_FINITE,
    TIER_KEYS,
    TIER_SECONDS,
    TIER_SKIPPED,
    UPDATE_BATCH,
    UPDATE_DEAD,
    UPDATE_HOLD_EXPIRED,
    UPDATE_LOST,
    UPDATE_RESTARTED,
    UPDATE_ROWS,
    UPDATE_VISIBLE,
)
from hps.observability.metrics import BatchedCounters, Counter, MetricHistogram, Metrics, add_all
from hps.types import EmbeddingTable, Source

Answers = Sequence[tuple[EmbeddingTable, bytes, Sequence[tuple[str, int]]]]
"""A lookup's answered keys: for each table one ``Source`` code per key (not per unique key), and the features
in the order of the keys, each with its number of keys."""

_DEFAULT = int(Source.DEFAULT)


class LookupMeter:
    """Counts the lookups of one version of a model. Thread-safe."""

    def __init__(self, metrics: Metrics, model: str, version: int) -> None:
        self._metrics = metrics
        self._model = model
        self._version = str(version)
        self._seconds = metrics.histogram(LOOKUP_SECONDS, model, self._version)
        self._keys: dict[tuple[EmbeddingTable, int], Counter] = {}
        self._features: dict[str, tuple[Counter, Counter]] = {}

    def finished(self, answers: Answers, seconds: float, degraded: tuple[str, ...]) -> None:
        """Count a lookup that took ``seconds`` and skipped the tiers ``degraded``."""
        add_all(self._amounts(answers))
        self._seconds.observe(seconds)
        for tier in degraded:
            self._metrics.counter(LOOKUP_DEGRADED, self._model, tier).add()

    def finished_alike(self, answers: Answers) -> Callable[[float], None]:
        """Return a function that counts a lookup with these answers, given its seconds.

        The lookup skipped no tier."""
        return _counting_function(
            self._metrics.batched_counters(self._amounts(answers)), self._seconds
        )

    def counted(
        self,
        answers: Sequence[tuple[EmbeddingTable, int, int]],
        seconds: float,
        features: Sequence[str] = (),
    ) -> None:
        """Count a lookup that skipped no tier, from ``(table, source, keys)`` instead of answers.

        ``features``: the feature of each entry's keys, if known."""
        self.counted_all(answers, [seconds], features)

    def counted_all(
        self,
        answers: Sequence[tuple[EmbeddingTable, int, int]],
        seconds: Sequence[float],
        features: Sequence[str] = (),
    ) -> None:
        """Count several lookups like `counted`; ``seconds`` of each."""
        amounts = [(self._counter(table, source), n) for table, source, n in answers]
        for name, (_, source, n) in zip(features, answers, strict=False):
            amounts.append((self._of_feature(name)[source == _DEFAULT], n))
        add_all(amounts)
        self._seconds.observe_all(seconds)

    def _amounts(self, answers: Answers) -> list[tuple[Counter, int]]:
        amounts = []
        for table, codes, features in answers:
            sources = codes
            while sources:
                source = sources[0]
                rest = sources.translate(None, sources[:1])
                amounts.append((self._counter(table, source), len(sources) - len(rest)))
                sources = rest
            some_defaulted, start = _DEFAULT in codes, 0
            for name, n in features:
                found, defaulted = self._features.get(name) or self._of_feature(name)
                unknown = codes.count(_DEFAULT, start, start + n) if some_defaulted else 0
                amounts.append((found, n - unknown))
                if unknown:
                    amounts.append((defaulted, unknown))
                start += n
        return amounts

    def _of_feature(self, name: str) -> tuple[Counter, Counter]:
        counters = self._features.get(name)
        if counters is None:
            labels = FEATURE_KEYS, self._model, self._version, name
            counters = self._features[name] = (
                self._metrics.counter(*labels, "found"),
                self._metrics.counter(*labels, "defaulted"),
            )
        return counters

    def _counter(self, table: EmbeddingTable, source: int) -> Counter:
        counter = self._keys.get((table, source))
        if counter is None:
            tier = Source(source).name.lower()
            counter = self._metrics.counter(
                LOOKUP_KEYS, self._model, self._version, table.name, tier
            )
            self._keys[table, source] = counter
        return counter


class DenseMeter:
    """Counts the network's runs of one version of a model. Thread-safe."""

    def __init__(self, metrics: Metrics, model: str, version: int) -> None:
        self._metrics = metrics
        self._model = model
        self._labels = model, str(version)
        self._seconds = metrics.histogram(DENSE_SECONDS, *self._labels)
        self._scores: dict[str, MetricHistogram] = {}

    def ran(self, seconds: float) -> None:
        self._seconds.observe(seconds)

    def fell_back(self, runs: int) -> None:
        self._metrics.counter(DENSE_FALLBACKS, self._model).add(runs)

    def scored(self, output: str, values: NDArray[Any]) -> None:
        """Count the ``values``, all finite, of an output that has one number per sample."""
        scores = self._scores.get(output)
        if scores is None:
            scores = self._metrics.histogram(SCORES, *self._labels, output)
            absolute = SCORES_ABSOLUTE, *self._labels, output
            scores.signed = (
                self._metrics.counter(*absolute, "positive"),
                self._metrics.counter(*absolute, "negative"),
            )
            self._metrics.counter(SCORES_NOT_FINITE, *self._labels, output)
            self._scores[output] = scores
        scores.observe_array(values)

    def not_finite(self, output: str, values: int) -> None:
        self._metrics.counter(SCORES_NOT_FINITE, *self._labels, output).add(values)


class TierMeter:
    """Counts the fetches of one tier (the observer of ``MeteredTier``)."""

    def __init__(self, metrics: Metrics, tier: str) -> None:
        self._metrics = metrics
        self._tier = tier
        self._seconds = metrics.histogram(TIER_SECONDS, tier)
        self._keys: dict[EmbeddingTable, tuple[Counter, Counter, Counter]] = {}
        metrics.on_release(self._release)

    def __call__(
        self,
        counts: list[tuple[EmbeddingTable, int, int]],
        seconds: float,
        skipped: bool = False,
        /,
    ) -> None:
        self.counted_all(counts, () if skipped else (seconds,), skipped=skipped)

    def counted_all(
        self,
        counts: Sequence[tuple[EmbeddingTable, int, int]],
        seconds: Sequence[float],
        *,
        skipped: bool = False,
    ) -> None:
        """Count several fetches; ``seconds`` of each."""
        amounts = []
        for table, requested, found in counts:
            counters = self._keys.get(table) or self._counters(table)
            if found:
                amounts.append((counters[0], found))
            if requested > found:
                amounts.append((counters[2 if skipped else 1], requested - found))
        add_all(amounts)
        self._seconds.observe_all(seconds)

    def prepare(self, found: list[tuple[EmbeddingTable, int, int]]) -> Callable[[float], None]:
        """Return a function that counts a fetch that found all of these keys, given its seconds."""
        amounts = [
            ((self._keys.get(table) or self._counters(table))[0], n) for table, _, n in found if n
        ]
        return _counting_function(self._metrics.batched_counters(amounts), self._seconds)

    def passed_over(self, reason: str) -> None:
        """Count a fetch that skipped the tier (called by ``GuardedTier``)."""
        self._metrics.counter(TIER_SKIPPED, self._tier, reason).add()

    def _release(self, model: str, version: int) -> None:
        """Drop a version's tables, which would otherwise be kept as long as the tier exists."""
        for table in list(self._keys):
            if (table.model, table.version) == (model, version):
                del self._keys[table]

    def _counters(self, table: EmbeddingTable) -> tuple[Counter, Counter, Counter]:
        labels = (self._tier, table.model, str(table.version), table.name)
        self._keys[table] = counters = (
            self._metrics.counter(TIER_KEYS, *labels, "found"),
            self._metrics.counter(TIER_KEYS, *labels, "missed"),
            self._metrics.counter(TIER_KEYS, *labels, "skipped"),
        )
        return counters


TrainedWith = tuple[int, int]
"""The newest dense version and training step of a table's streamed rows; 0: none."""


class UpdateMeter:
    """Counts the rows of update streams; called on the thread that applies them.

    ``is_replay``: of old messages for a version that is added, whose ages say nothing about served rows."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        is_replay: bool = False,
        networks: dict[EmbeddingTable, TrainedWith] | None = None,
    ) -> None:
        """``networks``: gets the newest network and step of the applied rows of each table."""
        self._metrics = metrics
        self._is_replay = is_replay
        self._networks = {} if networks is None else networks
        self._batches = metrics.histogram(UPDATE_BATCH)

    def applied(self, table: EmbeddingTable, result: str, rows: int) -> None:
        """Count ``rows`` of ``table`` that were upserted, deleted, expired, not_finite or other_shape."""
        labels = UPDATE_ROWS, table.model, table.name
        # An alert on increases notices the first one only if the counter already existed with 0.
        self._metrics.counter(*labels, "not_finite")
        if rows:
            self._metrics.counter(*labels, result).add(rows)

    def visible(self, table: EmbeddingTable, tier: str, produced_s: NDArray[np.float64]) -> None:
        """Record that ``tier`` now has the rows of messages produced at ``produced_s (k,)``, Unix seconds."""
        if self._is_replay:
            return
        ages = np.maximum(0.0, time.time() - produced_s)
        self._metrics.histogram(UPDATE_VISIBLE, table.model, table.name, tier).observe_all(
            ages.tolist()
        )

    def trained(self, table: EmbeddingTable, messages: NDArray[Any]) -> None:
        """Record the dense versions and steps of applied ``messages (k,)`` of dtype `MESSAGE`."""
        network, step = self._networks.get(table, (0, 0))
        self._networks[table] = (
            max(network, int(messages["dense_version"].max(initial=0))),
            max(step, int(messages["step"].max(initial=0))),
        )

    def took(self, seconds: float) -> None:
        """Record the seconds until a batch was in all stores and caches."""
        self._batches.observe(seconds)

    def dead(self, reason: str) -> None:
        self._metrics.counter(UPDATE_DEAD, reason).add()


class StreamMeter:
    """Counts events of the topics that the reader of ``group`` reads; called on its thread."""

    def __init__(self, metrics: Metrics, group: str) -> None:
        self._metrics = metrics
        self._group = group

    def lost(self, topic: str, messages: int) -> None:
        """Count messages that Kafka dropped before they were applied."""
        self._metrics.counter(UPDATE_LOST, self._group, topic).add(messages)

    def hold_expired(self, topic: str) -> None:
        """Count a partition whose rows waited for their network for as long as is allowed."""
        self._metrics.counter(UPDATE_HOLD_EXPIRED, self._group, topic).add()

    def restarted(self, topic: str) -> None:
        """Count a partition that is read from its beginning again."""
        self._metrics.counter(UPDATE_RESTARTED, self._group, topic).add()


def count_promotion(metrics: Metrics, tier: str, result: str, keys: int) -> None:
    """Count a promotion into ``tier``, by ``result``; see `hps.updates.admission.Count`."""
    metrics.counter(PROMOTIONS, tier, result).add(keys)


def count_expired(metrics: Metrics, tier: str, table: EmbeddingTable, rows: int) -> None:
    """Count expired ``rows`` of ``table`` that were removed from ``tier``."""
    if rows:
        metrics.counter(EXPIRED_ROWS, tier, table.model, table.name).add(rows)


def _counting_function(
    counters: BatchedCounters, histogram: MetricHistogram
) -> Callable[[float], None]:
    add, observe = counters.add, histogram.observe

    def finished(seconds: float) -> None:
        add()
        observe(seconds)

    return finished
