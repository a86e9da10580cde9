"""A store that tests can block."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hps.tiers.base import FetchContext, Part, TierInfo
from hps.types import Source
from tests.support.memory_tier import MemoryTier


class GatedTier(MemoryTier):
    """A store whose fetches wait while ``gate`` is cleared; it is set at first.

    ``fetches``: how many have begun."""

    def __init__(self) -> None:
        super().__init__(TierInfo("rocksdb", Source.ROCKSDB, blocking=True))
        self.gate = threading.Event()
        self.gate.set()
        self.fetches = 0

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        self.fetches += 1
        assert self.gate.wait(60)
        super().fetch(parts, ctx)
