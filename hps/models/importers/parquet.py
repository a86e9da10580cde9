"""Parquet: one file per table, or a folder of part files; read in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hps.errors import ModelError
from hps.models.file_stamp import FileStamp
from hps.models.importers.arrays import block_rows
from hps.models.importers.plan import Chunk, ImportPlan, ImportTable, TableChoice, table_name
from hps.types import KeyArray, as_keys

_BUFFER_BYTES = 1 << 20


def plan_parquet(path: Path, choices: Sequence[TableChoice]) -> ImportPlan:
    """Plan from a Parquet file, or from a folder with a Parquet file per table.

    Keys: the chosen column, else the only integer column. Vectors: the chosen columns, else the only list
    column, else all float columns in order."""
    if not choices:
        files = [path] if path.is_file() else sorted(path.glob("*.parquet"))
        if not files:
            raise ModelError(f"{path}: no .parquet file in it")
        choices = [TableChoice(table_name(f.stem), (str(f),)) for f in files]
    tables = tuple(_table(path, choice) for choice in choices)
    return ImportPlan(path, "parquet", tables)


def _table(path: Path, choice: TableChoice) -> ImportTable:
    files = _files(path, choice)
    stamps = tuple(FileStamp.of(file) for file in files if file.exists())
    name = choice.name or table_name(files[0].stem)
    opened = [_open(file) for file in files]
    schema = opened[0].schema_arrow
    for file, parquet in zip(files, opened, strict=True):
        if not parquet.schema_arrow.equals(schema):
            raise ModelError(f"{file}: its columns differ from those of {files[0]}")
    key = _key_column(files[0], schema, choice.keys)
    columns = _vector_columns(files[0], schema, key, choice.vectors)
    rows = sum(parquet.metadata.num_rows for parquet in opened)
    dim = len(columns)
    if _is_list(schema.field(columns[0]).type):
        dim = _list_dim(files[0], opened, schema.field(columns[0]))
    for parquet in opened:
        parquet.close()
    return ImportTable(name, dim, rows, _reader(files, key, columns, dim), stamps=stamps)


def _files(path: Path, choice: TableChoice) -> list[Path]:
    if not choice.sources and path.is_file():
        return [path]
    found: list[Path] = []
    for source in choice.sources or (f"{choice.name}.parquet",):
        found_at = path / source if (path / source).exists() else Path(source)
        if not found_at.exists() and path.is_file():
            raise ModelError(f"{found_at} is missing")
        parts = sorted(found_at.glob("*.parquet")) if found_at.is_dir() else [found_at]
        if not parts:
            raise ModelError(f"{found_at}: no .parquet file in it")
        found += parts
    return found


def _open(file: Path) -> pq.ParquetFile:
    # With a buffer, a row group's columns are not read whole. The file is not mapped: a mapped file that is
    # shortened ends the process.
    try:
        return pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except FileNotFoundError:
        raise ModelError(f"{file} is missing") from None
    except (OSError, pa.ArrowException) as error:
        raise ModelError(f"{file} is not a readable Parquet file: {error}") from error


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        (
            pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        )
        and pa.types.is_floating(kind.value_type)
    )


def _key_column(file: Path, schema: pa.Schema, chosen: str | None) -> str:
    integers = [f.name for f in schema if pa.types.is_integer(f.type)]
    if chosen is not None:
        if chosen not in schema.names:
            raise ModelError(f"{file}: no column '{chosen}'; it has {', '.join(schema.names)}")
        if chosen not in integers:
            raise ModelError(
                f"{file}: column '{chosen}' is {schema.field(chosen).type}; keys must be integers"
            )
        return chosen
    if len(integers) != 1:
        raise ModelError(
            f"{file}: say which column holds the keys, as in --keys TABLE=COLUMN; integer columns: "
            f"{', '.join(integers) or 'none'}"
        )
    return str(integers[0])


def _vector_columns(file: Path, schema: pa.Schema, key: str, chosen: str | None) -> list[str]:
    lists = [f.name for f in schema if _is_list(f.type)]
    floats = [f.name for f in schema if pa.types.is_floating(f.type)]
    if chosen is not None:
        lists = [n for n in lists if fnmatchcase(n, chosen)]
        floats = [n for n in floats if fnmatchcase(n, chosen)]
    if len(lists) == 1 and not (chosen is None and floats):
        return lists
    if floats and not lists:
        return floats
    others = [f"{f.name} ({f.type})" for f in schema if f.name != key]
    raise ModelError(
        f"{file}: say which columns hold the vectors, as in --vectors TABLE=PATTERN: one list column, or "
        f"columns of floats; it has {', '.join(others) or 'none'}"
    )


def _list_dim(file: Path, opened: list[pq.ParquetFile], field: Any) -> int:
    if pa.types.is_fixed_size_list(field.type):
        return int(field.type.list_size)
    for parquet in opened:
        for batch in parquet.iter_batches(1, columns=[field.name]):
            first = batch.column(0)[0].as_py()
            if first:
                return len(first)
    raise ModelError(f"{file}: column '{field.name}' has no vector that shows the dim")


def _reader(
    files: list[Path], key: str, columns: list[str], dim: int
) -> Callable[[], Iterator[Chunk]]:
    def chunks() -> Iterator[Chunk]:
        for file in files:
            row = 0
            parquet = _open(file)
            try:
                for batch in parquet.iter_batches(
                    block_rows(dim), columns=[key, *columns], use_threads=False
                ):
                    where = f"{file}: rows {row} to {row + batch.num_rows - 1}"
                    yield _keys(where, key, batch.column(key)), _vectors(where, batch, columns, dim)
                    row += batch.num_rows
            except (OSError, pa.ArrowException) as error:
                raise ModelError(f"{file}: damaged after row {row}: {error}") from error
            finally:
                parquet.close()

    return chunks


def _keys(where: str, name: str, column: Any) -> KeyArray:
    if column.null_count:
        raise ModelError(f"{where}: {column.null_count} keys in column '{name}' are null")
    return as_keys(column.to_numpy(zero_copy_only=False))


def _vectors(where: str, batch: pa.RecordBatch, columns: list[str], dim: int) -> NDArray[Any]:
    for name in columns:
        if batch.column(name).null_count:
            raise ModelError(
                f"{where}: {batch.column(name).null_count} vectors in column '{name}' are null"
            )
    first: Any = batch.column(columns[0])
    with np.errstate(over="ignore"):
        if not _is_list(first.type):
            out = np.empty((batch.num_rows, dim), np.float32)
            for i, name in enumerate(columns):
                out[:, i] = batch.column(name).to_numpy(zero_copy_only=False)
            return out
        if not pa.types.is_fixed_size_list(first.type):
            lengths = np.diff(first.offsets.to_numpy())
            if (lengths != dim).any():
                raise ModelError(
                    f"{where}: a vector in column '{columns[0]}' has {lengths[lengths != dim][0]} "
                    f"values, expected {dim}"
                )
        values = first.flatten()
        if values.null_count:
            raise ModelError(
                f"{where}: {values.null_count} values in column '{columns[0]}' are null"
            )
        flat: NDArray[Any] = values.to_numpy(zero_copy_only=False)
        return flat.reshape(-1, dim).astype(np.float32, copy=False)
