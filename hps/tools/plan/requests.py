"""The requests of a trace: their keys, and the rows that they read from a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hps.tools.plan.allocation import Allocation, TableDemand
from hps.tools.plan.trace import Trace

_MOST_REQUESTS = 1 << 14
_SEED = 1


@dataclass(frozen=True, slots=True)
class RequestMisses:
    """Keys and misses of requests, ``(r,)`` each; ``mapped``: keys of tables in mapped files in memory.

    ``gpu_misses``: keys whose rows a GPU cache misses; None for lookups on the host."""

    keys: NDArray[np.float64]
    misses: NDArray[np.float64]
    mapped: NDArray[np.float64]
    gpu_misses: NDArray[np.float64] | None = None


def request_misses(
    trace: Trace,
    demands: Mapping[str, TableDemand],
    rows: Allocation,
    first: int,
    in_memory: Collection[str] = (),
) -> RequestMisses:
    """Return the keys and misses of the last requests of ``trace``, from number ``first`` on.

    ``rows``: those in memory. ``in_memory``: the tables that are read from mapped files. Of a table whose
    sample is the whole trace the counts are those of each request; of other tables they are drawn from the
    binomial distribution with the table's mean."""
    first = max(first, trace.requests - _MOST_REQUESTS)
    count = max(1, trace.requests - first)
    random = np.random.default_rng(_SEED)
    keys, misses, mapped = np.zeros(count), np.zeros(count), np.zeros(count)
    for name, demand in demands.items():
        sample, cached = trace.samples[name], rows.get(name, 0)
        if len(sample.keys) == sample.accesses and demand.curve.sample.rate == 1:
            asked = _counted(sample.requests, first, count)
            misses += _counted(demand.curve.missed(cached), first, count)
        else:
            mean = sample.accesses / trace.requests
            asked = np.full(count, mean)
            missed = min(1.0, max(0.0, 1.0 - demand.curve.at(cached)))
            misses += random.binomial(max(1, round(mean)), missed, count)
        keys += asked
        if name in in_memory:
            mapped += asked
    return RequestMisses(keys, np.minimum(misses, keys), mapped)


def _counted(requests: NDArray[np.int64], first: int, count: int) -> NDArray[np.float64]:
    numbers = requests[requests >= first] - first
    return np.bincount(numbers, minlength=count)[:count].astype(np.float64)
