"""HPS's ``.sst`` dumps of a table: files of RocksDB's ``SstFileWriter`` in the layout `hps`.

RocksDB's binding cannot read such a file directly, so a temporary database ingests it and is scanned."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from rocksdict import IngestExternalFileOptions, Options, Rdict

from hps.errors import ModelError
from hps.tiers.rocksdb.counts import estimated_rows
from hps.tiers.rocksdb.layout import RowCodec
from hps.tiers.rocksdb.rows import scan_entries
from hps.types import EmbeddingTable, KeyArray, VectorArray


class SstDump:
    """An opened ``.sst`` file with ``rows`` rows."""

    def __init__(self, path: Path, data: Rdict) -> None:
        self.path = path
        self.rows = estimated_rows(
            data
        )  # exact: the file has neither deletions nor overwritten rows
        self._data = data

    def read(
        self, table: EmbeddingTable, progress: Callable[[int], None] = lambda _rows: None
    ) -> Iterator[tuple[KeyArray, VectorArray]]:
        """Yield keys (n,) int64 and vectors (n, dim), some thousand at a time, in the file's order.

        4-byte keys are unsigned, as in HPS. Raises ModelError for a damaged file, and for rows of
        another shape than ``table``'s."""
        codec = RowCodec(table, "hps")
        try:
            for names, values in scan_entries(self._data):
                self._check(table, names, "keys", table.key_bits // 8)
                self._check(table, values, "values", table.dim * table.dtype.itemsize)
                flat = np.frombuffer(b"".join(values), table.dtype.newbyteorder("<"))
                yield codec.keys(b"".join(names)), flat.reshape(-1, table.dim).astype(table.dtype)
                progress(len(names))
        except ModelError:
            raise
        except Exception as error:  # RocksDB's binding has no error class
            raise _unreadable(self.path, error) from error

    def _check(self, table: EmbeddingTable, parts: list[bytes], what: str, expected: int) -> None:
        wrong = {len(part) for part in parts} - {expected}
        if wrong:
            raise ModelError(
                f"{self.path}: {what} of {wrong.pop()} bytes, expected {expected} for table {table.id} (dim "
                f"{table.dim} of {table.dtype}, {table.key_bits}-bit keys): name the table it was dumped from"
            )


@contextmanager
def open_sst(path: Path) -> Iterator[SstDump]:
    """Open the file, which stays unchanged. Raises ModelError if RocksDB cannot read it."""
    if not path.is_file():
        raise ModelError(f"cannot read {path}: No such file")
    # On the same file system a hard link is enough; on another one RocksDB copies the file.
    folder = path.absolute().parent
    where = folder if os.access(folder, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix=".hps-sst-", dir=where) as scratch:
        file, options = Path(scratch, "dump.sst"), IngestExternalFileOptions()
        with suppress(OSError):
            os.link(path, file)
            options.set_move_files(True)
        try:
            data = Rdict(str(Path(scratch, "database")), Options(raw_mode=True))
        except Exception as error:
            raise ModelError(f"cannot read {path}: no database in {scratch}: {error}") from error
        try:
            try:
                data.ingest_external_file([str(file if file.exists() else path)], options)
            except Exception as error:
                raise _unreadable(path, error) from error
            yield SstDump(path, data)
        finally:
            data.close()


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{path}: not a readable .sst dump, expected a file of RocksDB's SstFileWriter: {error}"
    )
