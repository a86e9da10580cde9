"""Rows and deletions from Parquet and npz files, block by block.

`hps store export` and trainers write such files. Columns: ``key`` (n,) int64 or uint64; ``vector`` (n,
dim) float32 or float16; optional ``version`` (n,) uint64 and ``deleted`` (n,) bool. Vectors of deleted
rows and other columns are ignored."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.native.twin_codec import DTYPES
from hps.tiers.positions import TableChanges
from hps.types import as_keys

FORMATS = (".parquet", ".npz")
COLUMNS = ("key", "version", "deleted", "vector")
_NEEDED = ("key", "vector")


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of rows: its number of ``rows``, deletions included, and the ``table`` it names.

    ``table`` is `model/table`, or None if the file names none."""

    path: Path
    rows: int
    table: str | None

    def changes(self, block: int, versions: int) -> Iterator[TableChanges]:
        """The file's changes in order, at most ``block`` rows at a time.

        Rows of a file without versions get ``versions``, ``versions + 1`` and so on. Raises BadRequest
        for a damaged file."""
        first = versions
        for columns in _blocks(self.path, block):
            yield _changes(self.path, columns, first)
            first += len(columns["key"])


def open_rows(path: Path) -> RowFile:
    """Check the file, npz also against its checksums (Parquet has none); no rows are kept.

    Raises BadRequest for another format, damage and missing columns; OSError."""
    if path.suffix == ".npz":
        return RowFile(path, _npz_rows(path), None)
    if path.suffix == ".parquet":
        return _open_parquet(path)
    raise BadRequest(f"{path}: unknown format; use a file named *{' or *'.join(FORMATS)}")


def _changes(path: Path, columns: Mapping[str, NDArray[Any]], first: int) -> TableChanges:
    vectors = columns["vector"]
    if vectors.ndim != 2 or vectors.dtype.newbyteorder("=") not in DTYPES:
        raise BadRequest(
            f"{path}: vector must be (n, dim) float32 or float16, not {vectors.shape} {vectors.dtype}"
        )
    try:
        keys = as_keys(columns["key"])
    except TypeError as error:
        raise BadRequest(f"{path}: {error}") from None
    n = len(keys)
    versions = columns.get("version", np.arange(first, first + n, dtype=np.uint64))
    if versions.dtype.kind not in "iu" or (versions.dtype.kind == "i" and (versions < 0).any()):
        raise BadRequest(
            f"{path}: version must be whole numbers, none negative, got {versions.dtype}"
        )
    versions = versions.astype(np.uint64, copy=False)
    gone = columns.get("deleted", np.zeros(n, bool))
    if gone.dtype != np.bool_:
        raise BadRequest(f"{path}: deleted must be bool, not {gone.dtype}")
    for name, column in columns.items():
        if len(column) != n or (name != "vector" and column.ndim != 1):
            raise BadRequest(f"{path}: {name} must be ({n},) as there are {n} keys")
    upserts = ~gone
    return TableChanges(
        keys[upserts],
        np.ascontiguousarray(vectors[upserts]),
        versions[upserts],
        keys[gone],
        versions[gone],
    )


def _check_columns(path: Path, found: list[str]) -> None:
    for name in _NEEDED:
        if name not in found:
            raise BadRequest(
                f"{path} has no column {name}: a file of rows has key and vector, and version and deleted "
                f"as optional columns; this one has {', '.join(found) or 'none'}"
            )


def _blocks(path: Path, block: int) -> Iterator[dict[str, NDArray[Any]]]:
    yield from (_npz_blocks if path.suffix == ".npz" else _parquet_blocks)(path, block)


# -- Parquet ---------------------------------------------------------------------------------------


def _open_parquet(path: Path) -> RowFile:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except pa.ArrowException as error:
        raise BadRequest(f"{path} is not a Parquet file: {error}") from None
    _check_columns(path, schema.names)
    metadata = {
        k.decode(): v.decode() for k, v in (schema.metadata or {}).items() if k != b"ARROW:schema"
    }
    named = "model" in metadata and "table" in metadata
    return RowFile(path, rows, f"{metadata['model']}/{metadata['table']}" if named else None)


def _parquet_blocks(path: Path, block: int) -> Iterator[dict[str, NDArray[Any]]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = [name for name in COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(block, columns=names):
                yield {name: _column(path, name, batch.column(name)) for name in names}
    except pa.ArrowException as error:
        raise BadRequest(f"{path}: {error}") from None


def _column(path: Path, name: str, column: Any) -> NDArray[Any]:
    import pyarrow as pa

    if name != "vector":
        if column.null_count:
            raise BadRequest(f"{path}: {name} is null in some rows")
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return values
    kind = column.type
    if not pa.types.is_fixed_size_list(kind):
        if not pa.types.is_list(kind) or not len(column):
            raise BadRequest(f"{path}: vector must be a column of lists, not {kind}")
        # Lists of any length, as other programs write them: all must be as long as the first.
        dims = set(column.drop_null().value_lengths().to_pylist())
        if len(dims) != 1:
            raise BadRequest(f"{path}: vector has lists of {len(dims)} different lengths")
        kind = pa.list_(kind.value_type, dims.pop())
        column = column.cast(kind)
    rows = np.zeros((len(column), kind.list_size), kind.value_type.to_pandas_dtype())
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    flat = column.flatten()
    if flat.null_count:
        raise BadRequest(f"{path}: vector holds values that are null")
    rows[valid] = flat.to_numpy(zero_copy_only=False).reshape(-1, kind.list_size)
    return rows


# -- npz -------------------------------------------------------------------------------------------


def _npz_rows(path: Path) -> int:
    with _NpzArchive(path) as (stack, archive):
        rows = _heads(path, stack, archive)["key"][1][0]
        if (bad := archive.testzip()) is not None:
            raise BadRequest(f"{path} is damaged: {bad} does not match its checksum")
        return rows


_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)


class _NpzArchive:
    """An npz file's archive. Damage raises BadRequest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()

    def __enter__(self) -> tuple[ExitStack, zipfile.ZipFile]:
        try:
            return self._stack, self._stack.enter_context(zipfile.ZipFile(self._path))
        except zipfile.BadZipFile as error:
            raise BadRequest(f"{self._path} is not an npz file: {error}") from None

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        self._stack.close()
        if isinstance(error, _DAMAGE):
            raise BadRequest(f"{self._path} is damaged: {error}") from None


Head = tuple[IO[bytes], tuple[int, ...], np.dtype[Any]]


def _heads(path: Path, stack: ExitStack, archive: zipfile.ZipFile) -> dict[str, Head]:
    """Each column's stream at its first value, its shape and dtype."""
    names = [name.removesuffix(".npy") for name in archive.namelist()]
    _check_columns(path, names)
    found = {}
    for name in COLUMNS:
        if name not in names:
            continue
        file = stack.enter_context(archive.open(f"{name}.npy"))
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(np.lib.format.read_magic(file))
        if read is None:
            raise BadRequest(f"{path}: {name} has an unknown npy version")
        shape, by_columns, dtype = read(file)
        if not shape or (by_columns and len(shape) > 1) or dtype.hasobject:
            raise BadRequest(f"{path}: {name} must be an array of numbers, by rows")
        found[name] = (file, shape, dtype)
    return found


def _npz_blocks(path: Path, block: int) -> Iterator[dict[str, NDArray[Any]]]:
    with _NpzArchive(path) as (stack, archive):
        heads = _heads(path, stack, archive)
        rows = heads["key"][1][0]
        for name, (_, shape, _) in heads.items():
            if shape[0] != rows:
                raise BadRequest(f"{path}: {name} has {shape[0]} rows, key has {rows}")
        for start in range(0, rows, block):
            n = min(block, rows - start)
            yield {name: _read(head, n) for name, head in heads.items()}


def _read(head: Head, n: int) -> NDArray[Any]:
    file, shape, dtype = head
    size = n * int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    data = file.read(size)
    if len(data) < size:
        raise EOFError("it ends too early")
    values: NDArray[Any] = np.frombuffer(data, dtype).reshape(n, *shape[1:])
    return values.astype(dtype.newbyteorder("="), copy=False)
