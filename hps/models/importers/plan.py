"""Import plan: which arrays of a source become which embedding table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hps.config.model_schema import ModelSpec
from hps.errors import ModelError
from hps.models.file_stamp import FileStamp
from hps.models.importers.arrays import (
    ArrayFile,
    StoredArray,
    block_rows,
    to_float32,
    to_keys,
)
from hps.types import KeyArray

Chunk = tuple[KeyArray, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class TableChoice:
    """One table to import, as the caller chose it.

    ``sources``: arrays, files or folders; several are stacked. ``keys``: an array or column; if None, the
    array paired with the vectors, else row numbers; for Parquet the only integer column. ``vectors``: the
    column, or a pattern of columns, of a Parquet file. An empty ``name`` is derived from the source."""

    name: str = ""
    sources: tuple[str, ...] = ()
    keys: str | None = None
    vectors: str | None = None

    @staticmethod
    def parse(text: str) -> TableChoice:
        """Parse ``NAME=SOURCE[,SOURCE...]``, or ``SOURCE`` alone."""
        name, equals, sources = text.rpartition("=")
        parts = tuple(part.strip() for part in sources.split(",") if part.strip())
        if not parts or (equals and not name.strip()):
            raise ModelError(f"table '{text}': expected NAME=SOURCE[,SOURCE...] or SOURCE")
        return TableChoice(name.strip(), parts)


@dataclass(frozen=True, slots=True)
class ImportTable:
    """One table to write.

    ``chunks``: each call starts a new read. ``parts``: the stacked sources, each with its first key.
    ``stamps``: stamps of the files that are read."""

    name: str
    dim: int
    rows: int
    chunks: Callable[[], Iterator[Chunk]]
    parts: tuple[tuple[str, int], ...] = ()
    stamps: tuple[FileStamp, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """The tables that a source has for one model. ``spec``: set if the source also describes the model."""

    source: Path
    format: str
    tables: tuple[ImportTable, ...]
    spec: ModelSpec | None = None


def table_name(source: str) -> str:
    """Return a valid table name: ``layers.users.weight`` -> ``layers_users``."""
    stem = re.sub(r"\.(weight|embedding|embeddings|table)$", "", source)
    return re.sub(r"[^a-zA-Z0-9_-]+", "_", stem).strip("_")[:120] or "table"


def tables_from_arrays(file: ArrayFile, choices: Sequence[TableChoice]) -> tuple[ImportTable, ...]:
    """Return the chosen tables of a file of arrays; without choices, those that are unambiguous.

    Unambiguous are pairs ``T.keys``/``T.vectors`` (or ``T_keys``/``T_vectors``), or the only matrix. If a
    choice names the vectors of such a pair and no keys, it gets the pair's keys."""
    expanded = [c for choice in choices for c in _expand(file, choice)] or _plain(file)
    names = [c.name for c in expanded]
    for name in names:
        if names.count(name) > 1:
            raise ModelError(f"{file.path}: two tables are called '{name}'; name them: NAME=ARRAY")
    return tuple(_table(file, choice) for choice in expanded)


def _expand(file: ArrayFile, choice: TableChoice) -> list[TableChoice]:
    """Replace a pattern by the matrices that match: one table each, or stacked if the choice has a name."""
    found: list[str] = []
    for source in choice.sources or (choice.name,):
        if any(c in source for c in "*?["):
            matches = [a.name for a in file.arrays.values() if fnmatchcase(a.name, source)]
            matches = [m for m in matches if file.arrays[m].is_matrix]
            if not matches:
                raise ModelError(
                    f"{file.path}: no matrix matches '{source}'; it holds "
                    f"{file.contents(matrices=True)}"
                )
            found += matches
        else:
            found.append(source)
    if choice.name:
        return [replace(choice, sources=tuple(found))]
    return [replace(choice, name=table_name(name), sources=(name,)) for name in found]


def _plain(file: ArrayFile) -> list[TableChoice]:
    pairs = [
        TableChoice(table_name(name[: -len("_vectors")]), (name,), keys)
        for name in file.arrays
        if (keys := _paired_keys(file, name)) is not None
    ]
    if pairs:
        return pairs
    if len(file.arrays) == 1 and all(a.is_matrix for a in file.arrays.values()):
        (only,) = file.arrays
        return [TableChoice(table_name(only), (only,))]
    raise ModelError(
        f"{file.path}: say which arrays are embedding tables, as in --table NAME=ARRAY; it holds "
        f"{file.contents(matrices=True)}"
    )


def _paired_keys(file: ArrayFile, name: str) -> str | None:
    """Return the name of the array of keys that is paired with the vectors ``name``, or None."""
    for vectors, keys in ((".vectors", ".keys"), ("_vectors", "_keys")):
        found = name.removesuffix(vectors) + keys
        if name.endswith(vectors) and found in file.arrays:
            return found
    return None


def _table(file: ArrayFile, choice: TableChoice) -> ImportTable:
    arrays = [file.get(source, f"table '{choice.name}'") for source in choice.sources]
    for array in arrays:
        if not array.is_matrix:
            raise ModelError(
                f"{file.path}: '{array.name}' cannot be table '{choice.name}': expected a matrix "
                f"(rows, dim) of floats, found {list(array.shape)} {array.dtype}"
            )
        if array.shape[1] != arrays[0].shape[1]:
            raise ModelError(
                f"{file.path}: table '{choice.name}' stacks {arrays[0]} and {array}, whose dims differ"
            )
    rows = sum(array.shape[0] for array in arrays)
    chosen = choice.keys or (_paired_keys(file, arrays[0].name) if len(arrays) == 1 else None)
    keys = None if chosen is None else file.get(chosen, f"the keys of '{choice.name}'")
    if keys is not None and not keys.is_keys:
        raise ModelError(
            f"{file.path}: '{keys.name}' cannot be keys: expected integers (rows,), found "
            f"{list(keys.shape)} {keys.dtype}"
        )
    if keys is not None and keys.shape[0] != rows:
        raise ModelError(
            f"{file.path}: table '{choice.name}': '{keys.name}' has {keys.shape[0]} keys, but there "
            f"are {rows} rows of vectors"
        )
    starts = np.cumsum([0, *(array.shape[0] for array in arrays)]).tolist()
    parts = tuple((a.name, start) for a, start in zip(arrays, starts, strict=False))
    return ImportTable(
        choice.name,
        arrays[0].shape[1],
        rows,
        lambda: _chunks(arrays, keys),
        parts if len(arrays) > 1 and keys is None else (),
        (FileStamp.of(file.path),),
    )


def _chunks(arrays: list[StoredArray], keys: StoredArray | None) -> Iterator[Chunk]:
    step = block_rows(arrays[0].shape[1])
    reader = None if keys is None else _KeyReader(keys, step)
    row = 0
    for array in arrays:
        for block in array.blocks(step):
            vectors = to_float32(array, block)
            n = len(vectors)
            k = np.arange(row, row + n) if reader is None else reader.take(n)
            yield k, vectors
            row += n


class _KeyReader:
    """Reads an array of keys in parts of any size."""

    def __init__(self, array: StoredArray, step: int) -> None:
        self._blocks = array.blocks(max(step, 1 << 16))
        self._left = np.empty(0, np.int64)

    def take(self, n: int) -> KeyArray:
        while len(self._left) < n:
            self._left = np.concatenate([self._left, to_keys(next(self._blocks))])
        taken, self._left = self._left[:n], self._left[n:]
        return taken
