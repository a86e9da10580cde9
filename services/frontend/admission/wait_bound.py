"""Expected wait of a request in an admission queue, and the longest wait that is allowed.

In an overload the bound shrinks, as CoDel's does. A queue that is always full only delays: every request
waits for as long as the bound allows. Clients that wait no longer than that have given up before their
request starts or ends, so the server would be busy with requests that no client waits for."""

from __future__ import annotations

import time

# Weight of the latest duration in the average.
_LATEST_WEIGHT = 0.1
# In an overload, a request may wait for the duration of this many. If requests take equally long and
# arrive at random, at 0.8 of the capacity, 0.3 % would wait longer.
_TURNS = 10
_LEAST_S = 0.005


class WaitEstimate:
    """Estimates when running requests end, from the duration of others. Changed under the queue's lock."""

    def __init__(self, slots: int) -> None:
        """``slots``: concurrent requests."""
        self.slots = slots
        # Start times of running requests. The end of any request removes the first one: mostly it is the
        # right one, and the sum of the durations is the same.
        self.begun: list[float] = []
        self.work_s = 0.0
        """Duration of one request."""
        self.turn_s = 0.0
        """The same including those that complete when they begin, as queued ones may."""

    def begin(self) -> None:
        self.begun.append(time.monotonic())

    def end(self) -> None:
        took_s = time.monotonic() - self.begun.pop(0)
        self.work_s += _LATEST_WEIGHT * (took_s - self.work_s)
        self.turn_s += _LATEST_WEIGHT * (took_s - self.turn_s)

    def end_immediately(self) -> None:
        """End the request that began last; it took no time."""
        self.begun.pop()
        self.turn_s -= _LATEST_WEIGHT * self.turn_s

    def wait_s(self, ahead: int) -> float:
        """Expected wait of a request behind ``ahead`` others in the queue."""
        begun = (*self.begun,)  # a copy: other threads end requests meanwhile
        ahead -= max(0, self.slots - len(begun))
        if ahead < 0:
            return 0.0
        rounds, place = divmod(ahead, self.slots)
        left_s = self.work_s  # the request is about to begin
        if place < len(begun):
            left_s = max(0.0, begun[place] + self.work_s - time.monotonic())
        return left_s + rounds * self.turn_s


class WaitBound:
    """The longest allowed wait: ``longest_s``; in an overload, the duration of ``_TURNS`` requests.

    It shrinks when a request is rejected for its wait, or cancelled. It doubles whenever a slot is free and
    no request is queued. Thread-safe: a race only adds or loses a step."""

    def __init__(self, longest_s: float, estimate: WaitEstimate) -> None:
        self._longest_s = self.now_s = longest_s
        self._estimate = estimate

    def allows(self, wait_s: float) -> bool:
        """True if a request may wait so long. If not, the bound shrinks."""
        if wait_s <= self.now_s:
            return True
        self.shrink(wait_s)
        return False

    def shrink(self, wait_s: float) -> None:
        """Count a request that is not answered after waiting ``wait_s``. Short waits are no overload."""
        known = self._estimate
        short_s = max(_LEAST_S, known.work_s + _TURNS * known.turn_s / known.slots)
        if wait_s > short_s:
            self.now_s = min(short_s, self._longest_s)

    def relax(self) -> None:
        """Grow the bound: a slot is free and no request is queued."""
        if self.now_s < self._longest_s:
            self.now_s = min(2 * self.now_s, self._longest_s)
