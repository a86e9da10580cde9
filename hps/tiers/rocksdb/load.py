"""Bulk load into RocksDB: sorted rows become SST files, linked into the table one by one.

Each table has a load record in the column family ``default`` under ``load:<column family>``. It is written
as incomplete before the first row and as complete after the last one, so the next start detects a killed
load. If it is the same load of the same files, it continues after the last linked file.
``streamed:<column family>`` marks a table that has been written to since its load. A new load removes that
mark and the stream positions (`hps.tiers.rocksdb.positions`)."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from rocksdict import (
    ColumnFamily,
    IngestExternalFileOptions,
    Options,
    Rdict,
    SstFileWriter,
    WriteBatch,
)

from hps.tiers.rocksdb.errors import rocksdb_error
from hps.tiers.rocksdb.layout import CodeArray, RowCodec
from hps.tiers.rocksdb.load_record import LoadRecord
from hps.tiers.rocksdb.overlay_record import overlay_key
from hps.types import VectorArray

log = logging.getLogger(__name__)
_INGEST = "hps-ingest"
_FILE_BYTES = 256 << 20
_READ_AHEAD = 128 << 10
_SYNC_BYTES = 16 << 20
_SMALL_BYTES = 256 << 10
# Rows encoded at a time: few enough to stay in the processor's cache, enough to amortise the call.
_BLOCK_ROWS = 8192


class LoadRecords:
    """The load records of all tables, in the column family ``default``."""

    def __init__(self, db: Callable[[], Rdict]) -> None:
        self._db = db

    def get(self, family: str) -> LoadRecord | None:
        text = self._db().get(f"load:{family}".encode())
        return None if text is None else LoadRecord(**json.loads(text))

    def put(self, family: str, record: LoadRecord, *, keep_streamed: bool = False) -> None:
        batch = WriteBatch(raw_mode=True)
        batch.put(f"load:{family}".encode(), json.dumps(asdict(record)).encode())
        batch.delete(overlay_key(family))
        if not keep_streamed:
            self._remove_stream_state(batch, family)
        self._db().write(batch)

    def remove(self, family: str, *, keep_overlay: bool = False) -> None:
        batch = WriteBatch(raw_mode=True)
        batch.delete(f"load:{family}".encode())
        if not keep_overlay:
            batch.delete(overlay_key(family))
        self._remove_stream_state(batch, family)
        self._db().write(batch)

    def _remove_stream_state(self, batch: WriteBatch, family: str) -> None:
        """Add to ``batch`` the removal of the table's streamed mark and stream positions."""
        batch.delete(f"streamed:{family}".encode())
        prefix = position_prefix(family)
        at = self._db().iter()
        at.seek(prefix)
        while at.valid() and (name := at.key()).startswith(prefix):
            batch.delete(name)
            at.next()
        at.status()

    def invalidate_all(self, families: Iterable[str], *, versioned: bool) -> None:
        """Invalidate all records after lost writes: they may be older or newer than the rows.

        ``families`` must be all that exist. Afterwards streams are read again from their start, and
        each write reads the stored version. With ``versioned`` rows, small tables, whose loads went
        through the log, are loaded again, which keeps newer rows."""
        batch = WriteBatch(raw_mode=True)
        for family in families:
            record = self.get(family)
            if versioned and record is not None and record.bytes <= _SMALL_BYTES:
                batch.delete(f"load:{family}".encode())
            batch.put(f"streamed:{family}".encode(), b"1")
            batch.delete(f"highest:{family}".encode())
        batch.delete_range(b"position:", b"position;")
        self._db().write(batch)

    def mark_streamed(self, family: str) -> None:
        self._db().put(f"streamed:{family}".encode(), b"1")

    def is_streamed(self, family: str) -> bool:
        return bool(self.streamed([family]))

    def streamed(self, families: Sequence[str]) -> set[str]:
        if not families:
            return set()
        marks: Any = self._db().get([f"streamed:{f}".encode() for f in families])
        return {f for f, mark in zip(families, marks, strict=True) if mark is not None}


def position_prefix(family: str) -> bytes:
    """Return the prefix of a table's stream positions; see `hps.tiers.rocksdb.positions`."""
    return f"position:{family}:".encode()


def loaded_until(found: LoadRecord | None, record: LoadRecord, family: Rdict) -> int:
    """Return the greatest code that a killed load has loaded; -1 if it can't be continued.

    ``found``: the stored record. ``record``: that of the new load, which must be the same load. Only for
    tables without other rows."""
    if not record.stamp or found != record.started():
        return -1
    last = family.iter()
    last.seek_to_last()
    if not last.valid():
        last.status()
        return -1
    log.info("continuing an interrupted load of %d rows", record.rows)
    return int.from_bytes(last.key(), "big")


def clean_leftovers(path: Path) -> None:
    """Remove the SST files of a killed load."""
    shutil.rmtree(ingest_folder(path), ignore_errors=True)


def ingest_folder(path: Path) -> Path:
    return path / _INGEST


class BulkLoad:
    """Writes one table's rows to SST files next to the database, and links each file into the table.

    Takes ``lock``, like other writers, to link a file."""

    def __init__(
        self,
        path: Path,
        options: Options,
        codec: RowCodec,
        version: int,
        lock: AbstractContextManager[Any],
        since: int = -1,
    ) -> None:
        self._folder = ingest_folder(path)
        self._options = options
        self._codec = codec
        self._version = version
        self._lock = lock
        # A continued load skips rows up to this code.
        self._since = since
        self._files: list[str] = []
        self._in_file = 0
        self._unsynced = 0
        self._syncing: Future[None] = Future()
        self._syncing.set_result(None)
        self._writer: SstFileWriter | None = None

    def run(
        self,
        chunks: Iterable[tuple[CodeArray, VectorArray]],
        expected: int,
        family: Rdict,
        handle: ColumnFamily,
        progress: Callable[[int], None],
    ) -> int:
        """Load the rows and return their number. ``expected``: an estimate of it, 0 if unknown.

        A small table is written like an update: an SST file waits four times for the disk, which adds
        up in a model of thousands of tables."""
        if not 0 < expected * self._codec.value_bytes <= _SMALL_BYTES:
            return self._ingest(chunks, family, progress)
        rows, last = 0, -1
        for code, vectors in chunks:
            last = self._put(code, vectors, family, handle, last)
            rows += len(code)
            progress(len(code))
        return rows

    def _put(
        self,
        code: CodeArray,
        vectors: VectorArray,
        family: Rdict,
        handle: ColumnFamily,
        last: int,
    ) -> int:
        """Write rows through the log; return the greatest code."""
        if not len(code):
            return last
        if int(code[0]) <= last or not (code[1:] > code[:-1]).all():
            raise rocksdb_error("a bulk load needs its codes in strictly ascending order")
        values = self._codec.encode(vectors, self._version)
        batch = WriteBatch(raw_mode=True)
        deque(map(batch.put, self._codec.stored_keys(code), values, repeat(handle)), 0)
        family.write(batch)
        return int(code[-1])

    def _ingest(
        self,
        chunks: Iterable[tuple[CodeArray, VectorArray]],
        family: Rdict,
        progress: Callable[[int], None],
    ) -> int:
        self._folder.mkdir(exist_ok=True)
        rows = 0
        with ThreadPoolExecutor(2, "hps-ingest") as pool:
            for code, vectors in chunks:
                first = 0
                if len(code) and int(code[0]) <= self._since:
                    first = int(np.searchsorted(code, np.uint64(self._since), "right"))
                for start in range(first, len(code), _BLOCK_ROWS):
                    part = slice(start, start + _BLOCK_ROWS)
                    self._append(code[part], vectors[part], pool)
                    if self._in_file >= _FILE_BYTES:
                        self._finish_file(family, pool)
                rows += len(code)
                progress(len(code))
            self._finish_file(family, pool)
        return rows

    def _append(self, code: CodeArray, vectors: VectorArray, pool: Executor) -> None:
        if self._writer is None:
            self._files.append(str(self._folder / f"{time.monotonic_ns()}.sst"))
            self._writer = SstFileWriter(self._options)
            self._writer.open(self._files[-1])
        values = self._codec.encode(vectors, self._version)
        # The loop over rows runs in C.
        deque(map(self._writer.__setitem__, self._codec.stored_keys(code), values), 0)
        written = len(code) * (self._codec.value_bytes + 8)
        self._in_file += written
        self._unsynced += written
        if self._unsynced >= _SYNC_BYTES and self._syncing.done():
            self._unsynced = 0
            self._syncing = pool.submit(_sync, self._files[-1])

    def _finish_file(self, family: Rdict, pool: Executor) -> None:
        """Finish the file and link it into the table; it stays linked even if the rest of the load fails."""
        if self._writer is None:
            return
        self._writer.finish()
        self._writer = None
        self._in_file = 0
        self._syncing.result()
        handle = os.open(self._files[-1], os.O_RDONLY)
        try:
            options = IngestExternalFileOptions()
            options.set_move_files(True)
            # RocksDB numbers the file as a write before it has recorded it, so this number is not
            # acknowledged.
            with self._lock:
                family.ingest_external_file(self._files[-1:], options)
        finally:
            pool.submit(_read_back, handle)

    def clean(self) -> None:
        self._writer = None
        for file in self._files:
            Path(file).unlink(missing_ok=True)


def _sync(file: str) -> None:
    """Start writing a file's pages to disk before the file is finished.

    RocksDB would write them only at the end, and hold the interpreter lock while it syncs up to 256 MB."""
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fdatasync(handle)
    finally:
        os.close(handle)


def _read_back(handle: int) -> None:
    """Read a finished file into the operating system's cache, unless memory is short.

    RocksDB's SST writer drops its output from that cache. A read from disk costs 140 µs instead of 5, so
    the first requests after a load would be slow."""
    try:
        size = os.fstat(handle).st_size
        if size * 4 > _available_bytes():
            return
        # Linux limits the read-ahead per call, whatever the size requested.
        for start in range(0, size, _READ_AHEAD):
            os.posix_fadvise(handle, start, _READ_AHEAD, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(handle)


def _available_bytes() -> int:
    try:
        text = Path("/proc/meminfo").read_text()
        return int(text.split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return 0
