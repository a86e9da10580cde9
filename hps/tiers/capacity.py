"""How many rows of each table a cache gets."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hps.errors import ConfigError
from hps.types import EmbeddingTable

SLOT_BYTES = 8 + 8 + 4 + 1
"""Key, version, stamp and state beside each row."""

HEAD_ROOM = 1.15
SPARE_ROWS = 16
"""A whole table of n rows finds room in n * HEAD_ROOM + SPARE_ROWS slots, but for a few rows in a
million. Without head room the buckets, filled at random, would turn away 2 % of the rows."""

EMPTY_TABLE_ROWS = 1024
"""What an empty table is planned as: rows may be written to it later, and must find a cache then."""

Rows = dict[EmbeddingTable, int]


def whole(rows: int) -> int:
    """The capacity at which a cache holds all of a table of ``rows`` rows."""
    return math.ceil(rows * HEAD_ROOM) + SPARE_ROWS


def plan_capacity(
    table_rows: Mapping[EmbeddingTable, int],
    *,
    capacity_bytes: int,
    share: float | None = None,
    rows: Mapping[EmbeddingTable, int] | None = None,
    shares: Mapping[EmbeddingTable, float] | None = None,
) -> Rows:
    """The capacity of each table's cache in rows; 0 keeps a table out.

    ``table_rows`` are the rows each table has; an empty one counts as ``EMPTY_TABLE_ROWS``. ``rows``
    states the capacity of some tables, ``shares`` that of others as a share of their rows; they come
    first. ``share`` gives every other table that share of its rows, whatever it costs. Without it, what
    those leave of ``capacity_bytes`` is shared out by the tables' sizes. A table that may keep all of
    its rows gets the head room it needs for that; shares never exceed it. Raises ConfigError for
    what can't be meant.
    """
    table_rows = {table: count or EMPTY_TABLE_ROWS for table, count in table_rows.items()}
    stated = dict(rows or {})
    for table, part in (shares or {}).items():
        stated.setdefault(table, math.ceil(part * table_rows.get(table, 0)))
    for table, count in stated.items():
        if count < 0:
            raise ConfigError(f"cache_rows of table {table.id} is {count}; 0 keeps it out")
        if table not in table_rows:
            raise ConfigError(f"cache_rows is set for {table.id}, a table this node does not serve")
    if share is not None and not 0 < share <= 1:
        raise ConfigError(f"share is {share}; it must be above 0 and at most 1")
    plan = {table: _with_head_room(count, table_rows[table]) for table, count in stated.items()}
    others = [table for table in table_rows if table not in plan]
    if share is not None:
        return plan | {
            t: _with_head_room(math.ceil(share * table_rows[t]), table_rows[t]) for t in others
        }
    budget = max(0, capacity_bytes - sum(slot_bytes(t) * n for t, n in plan.items()))
    needs = {table: whole(table_rows[table]) for table in others}
    total = sum(slot_bytes(table) * need for table, need in needs.items())
    fraction = min(1.0, budget / total) if total else 0.0
    return plan | {table: int(fraction * need) for table, need in needs.items()}


def slot_bytes(table: EmbeddingTable) -> int:
    """What one row of capacity costs."""
    return table.row_bytes + SLOT_BYTES


def _with_head_room(capacity: int, rows: int) -> int:
    """Head room on top when all rows are meant to fit."""
    return max(capacity, whole(rows)) if capacity >= max(1, rows) else capacity
