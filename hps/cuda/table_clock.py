"""The clock of a table on the device: from it come the scores of rows, by which they are evicted."""

from __future__ import annotations

import time

import numpy as np

from hps.cuda.layout import (
    AGES_A_TURN,
    COUNT_BITS,
    POLICY_BITS,
    SCORE_MASK,
    TICKS_A_TURN,
    EvictionPolicy,
)


class TableClock:
    """Ticks ``ticks_a_turn`` times while the table admits ``capacity`` rows, its capacity.

    Epochs last ``epoch_s`` seconds, or until the caller advances them. Attributes may be read from any
    thread; the writer changes them. ``stamping``: the policy as fetch gets it, 0 if hits do not change
    scores. ``cell (1,) uint32``: `now`, where launches of the compiled core read it."""

    def __init__(
        self,
        policy: EvictionPolicy,
        capacity: int,
        ticks_a_turn: int = TICKS_A_TURN,
        epoch_s: float | None = None,
    ) -> None:
        self.policy = policy
        self._rows_a_tick = max(1, capacity // ticks_a_turn)
        self._epoch_s = epoch_s
        self._since = time.monotonic()
        self.stamping = 0 if policy is EvictionPolicy.SCORE else int(policy.rule)
        self.age = 0
        if policy.rule is EvictionPolicy.LRU:
            self.age = max(1, ticks_a_turn // AGES_A_TURN)
            self.stamping |= self.age << POLICY_BITS
        self._ticks = 1
        self._epoch = 0
        self._began = 0, 1
        self._admitted = 0
        self._has_epochs = policy in (EvictionPolicy.LFU, EvictionPolicy.EPOCH_LRU)
        self.cell = np.array([self.now], np.uint32)

    @property
    def ticks(self) -> int:
        """The ticks so far."""
        return self._ticks

    @ticks.setter
    def ticks(self, number: int) -> None:
        self._ticks = number
        self.publish()

    @property
    def epoch(self) -> int:
        """The number of the epoch, which the caller advances unless epochs end by time."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch = number
        self.publish()

    def admit(self, rows: int) -> None:
        """Count admitted rows."""
        ticks, self._admitted = divmod(self._admitted + rows, self._rows_a_tick)
        self.ticks += ticks

    def publish(self) -> None:
        """Update ``cell``: periodically and before fetches, if epochs end by time."""
        self.cell[0] = self.now

    @property
    def is_timed(self) -> bool:
        """Whether epochs end by time, so that `now` changes by itself."""
        return self._has_epochs and self._epoch_s is not None

    @property
    def now(self) -> int:
        """The 32-bit score after a hit: the ticks or, above `COUNT_BITS`, the epoch, with the ticks since
        it began if the policy uses them."""
        if not self._has_epochs:
            return self._ticks & SCORE_MASK
        if self._epoch_s is not None:
            self._epoch = int((time.monotonic() - self._since) / self._epoch_s)
        ticks = 0
        if self.policy is EvictionPolicy.EPOCH_LRU:
            if self._began[0] != self._epoch:
                self._began = self._epoch, self._ticks
            # One `age` is left free before the next epoch, so that its first hits do stamp.
            ticks = min(self._ticks - self._began[1], (1 << COUNT_BITS) - 1 - self.age)
        return (self._epoch << COUNT_BITS | ticks) & SCORE_MASK

    @property
    def first_score(self) -> int:
        """The score of a new row, unless the caller gives one."""
        by_time = self.policy.rule is EvictionPolicy.LRU
        return self.now if by_time else self.now + 1 if self.policy is EvictionPolicy.LFU else 0
