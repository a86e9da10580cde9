"""Record of acknowledged writes, kept beside the database to detect a write-ahead log that lost some.

RocksDB replays what it finds of its log: a log file that was cut or removed looks like one that was never
longer. RocksDB numbers its writes, so the file `hps-acknowledged` holds the number of the last write that was
acknowledged, and the names and lengths of the log files as of at most a second before it. Like the log it
is written without fsync: it survives ``kill -9``.

Format: the number (u64 in the machine's byte order), one line of JSON, zeros up to a page. The page is mapped
into memory, so recording a number is one store of 8 bytes, which no signal interrupts in the middle. A write
call takes 1 to 3 µs and releases the interpreter lock. Disk space for the page is reserved when it is mapped:
storing to it cannot fail later, when the disk is full. A primary holds a lock on the file (`flock`).
"""

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
# A reader holds the lock while it checks whether a primary does.
_LOCK_ATTEMPTS, _LOCK_AGAIN_S = 20, 0.005
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class AcknowledgedRecord:
    """The record of an earlier process: the last acknowledged ``sequence`` number, the length of each log
    file by its name, and whether the machine has run without a restart since."""

    sequence: int
    logs: dict[str, int]
    same_boot: bool

    @property
    def newest(self) -> str:
        """The name of the log file that the last of these writes are in."""
        return max(self.logs, default="")


class AcknowledgedWrites:
    """Writes the record of one open database. One thread at a time."""

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
        """To be called once the database is closed."""
        self._list()
        self._numbers.release()
        self._page.close()
        os.close(self._file)
        if self._lock is not None:
            self._lock.release()

    def _locked(self) -> FileLock | None:
        """The lock by which readers see that a primary writes; None on a file system without locks."""
        for _ in range(_LOCK_ATTEMPTS):
            try:
                return FileLock(self._path / _FILE)
            except BlockingIOError:
                time.sleep(_LOCK_AGAIN_S)
            except OSError:
                break
        return None

    def _map(self) -> mmap.mmap:
        """The file's first page; other memory on a file system that shares none, as some FUSE mounts."""
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
        """Write the list of log files. A disk that is full keeps an older one."""
        about = json.dumps(self._about | {"logs": log_files(self._path)})
        with suppress(OSError):
            os.pwrite(self._file, f"{about}\n".encode(), _NUMBER_BYTES)


def read_acknowledged(path: Path) -> AcknowledgedRecord | None:
    """The record beside the database at ``path``; None where there is none, or that of another database."""
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
    """Whether a primary has the database at ``path`` open, as far as that is known."""
    try:
        return is_locked(path / _FILE)
    except FileNotFoundError:
        return False
    except OSError:  # a file system without locks
        return True


def log_files(path: Path) -> dict[str, int]:
    """Names and lengths of the log files, oldest first."""
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
