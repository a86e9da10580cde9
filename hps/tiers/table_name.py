"""Names of stored tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableName:
    """A table by its names in a store; ``version`` is 0 in the ``hps`` layout, which has no versions."""

    model: str
    version: int
    name: str
