"""Capacity planning: the number of rows that a cache keeps of each table."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hps.errors import ConfigError
from hps.types import EmbeddingTable

ROW_EXTRA_BYTES = 35
"""Bytes per row besides the vector: version, key, and its share of the buckets' overhead."""

TABLE_BYTES = 512
"""Bytes per table regardless of its rows, rounded up."""

EMPTY_TABLE_ROWS = 1024
"""Rows planned for an empty table: rows may be written later and must find a cache then."""

Rows = dict[EmbeddingTable, int]


def plan_capacity(
    table_rows: Mapping[EmbeddingTable, int],
    *,
    capacity_bytes: int,
    share: float | None = None,
    rows: Mapping[EmbeddingTable, int] | None = None,
    shares: Mapping[EmbeddingTable, float] | None = None,
) -> Rows:
    """Return each table's cache capacity in rows; 0 keeps a table out.

    ``table_rows``: the number of rows of each table; an empty one counts as ``EMPTY_TABLE_ROWS``.
    ``rows`` and ``shares`` fix the capacity of single tables, as a number or as a share of their rows;
    ``rows`` takes precedence. ``share`` gives every other table that share of its rows and ignores
    ``capacity_bytes``. Without ``share``, the other tables get the rest of ``capacity_bytes``, in
    proportion to their sizes. Raises ConfigError for contradictory values."""
    table_rows = {table: count or EMPTY_TABLE_ROWS for table, count in table_rows.items()}
    stated = dict(rows or {})
    for table, own_share in (shares or {}).items():
        stated.setdefault(table, math.ceil(own_share * table_rows.get(table, 0)))
    for table, count in stated.items():
        if count < 0:
            raise ConfigError(f"cache_rows of table {table.id} is {count}; 0 keeps it out")
        if table not in table_rows:
            raise ConfigError(f"cache_rows is set for {table.id}, a table this node does not serve")
    if share is not None and not 0 < share <= 1:
        raise ConfigError(f"share is {share}; it must be above 0 and at most 1")
    plan = dict(stated)
    others = [table for table in table_rows if table not in plan]
    if share is not None:
        return plan | {table: math.ceil(share * table_rows[table]) for table in others}
    stated_bytes = sum(slot_bytes(t) * n + TABLE_BYTES for t, n in plan.items() if n)
    budget = max(0, capacity_bytes - stated_bytes - TABLE_BYTES * len(others))
    total = sum(slot_bytes(table) * table_rows[table] for table in others)
    fraction = min(1.0, budget / total) if total else 0.0
    return plan | {table: int(fraction * table_rows[table]) for table in others}


def slot_bytes(table: EmbeddingTable) -> int:
    """Return the bytes that one row of capacity takes."""
    return table.row_bytes + ROW_EXTRA_BYTES
