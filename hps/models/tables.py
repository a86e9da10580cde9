"""A table's two files: ``key`` (int64[n]) and ``emb_vector`` (float32[n][dim]), no headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hps.errors import ModelError
from hps.models.manifest import FileEntry, Manifest, TableEntry, digest_of
from hps.types import KeyArray

KEY_FILE = "key"
VECTOR_FILE = "emb_vector"
KEY_BYTES = 8
VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class TableFiles:
    """One table's files on disk, checked to fit together. ``digest`` names their contents."""

    name: str
    folder: Path
    rows: int
    dim: int
    digest: str
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

    def entries(self) -> list[tuple[Path, FileEntry]]:
        """The files with what the manifest says of them; empty without a manifest."""
        if self.entry is None:
            return []
        return [(self.key_path, self.entry.key), (self.vector_path, self.entry.emb_vector)]

    def keys(self) -> KeyArray:
        """(rows,) int64, read-only, mapped from the file."""
        if not self.rows:
            return np.empty(0, np.int64)
        return np.memmap(self.key_path, np.dtype("<i8"), "r", shape=(self.rows,))

    def vectors(self) -> NDArray[np.float32]:
        """(rows, dim) float32, read-only, mapped from the file."""
        if not self.rows:
            return np.empty((0, self.dim), np.float32)
        return np.memmap(self.vector_path, np.dtype("<f4"), "r", shape=(self.rows, self.dim))

    def head(self, n: int) -> tuple[KeyArray, NDArray[np.float32]]:
        """The first ``n`` rows (or all): keys (m,) int64 and vectors (m, dim) float32, in memory."""
        n = max(0, min(n, self.rows))
        keys = np.fromfile(self.key_path, "<i8", n)
        rows = np.fromfile(self.vector_path, "<f4", n * self.dim)
        return keys, rows.reshape(n, self.dim)


def open_table(folder: Path, name: str, dim: int, manifest: Manifest | None) -> TableFiles:
    """Check the two files against each other, ``dim`` and the manifest: sizes only, no contents."""
    key, vector = folder / KEY_FILE, folder / VECTOR_FILE
    key_bytes, vector_bytes = _size(key, name), _size(vector, name)
    if key_bytes % KEY_BYTES:
        raise ModelError(
            f"{key}: {key_bytes} bytes is not a multiple of {KEY_BYTES} (int64 keys without a header); "
            "the file is truncated or of another format"
        )
    rows = key_bytes // KEY_BYTES
    entry = manifest.tables.get(name) if manifest else None
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
    return TableFiles(name, folder, rows, dim, _digest(name, dim, entry, (key, vector)), entry)


def _digest(name: str, dim: int, entry: TableEntry | None, files: tuple[Path, Path]) -> str:
    if entry:
        return digest_of(
            {"table": name, "dim": dim, "key": entry.key.checksum, "vec": entry.emb_vector.checksum}
        )
    stats = [path.stat() for path in files]
    return digest_of(
        {"table": name, "dim": dim, "files": [(s.st_size, s.st_mtime_ns) for s in stats]}
    )


def _row_mismatch(vector: Path, rows: int, dim: int, found: int) -> str:
    text = f"{vector}: {found} bytes; {rows} keys of dim {dim} in float32 need {rows * dim * VALUE_BYTES}. "
    if found % (dim * VALUE_BYTES) == 0:
        text += f"key holds {rows} rows, emb_vector {found // (dim * VALUE_BYTES)}"
    else:
        text += f"emb_vector holds {found / (dim * VALUE_BYTES):.2f} rows: truncated?"
    if found and rows and found % (rows * VALUE_BYTES) == 0:
        text += f"; the bytes would fit dim {found // (rows * VALUE_BYTES)}: is dim {dim} wrong?"
    return text


def _size(path: Path, table: str) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        missing = path.parent if not path.parent.is_dir() else path
        raise ModelError(f"table '{table}': {missing} is missing") from None
    except OSError as error:
        raise ModelError(f"table '{table}': cannot read {path}: {error.strerror}") from error
