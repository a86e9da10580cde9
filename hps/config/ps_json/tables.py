"""The tables of a ``ps.json`` model: one per sparse file, or HPS's fused ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FUSED = re.compile(r"fused_embedding\d+")


def is_fused(table: str) -> bool:
    """True for the name of one of HPS's fused tables."""
    return _FUSED.fullmatch(table) is not None


@dataclass(frozen=True)
class PsTable:
    """A table with its rows in ``folders``; ``members``: their indices in the model's lists."""

    name: str
    dim: int
    default: float
    folders: tuple[Path, ...]
    members: tuple[int, ...]


def own_tables(
    names: Sequence[str], dims: Sequence[int], defaults: Sequence[float], folders: Sequence[Path]
) -> list[PsTable]:
    """One table per entry."""
    entries = enumerate(zip(names, dims, defaults, folders, strict=True))
    return [
        PsTable(name, dim, default, (folder,), (number,))
        for number, (name, dim, default, folder) in entries
    ]


def fused_tables(
    dims: Sequence[int], defaults: Sequence[float], folders: Sequence[Path]
) -> list[PsTable]:
    """One table per vector size, in ascending order.

    Order and names are those of `fuse_embedding_table_in_json_config` of HugeCTR 24.06; the last
    entry's default is the table's."""
    tables = []
    for number, dim in enumerate(sorted(set(dims))):
        members = tuple(i for i, each in enumerate(dims) if each == dim)
        rows = tuple(folders[i] for i in members)
        name = f"fused_embedding{number}"
        tables.append(PsTable(name, dim, defaults[members[-1]], rows, members))
    return tables
