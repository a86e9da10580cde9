"""Mapped files that a node reads from memory: those of the settings, and those that a plan may choose."""

from __future__ import annotations

from collections.abc import Mapping

from hps.node.cpu_cache_plan import changed_rows, is_cached, plan_rows
from hps.node.mapped_memory import fitting_tables, memory_budget
from hps.tools.plan.allocation import Allocation
from hps.tools.plan.model import PlannedModel

Tables = tuple[str, ...]
_MOST_CHOICES = 16


def memory_choices(files: Mapping[str, int]) -> list[Tables]:
    """Return the tables that a node reads from memory with growing `tiers.mapped.memory_bytes`.

    ``files``: the bytes of each table's file, in the node's order. At first no table, at last all; at most
    some 16 others, which have at least a sixteenth of all bytes more each."""
    total = sum(files.values())
    choices: list[Tables] = [()]
    used = 0
    while used < total:
        budget = max(used + _shortfall(files, used), used + total // _MOST_CHOICES)
        choices.append(tuple(fitting_tables(files, budget)))
        used = sum(files[name] for name in choices[-1])
    return choices


def _shortfall(files: Mapping[str, int], budget: int) -> int:
    """The fewest bytes that ``budget`` lacks for one more table."""
    found = []
    for size in files.values():
        if size <= budget:
            budget -= size
        else:
            found.append(size - budget)
    return min(found)


def configured_memory(model: PlannedModel) -> tuple[Allocation, Tables]:
    """Return the settings' CPU cache, in rows by table, and the tables that are read from mapped files.

    By the rules of a start (`NodeCaches`), with the memory limit of this machine."""
    if not model.settings.tiers.cpu_cache.enabled:
        return {}, ()
    tables = {name: planned.table for name, planned in model.tables.items()}
    budget, files = memory_budget(model.settings), model.direct_files()
    files = {n: size for n, size in files.items() if is_cached(model.settings, tables[n])}
    fitting = {tables[name] for name in fitting_tables(files, budget)}
    planned = {tables[name]: each.rows for name, each in model.tables.items()}
    rows = {
        # Memory for changed rows is taken as they arrive.
        table.name: min(n, changed_rows(planned[table])) if table in fitting else n
        for table, n in plan_rows(model.settings, planned, fitting).items()
    }
    # A table without capacity in the cache is read through the stores.
    cached = {name: size for name, size in files.items() if rows[name]}
    return rows, tuple(fitting_tables(cached, budget))
