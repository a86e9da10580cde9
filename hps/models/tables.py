"""A table's two files: ``key`` (int64[n]) and ``emb_vector`` (float32[n][dim]), no headers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import ModelError
from hps.models.file_stamp import FileStamp
from hps.models.manifest import (
    KEY_FILE,
    VECTOR_FILE,
    FileEntry,
    Manifest,
    TableEntry,
    digest_of,
)
from hps.types import IndexArray, KeyArray

KEY_BYTES = 8
VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class TableFiles:
    """One table's two files, whose sizes match each other.

    ``digest``: names their contents. ``stamps``: of both. The files are read, not mapped: if a file is
    shortened, a read raises ModelError, a mapping ends the process (SIGBUS)."""

    name: str
    folder: Path
    rows: int
    dim: int
    digest: str
    stamps: tuple[FileStamp, ...]
    entry: TableEntry | None = None

    @property
    def key_path(self) -> Path:
        return self.folder / KEY_FILE

    @property
    def vector_path(self) -> Path:
        return self.folder / VECTOR_FILE

    @property
    def bytes(self) -> int:
        return self.rows * (KEY_BYTES + self.dim * VALUE_BYTES)

    @property
    def pairs(self) -> tuple[TableFiles, ...]:
        """The pairs of files that the table consists of, each of which may have a mapped file."""
        return (self,)

    def entries(self) -> list[tuple[Path, FileEntry]]:
        """Return the files with their manifest entries; empty without a manifest."""
        if self.entry is None:
            return []
        return [(self.key_path, self.entry.key), (self.vector_path, self.entry.emb_vector)]

    def keys(self, start: int = 0, stop: int | None = None) -> KeyArray:
        """Read the keys (n,) int64 of the rows ``start:stop``; without ``stop``, to the end."""
        keys: KeyArray = self._read(self.key_path, "<i8", 1, start, stop)
        return keys

    def vectors(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Read the vectors (n, dim) float32 of the rows ``start:stop``; without ``stop``, to the end."""
        flat: NDArray[np.float32] = self._read(self.vector_path, "<f4", self.dim, start, stop)
        return flat.reshape(-1, self.dim)

    def blocks(self, rows: int) -> Iterator[tuple[KeyArray, NDArray[np.float32]]]:
        """Yield keys (n,) and vectors (n, dim) of at most ``rows`` rows at a time, in the files' order."""
        for start in range(0, self.rows, rows):
            yield self.keys(start, start + rows), self.vectors(start, start + rows)

    def keys_at(self, rows: IndexArray) -> KeyArray:
        """Read the keys of ``rows (n,)`` with one read each: only for a few rows."""
        keys: KeyArray = self._pick(self.key_path, "<i8", 1, rows)
        return keys.reshape(-1)

    def vectors_at(self, rows: IndexArray) -> NDArray[np.float32]:
        """Read the vectors (n, dim) of ``rows (n,)`` with one read each: only for a few rows."""
        vectors: NDArray[np.float32] = self._pick(self.vector_path, "<f4", self.dim, rows)
        return vectors

    def copy_vectors(self, target: Path) -> None:
        """Copy all vectors to the file ``target``, in the files' format."""
        shutil.copyfile(self.vector_path, target)

    def check_unchanged(self) -> None:
        """Raise ModelError if the files have changed since they were opened."""
        for stamp in self.stamps:
            stamp.check()

    def _read(self, path: Path, dtype: str, width: int, start: int, stop: int | None) -> Any:
        rows = max(0, min(self.rows, self.rows if stop is None else stop) - start)
        offset = start * width * np.dtype(dtype).itemsize
        with _readable(path):
            found = np.fromfile(path, dtype, rows * width, offset=offset)
        if len(found) != rows * width:
            raise _shortened(path)
        return found

    def _pick(self, path: Path, dtype: str, width: int, rows: IndexArray) -> Any:
        out = np.empty((len(rows), width), dtype)
        size = width * out.itemsize
        with _readable(path), path.open("rb", buffering=0) as file:
            for row, into in zip(rows.tolist(), out, strict=True):
                if os.preadv(file.fileno(), [into.data], row * size) != size:
                    raise _shortened(path)
        return out

    def head(self, n: int) -> tuple[KeyArray, NDArray[np.float32]]:
        """Read the first ``n`` rows, or all: keys (m,) int64 and vectors (m, dim) float32."""
        n = max(0, n)
        return self.keys(0, n), self.vectors(0, n)


def open_table(folder: Path, name: str, dim: int, manifest: Manifest | None) -> TableFiles:
    """Open a table without a delta; see `open_pair`."""
    return open_pair(folder, name, dim, manifest.tables.get(name) if manifest else None)


def open_pair(folder: Path, name: str, dim: int, entry: TableEntry | None) -> TableFiles:
    """Open a pair of files; check their sizes against each other, ``dim`` and the manifest's ``entry``.

    Does not read the contents."""
    key, vector = folder / KEY_FILE, folder / VECTOR_FILE
    stamps = _stamp(key, name), _stamp(vector, name)
    key_bytes, vector_bytes = (stamp.bytes for stamp in stamps)
    if key_bytes % KEY_BYTES:
        raise ModelError(
            f"{key}: {key_bytes} bytes is not a multiple of {KEY_BYTES} (int64 keys without a header); "
            "the file is truncated or of another format"
        )
    rows = key_bytes // KEY_BYTES
    if entry and entry.dim != dim:
        raise ModelError(
            f"{folder}: the manifest says dim {entry.dim} for table '{name}', model.yaml says {dim}; "
            "correct model.yaml"
        )
    if vector_bytes != rows * dim * VALUE_BYTES:
        raise ModelError(_row_mismatch(vector, rows, dim, vector_bytes))
    if entry:
        for path, expected, found in (
            (key, entry.key.bytes, key_bytes),
            (vector, entry.emb_vector.bytes, vector_bytes),
        ):
            if expected != found:
                raise ModelError(
                    f"{path}: the manifest says {expected} bytes ({entry.rows} rows), found {found}; "
                    "the file was replaced or truncated: import the version again"
                )
        if entry.rows != rows:
            raise ModelError(f"{key}: the manifest says {entry.rows} rows, found {rows}")
    return TableFiles(name, folder, rows, dim, _digest(name, dim, entry, stamps), stamps, entry)


def _digest(
    name: str, dim: int, entry: TableEntry | None, stamps: tuple[FileStamp, FileStamp]
) -> str:
    if entry:
        return digest_of(
            {"table": name, "dim": dim, "key": entry.key.checksum, "vec": entry.emb_vector.checksum}
        )
    return digest_of({"table": name, "dim": dim, "files": [(s.bytes, s.mtime_ns) for s in stamps]})


def _row_mismatch(vector: Path, rows: int, dim: int, found: int) -> str:
    text = f"{vector}: {found} bytes; {rows} keys of dim {dim} in float32 need {rows * dim * VALUE_BYTES}. "
    if found % (dim * VALUE_BYTES) == 0:
        text += f"key holds {rows} rows, emb_vector {found // (dim * VALUE_BYTES)}"
    else:
        text += f"emb_vector holds {found / (dim * VALUE_BYTES):.2f} rows: truncated?"
    if found and rows and found % (rows * VALUE_BYTES) == 0:
        text += f"; the bytes would fit dim {found // (rows * VALUE_BYTES)}: is dim {dim} wrong?"
    return text


def _stamp(path: Path, table: str) -> FileStamp:
    try:
        return FileStamp.of(path)
    except FileNotFoundError:
        missing = path.parent if not path.parent.is_dir() else path
        raise ModelError(f"table '{table}': {missing} is missing") from None
    except OSError as error:
        raise ModelError(f"table '{table}': cannot read {path}: {error.strerror}") from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _shortened(path: Path) -> ModelError:
    return ModelError(
        f"{path} was shortened while it was read; replace it by the complete file and try again"
    )
