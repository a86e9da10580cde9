"""Rates and quantiles between two readings of a server's metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hps.observability import metric_names as m

if TYPE_CHECKING:
    from hps.client.admin import MetricSample

_SUCCESS = ("200", "OK")
Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """A server's metrics at the instant ``at`` of ``time.monotonic``."""

    at: float
    values: Mapping[Series, float]

    @staticmethod
    def of(at: float, samples: Iterable[MetricSample]) -> MetricsReading:
        return MetricsReading(
            at, {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}
        )


class MetricsInterval:
    """Rates and quantiles between two readings.

    A counter that decreased was reset by a restart of the server: it counts from zero."""

    def __init__(self, before: MetricsReading, after: MetricsReading) -> None:
        self.seconds = max(after.at - before.at, 1e-9)
        self._grown = {
            series: value - before.values.get(series, 0.0)
            if value >= before.values.get(series, 0.0)
            else value
            for series, value in after.values.items()
        }
        self._now = after.values

    def rate(self, name: str, **labels: str | Callable[[str], bool]) -> float:
        """Rate per second of all series that match ``labels``: each a value, or a predicate."""
        return sum(v for _, v in _chosen(self._grown, name, labels)) / self.seconds

    def now(self, name: str, **labels: str) -> list[float]:
        return [v for _, v in _chosen(self._now, name, labels)]

    def labels(self, name: str, label: str) -> list[str]:
        """The distinct values of ``label``, in order."""
        found = (dict(labels).get(label, "") for labels, _ in _chosen(self._now, name, {}))
        return list(dict.fromkeys(found))

    def quantile(self, name: str, share: float, **labels: str) -> float | None:
        """Quantile of a histogram, in its unit, interpolated within a bucket as Prometheus does.

        None without observations; infinite beyond the last bucket."""
        counts: dict[float, float] = {}
        for found, value in _chosen(self._grown, f"{name}_bucket", labels):
            bound = float(dict(found)["le"])
            counts[bound] = counts.get(bound, 0.0) + value
        total = max(counts.values(), default=0.0)
        if total <= 0:
            return None
        low = below = 0.0
        for bound in sorted(counts):
            if counts[bound] >= share * total:
                if math.isinf(bound):
                    return bound
                inside = counts[bound] - below
                return low + (bound - low) * (share * total - below) / inside if inside else bound
            low, below = bound, counts[bound]
        return None


def _chosen(
    values: Mapping[Series, float], name: str, labels: Mapping[str, Any]
) -> Iterable[tuple[tuple[tuple[str, str], ...], float]]:
    for (known_as, found), value in values.items():
        if known_as != name:
            continue
        by_name = dict(found)
        if all(
            wanted(by_name.get(label, "")) if callable(wanted) else by_name.get(label) == wanted
            for label, wanted in labels.items()
        ):
            yield found, value


def account(before: MetricsReading, after: MetricsReading) -> dict[str, Any]:
    """Summary of a server between two readings."""
    it = MetricsInterval(before, after)
    keys = it.rate(m.LOOKUP_KEYS)
    version = it.labels(m.BUILD_INFO, "version")
    tiers = dict.fromkeys([*it.labels(m.TIER_AVAILABLE, "tier"), *it.labels(m.TIER_KEYS, "tier")])
    return {
        "version": version[0] if version else "",
        "ready": bool(max(it.now(m.READY), default=1.0)),
        "uptime_s": max(it.now(m.UPTIME), default=0.0),
        **_requests(it),
        "refused_per_s": it.rate(m.REQUESTS_REFUSED),
        "running": sum(it.now(m.RUNNING_REQUESTS)),
        "queued": sum(it.now(m.QUEUE_REQUESTS)),
        "keys_per_s": keys,
        "defaulted": it.rate(m.LOOKUP_KEYS, tier="default") / keys if keys else None,
        "degraded_per_s": it.rate(m.LOOKUP_DEGRADED),
        "age_s": _finite(max(it.now(m.UPDATE_AGE), default=None)),
        "lag_messages": sum(it.now(m.UPDATE_LAG)) if it.now(m.UPDATE_LAG) else None,
        "models": [
            {"model": model, **_requests(it, model=model)}
            for model in it.labels(m.REQUEST_SECONDS + "_count", "model")
            if model
        ],
        "tiers": [_tier(it, tier) for tier in tiers],
        "lookup_nodes": [_node(it, at) for at in it.labels(m.LOOKUP_NODE_UP, "address")],
    }


def _requests(it: MetricsInterval, **labels: str) -> dict[str, Any]:
    name = m.REQUEST_SECONDS
    return {
        "requests_per_s": it.rate(f"{name}_count", **labels),
        "errors_per_s": it.rate(f"{name}_count", code=lambda c: c not in _SUCCESS, **labels),
        "p50_s": it.quantile(name, 0.5, **labels),
        "p99_s": it.quantile(name, 0.99, **labels),
    }


def _node(it: MetricsInterval, address: str) -> dict[str, Any]:
    """Summary of a lookup node, as its front end sees it."""
    requests = m.LOOKUP_NODE_REQUESTS
    return {
        "address": address,
        "up": bool(max(it.now(m.LOOKUP_NODE_UP, address=address), default=0.0)),
        "requests_per_s": it.rate(requests, address=address),
        "errors_per_s": it.rate(requests, address=address, code=lambda code: code != "OK"),
        "running": sum(it.now(m.LOOKUP_NODE_RUNNING, address=address)),
        "retries_per_s": it.rate(m.LOOKUP_NODE_RETRIES, address=address),
    }


def _tier(it: MetricsInterval, tier: str) -> dict[str, Any]:
    found, missed, skipped = (
        it.rate(m.TIER_KEYS, tier=tier, result=result) for result in ("found", "missed", "skipped")
    )
    return {
        "tier": tier,
        "keys_per_s": found + missed + skipped,
        "hit_rate": found / (found + missed) if found + missed else None,
        "p50_s": it.quantile(m.TIER_SECONDS, 0.5, tier=tier),
        "p99_s": it.quantile(m.TIER_SECONDS, 0.99, tier=tier),
        "skipped_per_s": it.rate(m.TIER_SKIPPED, tier=tier),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
