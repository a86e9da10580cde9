"""A server with the default admission settings below and above its capacity; part of overload.py.

Requests come at random at 0.8 times and at four times the capacity, in turns with it. Answers count that come
within half a second, as for clients that wait no longer. An overload's first two seconds do not count: until
the queue is full, nothing says that there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.open_loop import Seen, poisson

BELOW, ABOVE = 0.8, 4.0
PATIENCE_S, BEGINNING_S = 0.5, 2.0


class Load(Protocol):
    """Requests to a server."""

    def open(self, arrivals: list[float]) -> Seen: ...

    def capacity(self, seconds: float) -> Seen: ...


@dataclass
class Turns:
    """Measurements at capacity, and for ``seconds`` each below and above it."""

    seconds: float
    able: Seen = field(default_factory=Seen)
    below: Seen = field(default_factory=Seen)
    above: list[Seen] = field(default_factory=list)

    @property
    def refused(self) -> float:
        """Part of the requests below capacity."""
        return 1 - self.below.statuses.count(200) / len(self.below.statuses)

    @property
    def goodput(self) -> float:
        """Answers in time above capacity, of those at capacity."""
        in_time = sum(self._in_time(seen) for seen in self.above)
        seconds = len(self.above) * (self.seconds - BEGINNING_S)
        return in_time / seconds / self.able.goodput

    def _in_time(self, seen: Seen) -> int:
        return sum(
            status == 200 and took_s <= PATIENCE_S and BEGINNING_S < end_s <= self.seconds
            for status, took_s, end_s in zip(seen.statuses, seen.latencies, seen.ends, strict=True)
        )

    def row(self) -> Mapping[str, str]:
        return {
            "answers/s at capacity": f"{self.able.goodput:.1f}",
            f"refused at {BELOW:g}": f"{self.refused:.4f}",
            f"in time at {ABOVE:g}, of capacity": f"{self.goodput:.3f}",
        }


def in_turns(load: Load, turns: int, seconds: float) -> Turns:
    """``turns`` turns, each ``seconds`` below and above capacity. Raises RuntimeError when the load generator
    has not kept up."""
    found = Turns(seconds)
    for turn in range(turns):
        last = load.capacity(1.0)
        found.able += last
        found.below += load.open(poisson(BELOW * last.goodput, seconds, turn))
        last = load.capacity(1.0)
        found.able += last
        seen = load.open(poisson(ABOVE * last.goodput, seconds, turn))
        if max(seen.late) > PATIENCE_S:
            raise RuntimeError(f"a request was sent {max(seen.late):.2f} s late")
        found.above.append(seen)
    return found
