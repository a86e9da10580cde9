"""TableName: a table's identity in a store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableName:
    """A table's model, version and name; ``version`` is 0 in the ``hps`` layout, which has none."""

    model: str
    version: int
    name: str
