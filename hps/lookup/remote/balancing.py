"""Which node a lookup goes to: the seam for balancing and for leaving out those that fail."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol

import grpc

from hps.lookup.remote.lookup_node import LookupNode


class NodePicker(Protocol):
    """May be called from any thread; must not wait."""

    def pick(self, among: Sequence[LookupNode]) -> LookupNode:
        """One of ``among``, which is not empty: nodes that serve the model and were not tried yet."""
        ...

    def answered(self, target: LookupNode, code: grpc.StatusCode, seconds: float) -> None:
        """``target`` answered a lookup so, after ``seconds``."""
        ...


class LeastBusy:
    """The node with the fewest lookups under way; of several, each in turn."""

    def __init__(self) -> None:
        self._turn = count()

    def pick(self, among: Sequence[LookupNode]) -> LookupNode:
        first = next(self._turn) % len(among)
        return min((*among[first:], *among[:first]), key=lambda target: target.in_flight)

    def answered(self, target: LookupNode, code: grpc.StatusCode, seconds: float) -> None:
        pass
