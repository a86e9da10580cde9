"""Rounds of requests at a share of a server's capacity; in each, times without and with changes alternate.

A shared machine is a third slower for seconds, so each change is compared with the seconds before it."""

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

SHARE, CALLERS, QUIET_S, SETTLE_S = 0.7, 8, 3.0, 0.3
CAPACITY_RUNS, CAPACITY_S, CAPACITY_PAUSE_S = 3, 1.0, 0.5
MOST_DISTURBED = 0.5
"""Of a half's time: a pair with more in one of its halves is not judged."""
STEADY = 0.9
"""Of the capacity before a round, the least after it: else the load was too high for a slower machine."""


@dataclass
class Half:
    """The time before a change or that of the change, from ``begin`` to ``end`` (`time.monotonic_ns`).

    ``disturbed``: the share of its time in which other machines of the host took the processors."""

    begin: int
    end: int = 0
    changes: list[tuple[int, int, int]] = field(default_factory=list)  # begin, end, version
    disturbed: float = 0.0


@dataclass
class Measured:
    """Pairs of halves, without a change and with one, ``pairs`` a round; all rounds' answers."""

    pairs: int = 1
    quiet: list[Half] = field(default_factory=list)
    busy: list[Half] = field(default_factory=list)
    records: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    resources: list[dict[str, float]] = field(default_factory=list)  # after each round
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
        """The pairs of mostly calm times in steady rounds, and the answers that were due in calm times."""
        kept = [
            i
            for i, halves in enumerate(zip(self.quiet, self.busy, strict=True))
            if max(half.disturbed for half in halves) <= MOST_DISTURBED
            and not self.slowed[i // self.pairs]
        ]
        found = Measured(quiet=[self.quiet[i] for i in kept], busy=[self.busy[i] for i in kept])
        times = [(half.begin, half.end) for half in (*found.quiet, *found.busy)]
        due = self.records["due"]
        found.records = self.records[inside(times, due) & ~inside(self.disturbed, due)]
        found.error = self.error
        return found

    def ratio(self, percent: float) -> float:
        """The median over the pairs of a percentile with the change / without."""
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
        """A percentile of all answers, with changes / without."""
        busy, quiet = (np.percentile(self.latencies(h), percent) for h in (self.busy, self.quiet))
        return float(busy / quiet)

    @property
    def failed(self) -> int:
        """Errors, and answers with defaults in place of rows, which the server flags as degraded."""
        return int(self._failures.sum())

    @property
    def _failures(self) -> NDArray[np.bool_]:
        failures: NDArray[np.bool_] = self.records["status"] != 200
        return failures | (self.records["wrong"] == 2)

    def failed_in(self, halves: list[Half]) -> int:
        """Those of requests that were due in ``halves``."""
        times = [(half.begin, half.end) for half in halves]
        return int((self._failures & inside(times, self.records["due"])).sum())

    @property
    def mixed(self) -> int:
        return int((self.records["wrong"] == 1).sum())

    @property
    def stale(self) -> int:
        """Answers of another version than the current one to requests due after a change, before the next."""
        due, value, count = self.records["due"], self.records["value"], 0
        answered = (self.records["status"] == 200) & (self.records["wrong"] == 0)
        changes = [change for half in self.busy for change in half.changes]
        begins = [begin for begin, _, _ in changes[1:]] + [self.busy[-1].end]
        for (_, end, version), until in zip(changes, begins, strict=True):
            others = answered & (due > end) & (due < until) & (value != version)
            count += int(others.sum())
        return count

    def growth(self, what: str) -> tuple[float, float]:
        """The highest of ``what`` in the first and in the last quarter of the rounds."""
        values = [each[what] for each in self.resources]
        n = max(1, len(values) // 4)
        return max(values[:n]), max(values[-n:])

    def slower(self) -> float:
        """p50 without changes: the last quarter of the pairs / the first."""
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
                "failed": self.failed_in(halves),
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
    pairs: int,
    change: Callable[[Half], None],
    quiet_s: float = QUIET_S,
    workers: int = 0,
) -> Measured:
    """Measure ``rounds`` of ``pairs``: ``quiet_s``, then ``change``, which records what it changes."""
    measured, records = Measured(pairs), []
    measured.capacities.append(capacity(side, rows, load, workers))
    made = kinds(rows, ours=side.name == "hps")
    with StolenTime() as others:
        for number in range(rounds):
            rate = SHARE * measured.capacities[-1]
            with open_load(side.address, made, rate, prefix=load, idle_s=side.idle_s) as running:
                time.sleep(1)
                halves = [_pair(quiet_s, change) for _ in range(pairs)]
            measured.disturbed = disturbed(others.windows)
            for half in itertools.chain.from_iterable(halves):
                half.disturbed = share_of(measured.disturbed, half.begin, half.end)
            measured.quiet += [quiet for quiet, _ in halves]
            measured.busy += [busy for _, busy in halves]
            measured.capacities.append(capacity(side, rows, load, workers))
            records.append(running.records)
            measured.error = measured.error or running.error
            measured.resources.append(side.resources())
            done = f"{side.name}: round {number + 1} of {rounds}, {rate:,.0f} requests/s"
            done += ", slower afterwards" if measured.slowed[-1] else ""
            if taken := float(np.mean([half.disturbed for pair in halves for half in pair])):
                done += f", disturbed: {taken:.0%} of the time"
            print(done, file=sys.stderr)
    measured.records = np.concatenate(records)
    return measured


def _pair(quiet_s: float, change: Callable[[Half], None]) -> tuple[Half, Half]:
    quiet = Half(time.monotonic_ns())
    time.sleep(quiet_s)
    quiet.end = time.monotonic_ns()
    busy = Half(quiet.end)
    change(busy)
    time.sleep(SETTLE_S)  # the replaced version is freed
    busy.end = time.monotonic_ns()
    return quiet, busy
