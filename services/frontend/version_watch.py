"""Counts of one version's requests for an automatic rollback: failures, latencies and scores.

Requests only append to bounded queues; a thread of the process takes them once a second. Latencies and scores
are counted in fixed classes, which all processes share, so that their counts can be added."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Kept between two calls of `take`; more requests a second are counted as the last ones.
_MOST_REQUESTS, _MOST_SCORED = 65_536, 4_096
# Scores counted per request: neighbours in a list of candidates say little more.
_SCORES = 8
_FAILED = -1.0
# Latency classes: powers of 1.05 from 10 us on.
_FIRST_S, _LOG_RATIO = 1e-5, math.log(1.05)
_LAST_CLASS = 400


class VersionCounts:
    """Counts of requests. ``latencies`` and ``scores`` are by class."""

    __slots__ = ("failures", "latencies", "requests", "scores")

    def __init__(self) -> None:
        self.requests = self.failures = 0
        self.latencies: Counter[int] = Counter()
        self.scores: Counter[int] = Counter()

    def add(self, other: VersionCounts) -> None:
        self.requests += other.requests
        self.failures += other.failures
        self.latencies.update(other.latencies)
        self.scores.update(other.scores)

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "failures": self.failures,
            "latencies": [*self.latencies.items()],
            "scores": [*self.scores.items()],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> VersionCounts:
        counts = cls()
        counts.requests, counts.failures = found["requests"], found["failures"]
        counts.latencies.update(dict(found["latencies"]))
        counts.scores.update(dict(found["scores"]))
        return counts


class VersionWatch:
    """The requests of one version of a served name since the last `take`. Thread-safe."""

    __slots__ = ("_output", "_requests", "_scores")

    def __init__(self, output: str | None) -> None:
        """``output``: the output with the scores; None: the answers have none."""
        self._output = output
        self._requests: deque[float] = deque(maxlen=_MOST_REQUESTS)
        self._scores: deque[NDArray[Any]] = deque(maxlen=_MOST_SCORED)

    def answered(self, seconds: float, result: Any) -> None:
        """Count an answer; ``result`` is a `PredictResult` or a `LookupResult`."""
        self._requests.append(seconds)
        if self._output is not None and (scores := result.outputs.get(self._output)) is not None:
            flat = scores.reshape(-1)
            self._scores.append(flat[:: max(1, flat.size // _SCORES)][:_SCORES].copy())

    def failed(self) -> None:
        """Count a request that failed."""
        self._requests.append(_FAILED)

    def take(self) -> VersionCounts:
        """Return the counts since the last call. One thread at a time may call it."""
        counts = VersionCounts()
        seconds = np.array([self._requests.popleft() for _ in range(len(self._requests))])
        counts.requests = seconds.size
        seconds = seconds[seconds >= 0]
        counts.failures = counts.requests - seconds.size
        counts.latencies.update(latency_classes(seconds).tolist())
        scores = [self._scores.popleft() for _ in range(len(self._scores))]
        if scores:
            counts.scores.update(score_classes(np.concatenate(scores)).tolist())
        return counts


def latency_classes(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the class of each latency."""
    classes = np.log(np.maximum(seconds, _FIRST_S) / _FIRST_S) / _LOG_RATIO
    return np.minimum(classes, _LAST_CLASS).astype(np.int64)


def latency_s(latency_class: int) -> float:
    """Return the upper end of a class of latencies."""
    return _FIRST_S * math.exp((latency_class + 1) * _LOG_RATIO)


def score_classes(scores: NDArray[Any]) -> NDArray[np.int64]:
    """Return the class of each score, in the order of the scores.

    That is the upper half of a float32: its sign, exponent and 7 bits of its fraction, so that classes are
    at most 0.8 % wide, whatever the range of the scores. NaN is in the outermost classes."""
    bits = scores.astype(np.float32).view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return (ordered >> 16).astype(np.int64)
