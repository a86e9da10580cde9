"""Record of acknowledged writes, to detect a write-ahead log that lost some.

RocksDB replays the log that it finds; it cannot know that a log file was removed or its end cut off. It
numbers its writes, so the file `hps-acknowledged` holds the number of the last acknowledged write, and the
names and lengths of the log files as of at most a second before it. Like the log, this file is written
without fsync and survives ``kill -9``.

Format: the number (u64 in the machine's byte order), one line of JSON, zeros up to a page. The page is
mapped into memory, so recording a number is one store of 8 bytes, which no signal interrupts in the
middle; a write call would take 1 to 3 µs and release the interpreter lock. Disk space for the page is
reserved when it is mapped, so a full disk cannot make a later store fail. A primary holds a lock on the
file (`flock`)."""

from __future__ import annotations

import json
import logging
import mmap
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hps.tiers.file_lock import FileLock, is_locked

log = logging.getLogger(__name__)

_FILE = "hps-acknowledged"
_NUMBER_BYTES = 8
_LIST_EVERY_S = 1.0
# Attempts at the lock: a reader holds it for a moment, while it checks whether a primary does.
_LOCK_ATTEMPTS, _LOCK_AGAIN_S = 20, 0.005
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class AcknowledgedRecord:
    """The record of an earlier process.

    The last acknowledged ``sequence`` number, the length of each log file by name, and whether the
    machine has run without a restart since."""

    sequence: int
    logs: dict[str, int]
    same_boot: bool

    @property
    def newest(self) -> str:
        """Name of the newest log file, which has the last of these writes."""
        return max(self.logs, default="")


class AcknowledgedWrites:
    """Writes the record of one open database. For one thread at a time."""

    def __init__(self, path: Path, sequence: int) -> None:
        self._path = path
        self._about = {"identity": _text(path / "IDENTITY"), "boot": _text(_BOOT)}
        self._file = os.open(path / _FILE, os.O_RDWR | os.O_CREAT, 0o660)
        self._lock = self._locked()
        self._page = self._map()
        self._numbers = memoryview(self._page)[:_NUMBER_BYTES].cast("Q")
        self._list_at = 0.0
        self.note(sequence)

    def note(self, sequence: int) -> None:
        """Record that every write up to ``sequence`` is acknowledged."""
        self._numbers[0] = sequence
        if (now := time.monotonic()) >= self._list_at:
            self._list_at = now + _LIST_EVERY_S
            self._list()

    def close(self) -> None:
        """Close the record; call it after the database is closed."""
        self._list()
        self._numbers.release()
        self._page.close()
        os.close(self._file)
        if self._lock is not None:
            self._lock.release()

    def _locked(self) -> FileLock | None:
        """Lock the file, so that readers detect this primary; None on a file system without locks."""
        for _ in range(_LOCK_ATTEMPTS):
            try:
                return FileLock(self._path / _FILE)
            except BlockingIOError:
                time.sleep(_LOCK_AGAIN_S)
            except OSError:
                break
        return None

    def _map(self) -> mmap.mmap:
        """Map the file's first page.

        Uses private memory on a file system without shared mappings, such as some FUSE mounts."""
        try:
            os.posix_fallocate(self._file, 0, mmap.PAGESIZE)
            return mmap.mmap(self._file, mmap.PAGESIZE)
        except OSError as error:
            log.warning(
                "rocksdb %s: mapping %s into memory failed (%s): the next start will not detect writes lost "
                "from the end of the write-ahead log; move tiers.rocksdb.path to a local file system",
                self._path, _FILE, error,
            )  # fmt: skip
            return mmap.mmap(-1, mmap.PAGESIZE)

    def _list(self) -> None:
        """Write the list of log files. On a full disk the previous list stays."""
        about = json.dumps(self._about | {"logs": log_files(self._path)})
        with suppress(OSError):
            os.pwrite(self._file, f"{about}\n".encode(), _NUMBER_BYTES)


def read_acknowledged(path: Path) -> AcknowledgedRecord | None:
    """Read the record of the database at ``path``; None if it is missing or another database's."""
    try:
        record = (path / _FILE).read_bytes()
        found = json.loads(record[_NUMBER_BYTES:].partition(b"\n")[0])
        if found["identity"] != _text(path / "IDENTITY"):
            return None
        sequence = int.from_bytes(record[:_NUMBER_BYTES], sys.byteorder)
        return AcknowledgedRecord(sequence, found["logs"], found["boot"] == _text(_BOOT))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def has_writer(path: Path) -> bool:
    """Return whether a primary has the database at ``path`` open, if that can be determined."""
    try:
        return is_locked(path / _FILE)
    except FileNotFoundError:
        return False
    except OSError:  # a file system without locks
        return True


def log_files(path: Path) -> dict[str, int]:
    """Return names and lengths of the log files, oldest first."""
    found = {}
    with os.scandir(path) as files:
        for file in files:
            if file.name.endswith(".log") and file.name[:-4].isdigit():
                with suppress(FileNotFoundError):
                    found[file.name] = file.stat().st_size
    return dict(sorted(found.items()))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
