"""Load balancing: the choice of the node for a lookup."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol

import grpc

from hps.lookup.remote.lookup_node import LookupNode


class NodePicker(Protocol):
    """Picks the node for a lookup. Thread-safe; must not block."""

    def pick(self, among: Sequence[LookupNode]) -> LookupNode:
        """Pick one of ``among``, a non-empty list of nodes that serve the model and were not tried yet."""
        ...

    def record(self, target: LookupNode, code: grpc.StatusCode, seconds: float) -> None:
        """Record that ``target`` ended a lookup with ``code`` after ``seconds``."""
        ...


class LeastBusy:
    """Picks the node with the fewest lookups in flight; round-robin among equals."""

    def __init__(self) -> None:
        self._turn = count()

    def pick(self, among: Sequence[LookupNode]) -> LookupNode:
        first = next(self._turn) % len(among)
        return min((*among[first:], *among[:first]), key=lambda target: target.in_flight)

    def record(self, target: LookupNode, code: grpc.StatusCode, seconds: float) -> None:
        pass
