"""A server with the default admission settings below and above its capacity; part of overload.py.

Requests arrive as a Poisson process of 0.8 times and of four times the capacity, alternating with it. Only
answers within half a second count, as for clients with that timeout. An overload's first two seconds do not
count: it cannot be detected until the queue is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.open_loop import LoadResult, poisson

BELOW, ABOVE = 0.8, 4.0
DEADLINE_S, WARM_UP_S = 0.5, 2.0


class Load(Protocol):
    """Requests to a server."""

    def open(self, arrivals: list[float]) -> LoadResult: ...

    def capacity(self, seconds: float) -> LoadResult: ...


@dataclass
class AdmissionResult:
    """Measurements at capacity, and for ``seconds`` each below and above it."""

    seconds: float
    capacity: LoadResult = field(default_factory=LoadResult)
    below: LoadResult = field(default_factory=LoadResult)
    above: list[LoadResult] = field(default_factory=list)

    @property
    def rejected_share(self) -> float:
        """Share of the requests below capacity that were rejected."""
        return 1 - self.below.statuses.count(200) / len(self.below.statuses)

    @property
    def goodput(self) -> float:
        """Answers in time per second above capacity, relative to capacity."""
        in_time = sum(self._in_time(result) for result in self.above)
        seconds = len(self.above) * (self.seconds - WARM_UP_S)
        return in_time / seconds / self.capacity.goodput

    def _in_time(self, result: LoadResult) -> int:
        return sum(
            status == 200 and took_s <= DEADLINE_S and WARM_UP_S < end_s <= self.seconds
            for status, took_s, end_s in zip(
                result.statuses, result.latencies, result.ends, strict=True
            )
        )

    def row(self) -> Mapping[str, str]:
        return {
            "answers/s at capacity": f"{self.capacity.goodput:.1f}",
            f"rejected at {BELOW:g}": f"{self.rejected_share:.4f}",
            f"in time at {ABOVE:g}, of capacity": f"{self.goodput:.3f}",
        }


def alternate_with_capacity(load: Load, turns: int, seconds: float) -> AdmissionResult:
    """Load ``turns`` times for ``seconds`` below and ``seconds`` above capacity.

    Raises RuntimeError when the load generator has not kept up."""
    found = AdmissionResult(seconds)
    for turn in range(turns):
        last = load.capacity(1.0)
        found.capacity += last
        found.below += load.open(poisson(BELOW * last.goodput, seconds, turn))
        last = load.capacity(1.0)
        found.capacity += last
        result = load.open(poisson(ABOVE * last.goodput, seconds, turn))
        if max(result.late) > DEADLINE_S:
            raise RuntimeError(f"a request was sent {max(result.late):.2f} s late")
        found.above.append(result)
    return found
