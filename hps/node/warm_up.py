"""Warm-up of a version before requests are sent to it: sampled requests of its model are replayed on it.

They bring rows into its caches, pages of mapped files into memory, and the network to its usual sizes. The
version is ready once its hit rate and latency do not improve any more, or `models.warm_up_s` have passed."""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hps.errors import HpsError
from hps.lookup.request_sample import Sampled
from hps.node.served_versions import ServedModel
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.threads import SWITCH_S
from hps.types import LookupRequest, Source

log = logging.getLogger(__name__)

# Another round must raise the hit rate by a point, or lower the median latency by a tenth.
_HIT_RATE_STEP, _LATENCY_STEP = 0.01, 0.1
# Replayed requests share the interpreter with live ones: at 70 % load, 3 % more of it adds a tenth to the
# time in the queue. Slow requests get more, so that two rounds end within `models.warm_up_s`.
_LEAST_SHARE, _MOST_SHARE = 0.03, 0.25
_DEADLINE_S = 1.0
_IN_MEMORY = {each.name.lower() for each in (Source.GPU, Source.CPU, Source.MEMORY)}


@dataclass(frozen=True, slots=True)
class _Round:
    """One replay of all requests: how many were answered, their median time, the share of keys in memory."""

    answered: int
    median_s: float
    hit_rate: float

    def improves(self, former: _Round) -> bool:
        return (
            self.hit_rate > former.hit_rate + _HIT_RATE_STEP
            or self.median_s < former.median_s * (1 - _LATENCY_STEP)
        )


class WarmUp:
    """Warm-ups of one process, each at most ``limit_s`` long; ``require_open`` raises to end one early."""

    def __init__(
        self, limit_s: float, metrics: Metrics, require_open: Callable[[], None] = lambda: None
    ) -> None:
        self._limit_s = limit_s
        self._metrics = metrics
        self._require_open = require_open

    def run(self, served: ServedModel) -> None:
        """Replay the sampled requests of its model on ``served``; does nothing if there are none.

        Requests that fail are left out: the version may have other features. Raises only the errors of
        ``require_open``."""
        requests = served.sample.requests()
        if not requests or not self._limit_s:
            return
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        started = time.monotonic()
        until = started + self._limit_s
        rounds = [self._round(served, requests, until)]
        settled = False
        while not settled and time.monotonic() < until and rounds[-1].answered:
            rounds.append(self._round(served, requests, until))
            settled = not rounds[-1].improves(rounds[-2]) and time.monotonic() < until
        result = "settled" if settled else "timed_out" if rounds[-1].answered else "failed"
        self._metrics.counter(m.MODEL_WARM_UPS, served.name, result).add()
        log.info(
            "model %s: version %d warmed up (%s) with %d requests in %.1f s: hit rate %.3f, was %.3f; median "
            "%.2f ms, was %.2f ms",
            served.name,
            served.version,
            result.replace("_", " "),
            len(requests),
            time.monotonic() - started,
            rounds[-1].hit_rate,
            rounds[0].hit_rate,
            1e3 * rounds[-1].median_s,
            1e3 * rounds[0].median_s,
        )

    def _round(self, served: ServedModel, requests: list[Sampled], until: float) -> _Round:
        before, times = self._keys(served), []
        for request in requests:
            self._require_open()
            if time.monotonic() > until:
                break
            began = time.perf_counter()
            if _replayed(served, request):
                times.append(time.perf_counter() - began)
            took = time.perf_counter() - began
            share = 2.5 * took * len(requests) / self._limit_s
            time.sleep(took * (1 / min(max(share, _LEAST_SHARE), _MOST_SHARE) - 1))
        hits, keys = (now - then for now, then in zip(self._keys(served), before, strict=True))
        return _Round(
            len(times), statistics.median(times) if times else 0.0, hits / keys if keys else 0.0
        )

    def _keys(self, served: ServedModel) -> tuple[float, float]:
        """Keys of the version's lookups that were in memory, and those that any tier had."""
        hits = keys = 0.0
        of = served.name, str(served.version)
        for (model, version, _, tier), count in self._metrics.values(m.LOOKUP_KEYS).items():
            if (model, version) == of and tier != Source.DEFAULT.name.lower():
                keys += count
                hits += count if tier in _IN_MEMORY else 0
        return hits, keys


def _replayed(served: ServedModel, request: Sampled) -> bool:
    """Answer ``request`` by ``served``; False if that failed."""
    timed = replace(request, deadline=time.monotonic() + _DEADLINE_S)
    try:
        if isinstance(timed, LookupRequest):
            served.engine.submit(timed).result()
        elif served.pipeline is not None:
            served.pipeline.submit(timed).result()
        else:
            return False
    except HpsError as error:
        log.debug("model %s: a replayed request failed: %s", served.name, error)
        return False
    return True
