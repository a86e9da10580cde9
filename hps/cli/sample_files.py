"""Read samples and write scores: Parquet, CSV, TSV and JSONL in batches; npz for scores only.

Only one batch is in memory at a time. The scores appear under their final name when all of them
are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hps.errors import BadRequest, ConfigError

INPUTS = (".parquet", ".csv", ".tsv", ".jsonl")
OUTPUTS = (".parquet", ".csv", ".jsonl", ".npz")


def open_reader(path: Path, names: tuple[str, ...], header: Sequence[str] = ()) -> SampleReader:
    """Open a file of samples; its batches are columns, with the progress of each.

    ``names``: the columns to read; a missing one is an error that lists the existing ones. ``header``:
    the names of all columns of a CSV or TSV file without a header line."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    kinds: dict[str, Callable[[Path, tuple[str, ...]], SampleReader]] = {
        ".parquet": ParquetReader,
        ".csv": partial(CsvReader, delimiter=",", header=header),
        ".tsv": partial(CsvReader, delimiter="\t", header=header),
        ".jsonl": JsonlReader,
    }
    suffix = path.suffix.lower()
    if suffix not in kinds:
        raise ConfigError(f"{path}: unknown format; name it one of *{', *'.join(INPUTS)}")
    if header and suffix not in (".csv", ".tsv"):
        raise ConfigError(f"--columns names the columns of .csv and .tsv files, not of {path.name}")
    try:
        return kinds[suffix](path, names)
    except (pa.ArrowInvalid, OSError) as error:
        raise BadRequest(f"{path}: {error}") from None


def read(reader: SampleReader, path: Path, size: int) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield the reader's batches; a damaged file raises an error that names it."""
    try:
        yield from reader.batches(size)
    except (pa.ArrowInvalid, OSError) as error:
        raise BadRequest(f"{path}: {error}") from None


def _check_columns(
    path: Path, names: tuple[str, ...], present: list[str], remedy: str = ""
) -> None:
    missing = [name for name in names if name not in present]
    if missing:
        raise BadRequest(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(present)}. Columns are "
            f"named as the model's features and dense inputs{remedy}"
        )
    twice = [name for name in names if present.count(name) > 1]
    if twice:
        raise BadRequest(f"{path} has several columns {twice[0]}; rename all but one")


class ParquetReader:
    unit = "rows"

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        import pyarrow.parquet as pq

        self._names = names
        self._file: Any = pq.ParquetFile(path)
        _check_columns(path, names, self._file.schema_arrow.names)
        self.total = self._file.metadata.num_rows

    def batches(self, size: int) -> Iterator[tuple[Mapping[str, Any], int]]:
        for batch in self._file.iter_batches(size, columns=list(self._names)):
            yield {name: batch.column(name) for name in self._names}, batch.num_rows


class CsvReader:
    """Reads CSV and TSV; all columns as text, since type guessing would turn uint64 keys into floats."""

    unit = "bytes"

    def __init__(
        self,
        path: Path,
        names: tuple[str, ...],
        delimiter: str = ",",
        header: Sequence[str] = (),
    ) -> None:
        from pyarrow import csv

        self._names = names
        self._raw: Any = cast(Any, pa.OSFile)(str(path), "rb")
        self.total = path.stat().st_size
        options = csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        )
        self._file: Any = csv.open_csv(
            self._raw,
            csv.ReadOptions(use_threads=False, column_names=list(header) or None),
            csv.ParseOptions(delimiter=delimiter),
            options,
        )
        remedy = "" if header else "; a file without a header line needs --columns"
        _check_columns(path, names, self._file.schema.names, remedy)

    def batches(self, size: int) -> Iterator[tuple[Mapping[str, Any], int]]:
        read = 0
        for block in self._file:
            for start in range(0, block.num_rows, size):
                piece = block.slice(start, size)
                position = self._raw.tell()
                yield {name: piece.column(name) for name in self._names}, position - read
                read = position


class JsonlReader:
    """Reads JSONL, one object per line; numbers stay text until their type is known."""

    unit = "bytes"

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self._path = path
        self._names = names
        self.total = path.stat().st_size

    def batches(self, size: int) -> Iterator[tuple[Mapping[str, Any], int]]:
        import orjson

        rows: list[Any] = []
        read = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                read += len(line)
                if line.isspace():
                    continue
                try:
                    rows.append(orjson.loads(line))
                except orjson.JSONDecodeError as error:
                    raise BadRequest(f"{self._path}, line {number}: {error}") from None
                if len(rows) == size:
                    yield self._columns(rows, number), read
                    rows, read = [], 0
        if rows:
            yield self._columns(rows, number), read

    def _columns(self, rows: list[Any], last_line: int) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for name in self._names:
            try:
                cells = [row[name] for row in rows]
            except (KeyError, TypeError):
                odd = [row for row in rows if not isinstance(row, dict)]
                if odd:
                    text = f"up to line {last_line} there is {str(odd[0])[:80]!r}"
                    raise BadRequest(
                        f"{self._path}: {text}, expected a JSON object in each line"
                    ) from None
                _check_columns(self._path, self._names, self._common(rows))
                raise
            columns[name] = _text_column(cells)
        return columns

    def _common(self, rows: list[Any]) -> list[str]:
        """The names that occur in every one of ``rows``."""
        return [name for name in rows[0] if all(name in row for row in rows)]


def _text_column(cells: list[Any]) -> Any:
    if any(isinstance(cell, list) for cell in cells):
        bags = [cell if isinstance(cell, list) or cell is None else [cell] for cell in cells]
        words = [None if bag is None else [str(leaf) for leaf in bag] for bag in bags]
        return pa.array(words, pa.list_(pa.string()))
    return pa.array([None if cell is None else str(cell) for cell in cells], pa.string())


SampleReader = ParquetReader | CsvReader | JsonlReader


class SampleWriter:
    """Writes the outputs of batches to ``path``; after a failure, no file has that name.

    Use as a context manager. An output ``(n,)`` or ``(n, 1)`` is a column of numbers, ``(n, k)`` one
    of lists (in CSV: numbers separated by blanks)."""

    def __init__(self, path: Path) -> None:
        self._suffix = path.suffix.lower()
        if self._suffix not in OUTPUTS:
            raise ConfigError(f"{path}: name the output one of *{', *'.join(OUTPUTS)}")
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}")
        self._path = path
        self._part = path.with_name(f".{path.name}.part")
        self._sink: Any = None
        self._kept: dict[str, list[NDArray[Any]]] = {}
        self.rows = 0

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is None:
            self._finish()
            os.replace(self._part, self._path)
            return
        if self._sink is not None:
            self._sink.close()
        self._part.unlink(missing_ok=True)

    def write(self, outputs: Mapping[str, NDArray[Any]]) -> None:
        self.rows += len(next(iter(outputs.values()), ()))
        if self._suffix == ".npz":
            for name, value in outputs.items():
                self._kept.setdefault(name, []).append(value)
            return
        if self._suffix == ".jsonl":
            if self._sink is None:
                self._sink = self._part.open("wb")
            self._sink.write(json_lines(outputs))
            return
        table = as_table(outputs, text_lists=self._suffix == ".csv")
        if self._sink is None:
            self._sink = self._arrow_sink(table.schema)
        self._sink.write_table(table)

    def _arrow_sink(self, schema: Any) -> Any:
        if self._suffix == ".csv":
            from pyarrow import csv

            return csv.CSVWriter(self._part, schema)
        import pyarrow.parquet as pq

        return pq.ParquetWriter(self._part, schema)

    def _finish(self) -> None:
        if self._suffix == ".npz":
            arrays = {name: np.concatenate(parts) for name, parts in self._kept.items()}
            with self._part.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
        elif self._sink is not None:
            self._sink.close()
        else:
            self._part.touch()


def as_table(outputs: Mapping[str, NDArray[Any]], *, text_lists: bool = False) -> Any:
    """Named outputs as an Arrow table, one row a sample."""
    columns: dict[str, Any] = {}
    for name, value in outputs.items():
        flat = value.reshape(len(value), -1)
        if flat.shape[1] == 1:
            columns[name] = pa.array(flat[:, 0])
        elif text_lists:
            columns[name] = pa.array([" ".join(map(str, row)) for row in flat])
        else:
            cells = pa.array(flat.reshape(-1))
            columns[name] = pa.FixedSizeListArray.from_arrays(cells, flat.shape[1])
    return pa.table(columns)


def json_lines(outputs: Mapping[str, NDArray[Any]]) -> bytes:
    """Named outputs as JSON lines, one object a sample."""
    import orjson

    arrays = [value.reshape(len(value), -1) for value in outputs.values()]
    lines = []
    for cells in zip(*arrays, strict=True):
        row = {
            name: cell[0] if len(cell) == 1 else np.ascontiguousarray(cell)
            for name, cell in zip(outputs, cells, strict=True)
        }
        lines.append(
            orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        )
    return b"".join(lines)
