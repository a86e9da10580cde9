"""Which tables share the arrays of a GPU cache: versions of a table with the same base file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.config.schema import Settings
from hps.cuda.layout import MOST_MEMBERS
from hps.models.mapped_file import MAPPED_FILE
from hps.models.tables import TableFiles
from hps.node.gpu_plan import plan_of_settings
from hps.node.stores import NodeStores
from hps.tiers.gpu.plan import Plan
from hps.types import EmbeddingTable, KeyArray

Joins = dict[EmbeddingTable, EmbeddingTable]
"""By table: the one whose arrays it uses."""


def may_share(settings: Settings) -> bool:
    """Whether the stores know which rows are those of a base file: no other process writes them."""
    tiers = settings.tiers
    store = tiers.rocksdb
    alone = tiers.redis is None and store.access != "secondary"
    return alone and tiers.mapped.enabled and (store.layout == "native" or not store.enabled)


def common_rows(
    stores: NodeStores, table: EmbeddingTable, keys: KeyArray
) -> tuple[NDArray[np.bool_], int]:
    """Return of which ``keys (n,)`` the row is that of the table's base file (n,), and its version.

    Every table with the same base has such a row, unless a delta or overlay has another. Of no key for a
    table without a `NodeStores.direct_file`."""
    mapped = stores.direct_file(table)
    if mapped is None:
        return np.zeros(len(keys), bool), 0
    return mapped.answers_directly(keys), mapped.version


def find_joins(files: Mapping[EmbeddingTable, TableFiles], held: Plan) -> Joins:
    """Choose for tables that are not ``held`` another one, held or among them, whose arrays they can use.

    Only their ``files`` are compared; `can_join` says if a plan permits it."""
    groups: dict[EmbeddingTable, set[EmbeddingTable]] = {}  # by the owner of the arrays
    for table, planned in held.items():
        groups.setdefault(planned.shared_with or table, set()).add(table)
    owners: dict[tuple[Any, ...], list[EmbeddingTable]] = {}
    joins: Joins = {}
    for table in sorted(files, key=lambda t: t not in held):  # those that have arrays first
        base = _base_of(files[table])
        if base is None:
            continue
        alike = table.model, table.name, base, table.dim, table.dtype, table.key_bits
        known = owners.setdefault(alike, [])
        if table in held:
            owner = held[table].shared_with or table
        else:
            owner = next((o for o in known if len(groups[o]) < MOST_MEMBERS), table)
            groups.setdefault(owner, set()).add(table)
            if owner is not table:
                joins[table] = owner
        if owner not in known:
            known.append(owner)
    return joins


def plan_shared(
    settings: Settings,
    files: Mapping[EmbeddingTable, TableFiles],
    joins: Joins,
    free_bytes: int | None = None,
) -> Plan:
    """Plan all tables of ``files``, of which some may use arrays of others; see `plan_of_settings`."""
    rows = {table: each.rows for table, each in files.items()}
    joined = dict(rows)
    for table, owner in joins.items():
        joined[owner] += rows_of_own(files[table])
        del joined[table]
    plan = plan_of_settings(settings, joined, free_bytes)
    possible = {table: owner for table, owner in joins.items() if can_join(plan, owner)}
    if len(possible) < len(joins):
        unable = {table: rows[table] for table in joins if table not in possible}
        plan = plan_of_settings(settings, {**joined, **unable}, free_bytes)
    return with_joins(plan, possible, {})


def rows_of_own(files: TableFiles) -> int:
    """The number of rows that a table has beside those of its base."""
    return sum(pair.rows for pair in files.pairs[1:])


def _base_of(files: TableFiles) -> str | None:
    """The digest of the base's rows; None for a table that is not mapped."""
    mapped = all((pair.folder / MAPPED_FILE).is_file() for pair in files.pairs)
    return files.pairs[0].digest if mapped else None


def can_join(plan: Plan, owner: EmbeddingTable) -> bool:
    """Whether other tables can use the planned arrays of ``owner``."""
    planned = plan.get(owner)
    shape = None if planned is None or planned.static else planned.shape(owner)
    return shape is not None and shape.has_members


def with_joins(plan: Plan, joins: Joins, held: Plan) -> Plan:
    """Return ``plan`` with the tables that use arrays of the planned ones or of ``held``."""
    known = held | plan
    shared = {table: replace(known[owner], shared_with=owner) for table, owner in joins.items()}
    return plan | shared


def without(plan: Plan, tables: Collection[EmbeddingTable]) -> Plan:
    """Return ``plan`` without ``tables``; arrays that others still use belong to one of these."""
    kept = {table: planned for table, planned in plan.items() if table not in tables}
    for owner in tables:
        heirs = [table for table, planned in kept.items() if planned.shared_with == owner]
        for table in heirs:
            kept[table] = replace(kept[table], shared_with=None if table is heirs[0] else heirs[0])
    return kept
