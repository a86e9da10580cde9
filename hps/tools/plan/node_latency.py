"""Latency of a planned node's lookups, from the calibrations of the tiers that it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hps.config import Settings
from hps.tools.plan.latency import Calibration, Floats
from hps.tools.plan.requests import RequestMisses


def redis_share_of(settings: Settings) -> float | None:
    """Return the share of the misses that Redis answers once it is filled; None without Redis.

    All of them if it is the only store or missed rows are copied into it."""
    redis = settings.tiers.redis
    if redis is None:
        return None
    complete = redis.cache_missed_embeddings or not settings.tiers.rocksdb.enabled
    return 1.0 if complete else redis.initial_cache_rate


@dataclass(frozen=True, slots=True)
class NodeLatency:
    """Latencies of requests at a node with the tiers of ``calibration``.

    ``redis_share``: see `redis_share_of`. A tier without a calibration is predicted as if the node did
    not have it."""

    calibration: Calibration
    redis_share: float | None = None

    def mean_us(self, found: RequestMisses) -> float:
        """Return the mean over requests of the typical latency."""
        return float(self._total(found, Calibration.medians_us).mean())

    def percentiles_us(self, found: RequestMisses, which: Sequence[float]) -> list[float]:
        """Return percentiles of the latency over requests, each of which varies as measured."""
        every = self._total(found, Calibration.spread_us).ravel()
        return [float(np.quantile(every, p / 100)) for p in which]

    def _total(self, found: RequestMisses, times: Callable[..., Floats]) -> Floats:
        """Add the times of the tiers; ``times``: a method of their calibrations."""
        local = self.calibration
        redis = None if self.redis_share is None else local.redis
        if local.gpu is not None and found.gpu_misses is not None:
            total = times(local.gpu, found.keys, found.gpu_misses)
            total = total + times(redis or local, found.keys, found.misses, misses_only=True)
        else:
            total = times(redis or local, found.keys, found.misses, found.mapped)
        if redis is not None and self.redis_share is not None and self.redis_share < 1:
            rest = (1 - self.redis_share) * found.misses
            total = total + times(local, found.keys, rest, misses_only=True)
        return total
