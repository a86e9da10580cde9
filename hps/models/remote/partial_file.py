"""A file that is being downloaded: its contents, and which chunks of them are complete.

The progress is a log of the chunk size and then of chunk numbers, each appended after the chunk was
written, so that a download that was cut or killed resumes. After a power failure the log may be ahead of
the contents; the checksum detects that. It is computed while chunks arrive, in the order of the file."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

_ENTRY = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """Size of a file, and its checksum; None if the manifest does not have the file."""

    bytes: int
    checksum: str | None


class PartialFile:
    """``<path>.part`` and ``<path>.progress`` until the file is complete. Thread-safe."""

    def __init__(self, path: Path, relative: str, entry: RemoteEntry, chunk_bytes: int) -> None:
        """Opens or creates the files, with their final size reserved on the disk. Raises OSError."""
        self.path, self.relative, self.entry = path, relative, entry
        self._chunk_bytes = chunk_bytes
        self._part, self._log_path = _suffixed(path, ".part"), _suffixed(path, ".progress")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._log = os.open(self._log_path, flags, 0o644)
        self._lock = threading.Lock()
        self._done = self._read_log()
        self._hashing = threading.Lock()
        self._digest, self._hashed = hashlib.sha256(), 0  # of the first chunks, and how many
        if entry.bytes:
            os.posix_fallocate(self._file, 0, entry.bytes)
        os.ftruncate(self._file, entry.bytes)

    @property
    def chunks(self) -> int:
        return -(-self.entry.bytes // self._chunk_bytes)

    def missing(self) -> list[int]:
        with self._lock:
            return [i for i in range(self.chunks) if i not in self._done]

    def range_of(self, chunk: int) -> tuple[int, int]:
        """Offset and size of a chunk."""
        offset = chunk * self._chunk_bytes
        return offset, min(self._chunk_bytes, self.entry.bytes - offset)

    def write(self, chunk: int, data: bytes) -> bool:
        """Write a chunk; True if it was the last one missing. Raises OSError."""
        offset, _ = self.range_of(chunk)
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written
        with self._lock:
            os.write(self._log, _ENTRY.pack(chunk))
            self._done.add(chunk)
            is_last = len(self._done) == self.chunks
        if self.entry.checksum is not None and self._hashing.acquire(blocking=False):
            try:
                self._hash(chunk, data)
            finally:
                self._hashing.release()
        return is_last

    def checksum(self) -> str:
        """SHA-256 of the contents, as in the manifest; all chunks must be complete."""
        with self._hashing:
            self._hash()
            return f"sha256:{self._digest.hexdigest()}"

    def _hash(self, chunk: int = -1, data: bytes = b"") -> None:
        """Hash the complete chunks that follow the hashed ones; ``data`` is the contents of ``chunk``.

        The caller must hold ``_hashing``."""
        while self._hashed < self.chunks:
            with self._lock:
                if self._hashed not in self._done:
                    return
            offset, size = self.range_of(self._hashed)
            self._digest.update(
                data if self._hashed == chunk else os.pread(self._file, size, offset)
            )
            self._hashed += 1

    def restart(self) -> None:
        """Mark all chunks as missing."""
        with self._hashing, self._lock:
            self._clear_log()
            self._done.clear()
            self._digest, self._hashed = hashlib.sha256(), 0

    def finish(self) -> None:
        """Give the complete file its name."""
        os.fsync(self._file)
        self._part.rename(self.path)
        self._log_path.unlink()

    def close(self) -> None:
        for handle in (self._file, self._log):
            os.close(handle)

    def _read_log(self) -> set[int]:
        """Chunks in the log; none if it is of another file size or chunk size."""
        data = os.pread(self._log, os.fstat(self._log).st_size, 0)
        whole = (
            len(data) // _ENTRY.size * _ENTRY.size
        )  # a killed writer may have left half an entry
        size, *chunks = (
            (number for (number,) in _ENTRY.iter_unpack(data[:whole])) if whole else (0,)
        )
        if size != self._chunk_bytes or os.fstat(self._file).st_size != self.entry.bytes:
            self._clear_log()
            return set()
        os.ftruncate(self._log, whole)
        return {chunk for chunk in chunks if chunk < self.chunks}

    def _clear_log(self) -> None:
        os.ftruncate(self._log, 0)
        os.write(self._log, _ENTRY.pack(self._chunk_bytes))


def _suffixed(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def allocated(path: Path) -> int:
    """Bytes that a partial file takes already; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def clear(folder: Path) -> None:
    """Remove what a folder contains."""
    for each in folder.iterdir():
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
        else:
            each.unlink(missing_ok=True)


def is_empty(folder: Path) -> bool:
    """True for an existing folder without contents."""
    return folder.is_dir() and not any(folder.iterdir())
