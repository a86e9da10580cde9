"""Comparison of two row sources, table by table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hps.rows.base import RowSource, StoredKeys, TableRows
from hps.types import EmbeddingTable, KeyArray, Progress

Kind = Literal["missing", "deleted", "older", "newer", "other", "extra"]
KINDS: tuple[Kind, ...] = ("missing", "deleted", "older", "newer", "other", "extra")
"""Kinds of difference of a row, seen from ``store``: missing; a tombstone; an older version; a newer version;
another vector with the same version (or without versions); extra, only in ``store``."""
EXAMPLES = 10


@dataclass(slots=True)
class TableDifference:
    """The differences of one table between two sources.

    ``compared``: the number of compared rows of the other source; ``equal``: of those without a
    difference. ``counts``: rows per kind of difference; ``examples``: the first keys of each kind.
    ``sampled``: only some rows were compared."""

    table: str
    sampled: bool = False
    compared: int = 0
    equal: int = 0
    counts: Counter[Kind] = field(default_factory=Counter)
    examples: dict[Kind, list[int]] = field(default_factory=dict)

    def differs(self, ignored: Iterable[str] = ()) -> bool:
        return any(n for kind, n in self.counts.items() if kind not in set(ignored))

    def _note(self, kind: Kind, keys: KeyArray) -> None:
        if len(keys):
            self.counts[kind] += len(keys)
            examples = self.examples.setdefault(kind, [])
            examples += keys[: EXAMPLES - len(examples)].tolist()


def compare(
    store: RowSource,
    against: RowSource,
    table: EmbeddingTable,
    progress: Progress,
    *,
    other: EmbeddingTable | None = None,
    sample: KeyArray | None = None,
) -> TableDifference:
    """Compare ``store`` with ``against``, which may have another object for the table (``other``).

    ``sample (n,)``: compare only these keys of the table; about as many rows of ``store`` are looked up
    in ``against``. Takes a few hundred MB at most. Rows that are written during the comparison may or may
    not be reported."""
    difference = compare_present(store, against, table, progress, other=other, sample=sample)
    total = store.entries(table) if sample is None else len(sample)
    here = store.scan(table) if sample is None else store.sample(table, sample)
    with progress.task(f"searching rows of {table.name} that only the store has", total) as step:
        for keys in against.missing_keys(other or table, _keys(here, step)):
            difference._note("extra", keys)
    return difference


def compare_present(
    store: RowSource,
    against: RowSource,
    table: EmbeddingTable,
    progress: Progress,
    *,
    other: EmbeddingTable | None = None,
    sample: KeyArray | None = None,
) -> TableDifference:
    """Do as `compare`, but do not search for rows that only ``store`` has."""
    other = other or table
    difference = TableDifference(table.name, sampled=sample is not None)
    theirs = against.scan(other) if sample is None else against.sample(other, sample)
    versioned = store.versioned and against.versioned
    total = against.entries(other) if sample is None else len(sample)
    with progress.task(f"comparing {table.name}", total) as step:
        for rows in theirs:
            ours = store.get(table, rows.keys)
            _compare(difference, rows, ours, versioned=versioned, uniform=against.uniform)
            step(len(rows.keys))
    return difference


def _keys(parts: Iterable[TableRows], step: Callable[[int], None]) -> Iterator[KeyArray]:
    for rows in parts:
        yield rows.keys
        step(len(rows.keys))


def _compare(
    difference: TableDifference,
    theirs: TableRows,
    ours: StoredKeys,
    *,
    versioned: bool,
    uniform: bool,
) -> None:
    """Record the differences of ``ours`` from ``theirs``, which have the same keys."""
    same = ours.found.copy()
    same[same] = same_bits(theirs.vectors[same], ours.vectors[same])
    dated = ours.found & versioned & ~(same & uniform)
    older = dated & (ours.versions < theirs.versions)
    newer = dated & (ours.versions > theirs.versions)
    equal = same & ~older & ~newer
    difference.compared += len(theirs.keys)
    difference.equal += int(equal.sum())
    difference._note("missing", theirs.keys[~ours.found & ~ours.deleted])
    difference._note("deleted", theirs.keys[ours.deleted])
    difference._note("older", theirs.keys[older])
    difference._note("newer", theirs.keys[newer])
    difference._note("other", theirs.keys[ours.found & ~equal & ~older & ~newer])


def same_bits(one: NDArray[np.generic], other: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Return a mask (n,) of the equal rows of two arrays (n, dim) of one dtype: equal bits, NaN included."""
    kind = f"u{one.dtype.itemsize}"
    equal: NDArray[np.bool_] = (
        np.ascontiguousarray(one).view(kind) == np.ascontiguousarray(other).view(kind)
    ).all(axis=1)
    return equal
