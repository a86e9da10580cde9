"""Rounds of requests at a share of a server's capacity, without and with changes of its models."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.open_load import open_load
from benchmarks.stolen_time import StolenTime, disturbed, inside, share_of
from benchmarks.switch_scene import Side, kinds

SHARE, CALLERS, ROUND_S, SETTLE_S = 0.7, 8, 10.0, 0.3
CAPACITY_RUNS, CAPACITY_S, CAPACITY_PAUSE_S = 3, 1.0, 0.5
MOST_DISTURBED = 0.5
"""Of a half's time: a round with more in one of its halves is not judged."""
STEADY = 0.9
"""Of the capacity before a round, the least after it: else the load was too high for a slower machine."""


@dataclass
class Half:
    """Half of a round, from ``begin`` to ``end`` (`time.monotonic_ns`), and its loads.

    ``disturbed``: the share of its time in which other machines of the host took the processors."""

    begin: int
    end: int = 0
    changes: list[tuple[int, int, int]] = field(default_factory=list)  # begin, end, version
    disturbed: float = 0.0


@dataclass
class Measured:
    """Rounds of one load: halves without and with changes, the answers, resources after each round."""

    quiet: list[Half] = field(default_factory=list)
    busy: list[Half] = field(default_factory=list)
    records: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    resources: list[dict[str, float]] = field(default_factory=list)
    capacities: list[float] = field(default_factory=list)
    """Requests a second that closed loops reached before each round, and after the last one."""
    disturbed: list[tuple[int, int]] = field(default_factory=list)  # begin, end
    error: str = ""

    def latencies(self, halves: list[Half]) -> NDArray[np.float64]:
        """Latencies in ms of requests that were due in ``halves``."""
        due = self.records["due"]
        found = inside([(half.begin, half.end) for half in halves], due)
        late: NDArray[np.float64] = (self.records["end"] - due)[found] / 1e6
        return late

    @property
    def slowed(self) -> list[bool]:
        """Whether the machine was slower after a round than before."""
        return [after < STEADY * before for before, after in itertools.pairwise(self.capacities)]

    def without_disturbed(self) -> Measured:
        """The rounds of a steady machine whose halves were mostly calm, and the answers due in calm times."""
        kept = [
            i
            for i, halves in enumerate(zip(self.quiet, self.busy, strict=True))
            if max(half.disturbed for half in halves) <= MOST_DISTURBED and not self.slowed[i]
        ]
        found = Measured(*([each[i] for i in kept] for each in (self.quiet, self.busy)))
        times = [(half.begin, half.end) for half in (*found.quiet, *found.busy)]
        due = self.records["due"]
        found.records = self.records[inside(times, due) & ~inside(self.disturbed, due)]
        found.error = self.error
        found.resources = [self.resources[i] for i in kept]
        return found

    def ratio(self, percent: float) -> float:
        """The median over the rounds of a percentile with changes / without."""
        return float(
            np.median(
                [
                    np.percentile(self.latencies([busy]), percent)
                    / np.percentile(self.latencies([quiet]), percent)
                    for quiet, busy in zip(self.quiet, self.busy, strict=True)
                ]
            )
        )

    def pooled(self, percent: float) -> float:
        """A percentile of all rounds' answers, with changes / without."""
        busy, quiet = (np.percentile(self.latencies(h), percent) for h in (self.busy, self.quiet))
        return float(busy / quiet)

    @property
    def failed(self) -> int:
        """Errors, and answers with defaults in place of rows, which the server flags as degraded."""
        return int(((self.records["status"] != 200) | (self.records["wrong"] == 2)).sum())

    @property
    def mixed(self) -> int:
        return int((self.records["wrong"] == 1).sum())

    @property
    def stale(self) -> int:
        """Answers of another version than the current one to requests due after a change, before the next."""
        due, value, count = self.records["due"], self.records["value"], 0
        answered = (self.records["status"] == 200) & (self.records["wrong"] == 0)
        for half in self.busy:
            ends = [begin for begin, _, _ in half.changes[1:]] + [half.end]
            for (_, end, version), until in zip(half.changes, ends, strict=True):
                others = answered & (due > end) & (due < until) & (value != version)
                count += int(others.sum())
        return count

    def growth(self, what: str) -> tuple[float, float]:
        """The highest of ``what`` in the first and in the last quarter of the rounds."""
        values = [each[what] for each in self.resources]
        n = max(1, len(values) // 4)
        return max(values[:n]), max(values[-n:])

    def slower(self) -> float:
        """p50 without changes: the last quarter of the rounds / the first."""
        n = max(1, len(self.quiet) // 4)
        last, first = (np.median(self.latencies(h)) for h in (self.quiet[-n:], self.quiet[:n]))
        return float(last / first)

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        took = [(end - begin) / 1e9 for half in self.busy for begin, end, _ in half.changes]
        for title, halves in (("without", self.quiet), ("with", self.busy)):
            late = self.latencies(halves)
            p50, p99, p999 = np.percentile(late, [50, 99, 99.9])
            yield {
                "": f"{name}, {title}",
                "requests": len(late),
                "p50 ms": float(p50),
                "p99 ms": float(p99),
                "p99.9 ms": float(p999),
                "max ms": float(late.max()),
                "changes": len(took) if title == "with" else 0,
                "s a change, median": float(np.median(took)) if title == "with" else 0.0,
                "s, most": max(took) if title == "with" else 0.0,
            }


def capacity(side: Side, rows: int, load: list[str], workers: int = 0) -> float:
    """Requests a second of closed loops: of several runs the fewest, which the machine always manages."""
    callers = max(CALLERS, 4 * workers)
    found = []
    for _ in range(CAPACITY_RUNS):
        time.sleep(CAPACITY_PAUSE_S)
        made = kinds(rows, ours=side.name == "hps")
        with open_load(side.address, made, 0, connections=callers, prefix=load) as running:
            time.sleep(CAPACITY_S)
        ends = np.sort(running.records["end"])
        found.append(len(ends) / (ends[-1] - running.records["sent"].min()) * 1e9)
    return min(found)


def measure(
    side: Side,
    rows: int,
    load: list[str],
    rounds: int,
    change: Callable[[Half], None],
    round_s: float = ROUND_S,
    workers: int = 0,
) -> Measured:
    """Alternate ``rounds`` halves without and with ``change``, which records what it changes."""
    measured, records = Measured(), []
    measured.capacities.append(capacity(side, rows, load, workers))
    made = kinds(rows, ours=side.name == "hps")
    with StolenTime() as others:
        for number in range(rounds):
            rate = SHARE * measured.capacities[-1]
            with open_load(side.address, made, rate, prefix=load, idle_s=side.idle_s) as running:
                time.sleep(1)
                quiet = Half(time.monotonic_ns())
                time.sleep(round_s)
                quiet.end = time.monotonic_ns()
                busy = Half(quiet.end)
                change(busy)
                time.sleep(SETTLE_S)  # the replaced version is freed
                busy.end = time.monotonic_ns()
            measured.disturbed = disturbed(others.windows)
            for half in (quiet, busy):
                half.disturbed = share_of(measured.disturbed, half.begin, half.end)
            measured.quiet.append(quiet)
            measured.busy.append(busy)
            measured.capacities.append(capacity(side, rows, load, workers))
            records.append(running.records)
            measured.error = measured.error or running.error
            measured.resources.append(side.resources())
            done = f"{side.name}: round {number + 1} of {rounds}, {rate:,.0f} requests/s"
            done += ", slower afterwards" if measured.slowed[-1] else ""
            taken = f", disturbed: {quiet.disturbed:.0%} without, {busy.disturbed:.0%} with changes"
            print(done + (taken if quiet.disturbed + busy.disturbed else ""), file=sys.stderr)
    measured.records = np.concatenate(records)
    return measured
