"""Export of a table's rows as a Parquet or npz file, in bounded memory.

Columns: ``key`` int64, ``version`` uint64, ``deleted`` bool, ``vector`` (dim values of the table's
dtype; null, in npz zeros, for a deleted row)."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Protocol

import numpy as np

from hps.errors import ConfigError, HpsError
from hps.rows.base import TableRows
from hps.tiers.stored_rows import to_vectors
from hps.types import EmbeddingTable

FORMATS = (".parquet", ".npz")
_COPIED = 1 << 22


@dataclass(slots=True)
class ExportReport:
    """Result: ``rows`` written, of which ``deleted`` are tombstones.

    ``newest``: the highest written version; the next export's ``since``."""

    rows: int = 0
    deleted: int = 0
    newest: int = 0


class _Sink(Protocol):
    def write(self, rows: TableRows, *, deleted: bool) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None:
        """Release all resources; an unfinished file is left as it is."""
        ...


def export(
    path: Path,
    table: EmbeddingTable,
    rows: Iterable[TableRows],
    tombstones: Iterable[TableRows] = (),
    since: int | None = None,
) -> ExportReport:
    """Write ``rows``, then ``tombstones``; with ``since``, only those with higher versions.

    The file gets its name when it is complete. Raises ConfigError for a suffix that is not in ``FORMATS``."""
    check_format(path)
    report = ExportReport()
    part = path.with_name(f".{path.name}.part")
    sink: _Sink | None = None
    try:
        sink = _ParquetSink(part, table) if path.suffix == ".parquet" else _NpzSink(part, table)
        for deleted, source in ((False, rows), (True, tombstones)):
            for some in _newer(source, since):
                sink.write(some, deleted=deleted)
                report.rows += len(some.keys)
                report.deleted += deleted * len(some.keys)
                report.newest = max(report.newest, int(some.versions.max()))
        sink.finish()
        os.replace(part, path)
    except OSError as error:
        reason = error.strerror or error
        raise HpsError(f"cannot write {path}: {reason}; make room, or name another file") from error
    finally:
        if sink is not None:
            with suppress(
                OSError
            ):  # on a full disk closing fails too, after `finish` has raised the error
                sink.close()
        part.unlink(missing_ok=True)
    return report


def check_format(path: Path) -> None:
    """Check the file's suffix and folder, before any work is done. Raises ConfigError."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: name the file one of *{', *'.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist")


def _newer(source: Iterable[TableRows], since: int | None) -> Iterator[TableRows]:
    for rows in source:
        some = rows if since is None else rows.at(rows.versions > np.uint64(since))
        if len(some.keys):
            yield some


class _ParquetSink:
    def __init__(self, path: Path, table: EmbeddingTable) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self._table = table
        vector = pa.list_(pa.from_numpy_dtype(table.dtype), table.dim)
        fields = {
            "key": pa.int64(),
            "version": pa.uint64(),
            "deleted": pa.bool_(),
            "vector": vector,
        }
        self._schema = pa.schema(
            [pa.field(name, kind) for name, kind in fields.items()],
            {"model": table.model, "model_version": str(table.version), "table": table.name},
        )
        self._writer = parquet.ParquetWriter(path, self._schema)

    def write(self, rows: TableRows, *, deleted: bool) -> None:
        import pyarrow as pa

        n, vector = len(rows.keys), self._schema.field("vector").type
        if deleted:
            vectors = pa.nulls(n, vector)
        else:
            values = to_vectors(self._table, rows.vectors)
            flat = pa.array(values.reshape(-1), vector.value_type)
            vectors = pa.FixedSizeListArray.from_arrays(flat, self._table.dim)
        flags = pa.array(np.full(n, deleted))
        columns = [pa.array(rows.keys), pa.array(rows.versions), flags, vectors]
        self._writer.write_table(pa.table(columns, schema=self._schema))

    def finish(self) -> None:
        self._writer.close()

    def close(self) -> None:
        self._writer.close()


class _NpzSink:
    """Writes an npz file; each column goes to a temporary file first, because its length precedes it."""

    def __init__(self, path: Path, table: EmbeddingTable) -> None:
        self._path = path
        self._table = table
        self._rows = 0
        self._stack = ExitStack()
        folder = TemporaryDirectory(prefix=".hps-export-", dir=path.parent)
        self._folder = Path(self._stack.enter_context(folder))
        self._arrays: dict[str, tuple[np.dtype[Any], tuple[int, ...], IO[bytes]]] = {}
        for name, dtype, shape in (
            ("key", np.dtype("<i8"), ()),
            ("version", np.dtype("<u8"), ()),
            ("deleted", np.dtype(bool), ()),
            ("vector", table.dtype.newbyteorder("<"), (table.dim,)),
        ):
            file = self._stack.enter_context((self._folder / name).open("w+b"))
            self._arrays[name] = (dtype, shape, file)

    def write(self, rows: TableRows, *, deleted: bool) -> None:
        n = len(rows.keys)
        vectors = to_vectors(self._table, rows.vectors)
        if deleted:
            vectors = np.zeros_like(vectors)
        values = (rows.keys, rows.versions, np.full(n, deleted), vectors)
        for (dtype, _, file), value in zip(self._arrays.values(), values, strict=True):
            file.write(np.ascontiguousarray(value, dtype).data)
        self._rows += n

    def finish(self) -> None:
        with zipfile.ZipFile(self._path, "w") as archive:
            for name, (dtype, shape, file) in self._arrays.items():
                header = {
                    "descr": np.lib.format.dtype_to_descr(dtype),
                    "fortran_order": False,
                    "shape": (self._rows, *shape),
                }
                file.seek(0)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as out:
                    np.lib.format.write_array_header_2_0(out, header)
                    while data := file.read(_COPIED):
                        out.write(data)

    def close(self) -> None:
        self._stack.close()
