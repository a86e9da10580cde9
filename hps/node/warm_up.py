"""Warm-up of a version before requests are sent to it: sampled requests of its model are replayed on it.

They bring rows into its caches, pages of mapped files into memory, and the network to its usual sizes. The
version is ready once its hit rate and latency do not improve any more, or `models.warm_up_s` have passed. The
requests are replayed part by part: a version that has all rows in memory is ready after two parts."""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from hps.errors import HpsError
from hps.lookup.request_sample import NO_SAMPLE, Sampled
from hps.node.served_versions import ServedModel, ServedModels
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from hps.threads import SWITCH_S, paced
from hps.types import LookupRequest, Source

log = logging.getLogger(__name__)

# Another round must raise the hit rate by a point, or lower the median latency by a tenth.
_HIT_RATE_STEP, _LATENCY_STEP = 0.01, 0.1
_PART = 16
# Requests that were not replayed yet would find their rows in memory as well.
_WARM = 1 - _HIT_RATE_STEP
_MOST_REPEATS = 2  # the same requests once more bring nothing more into memory
# Replayed requests share the interpreter with live ones: at 70 % load, 3 % more of it adds a tenth to the
# time in the queue. Slow requests get more, so that two rounds end within `models.warm_up_s`. What counts
# is this thread's own time: under load a replay mostly waits, and must not take more because of it.
_LEAST_SHARE, _MOST_SHARE = 0.03, 0.25
_DEADLINE_S = 1.0
_LOAD_SHARE = 0.2
# A front end does not see in which tier of a lookup node a row is; the latency tells it.
_IN_MEMORY = {each.name.lower() for each in (Source.GPU, Source.CPU, Source.MEMORY, Source.REMOTE)}


@dataclass(frozen=True, slots=True)
class _Round:
    """One replay of some requests: how many were answered, their median time, the share of keys in memory."""

    answered: int
    median_s: float
    hit_rate: float

    def improves(self, former: _Round) -> bool:
        return (
            self.hit_rate > former.hit_rate + _HIT_RATE_STEP
            or self.median_s < former.median_s * (1 - _LATENCY_STEP)
        )


@contextmanager
def beside_requests(models: ServedModels) -> Iterator[None]:
    """Pace this thread's changes of versions, see `hps.threads.paced`, if ``models`` are requested."""
    with ExitStack() as pace:
        samples = [each.sample for each in models.versions]
        # Without samples (`models.warm_up_s` is 0) nothing says whether there are requests.
        if any(each is NO_SAMPLE or each.requests() for each in samples):
            pace.enter_context(paced(_LOAD_SHARE))
        yield


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
        rounds: list[_Round] = []
        settled = False
        for part, repeated in _parts(requests):
            rounds.append(self._round(served, part, until, len(requests)))
            if not rounds[-1].answered or time.monotonic() > until:
                break
            if len(rounds) > 1 and (repeated or rounds[-1].hit_rate > _WARM):
                settled = not rounds[-1].improves(rounds[-2]) or repeated == _MOST_REPEATS
            if settled:
                break
        answered = sum(each.answered for each in rounds)
        result = "settled" if settled else "timed_out" if rounds[-1].answered else "failed"
        self._metrics.counter(m.MODEL_WARM_UPS, served.name, result).add()
        log.info(
            "model %s: version %d warmed up (%s) with %d requests in %.1f s: hit rate %.3f, was %.3f; median "
            "%.2f ms, was %.2f ms",
            served.name,
            served.version,
            result.replace("_", " "),
            answered,
            time.monotonic() - started,
            rounds[-1].hit_rate,
            rounds[0].hit_rate,
            1e3 * rounds[-1].median_s,
            1e3 * rounds[0].median_s,
        )

    def _round(
        self, served: ServedModel, requests: Sequence[Sampled], until: float, total: int
    ) -> _Round:
        """Replay ``requests``, a part of ``total``."""
        before, times = self._keys(served), []
        for request in requests:
            self._require_open()
            if time.monotonic() > until:
                break
            began, own = time.perf_counter(), time.thread_time()
            if _replayed(served, request):
                times.append(time.perf_counter() - began)
            own = time.thread_time() - own
            share = 2.5 * own * total / self._limit_s
            time.sleep(own * (1 / min(max(share, _LEAST_SHARE), _MOST_SHARE) - 1))
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


def _parts(requests: list[Sampled]) -> Iterator[tuple[Sequence[Sampled], int]]:
    """Yield all requests part by part, then all of them again; with the number of the repeat, 0 for none."""
    for start in range(0, len(requests), _PART):
        yield requests[start : start + _PART], 0
    for repeat in range(1, _MOST_REPEATS + 1):
        yield requests, repeat


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
