"""Translation of RocksDB's messages to errors with cause and remedy, such as a lock's owner."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from pathlib import Path

from hps.errors import TierError

NAME = "rocksdb"
_DAMAGE = (
    "corruption",
    "checksum mismatch",
    "no such file",
    "file is too short",
    "truncated record",
    "does not exist (create_if_missing is false)",
    "while stat a file for size",
    "input/output error",
)


class DamagedFileError(TierError):
    """A file of the database is damaged or missing."""

    def __init__(self, message: str) -> None:
        super().__init__(NAME, message)


def rocksdb_error(message: str) -> TierError:
    return TierError(NAME, message)


def translate_rocksdb_error(error: BaseException, path: Path) -> TierError:
    """Translate RocksDB's message to a TierError with the cause and the remedy."""
    text = str(error)
    low = text.lower()
    if "lock hold by current process" in low:
        return rocksdb_error(f"{path} is already open in this process; close what opened it first")
    if "lock file" in low or "resource temporarily unavailable" in low:
        return rocksdb_error(
            f"{path} is locked by {_lock_owner(path)}; a database folder belongs to one node: "
            "stop that process or set tiers.rocksdb.path to another folder",
        )
    if is_full(error):
        return full_disk(path, 0, text)
    if "permission denied" in low or isinstance(error, PermissionError):
        return rocksdb_error(f"no permission for {path}; make it writable for this user ({text})")
    if "read-only file system" in low:
        remedy = "mount it writable, or set tiers.rocksdb.path to a folder that is"
        return rocksdb_error(f"{path} is on a read-only file system; {remedy} ({text})")
    if "too many open files" in low:
        return rocksdb_error(
            f"{path}: too many open files; raise the limit (ulimit -n) to 4 per table ({text})",
        )
    if "not a directory" in low or isinstance(error, (NotADirectoryError, FileExistsError)):
        return rocksdb_error(f"{path} is not a folder ({text})")
    if any(word in low for word in _DAMAGE):
        return DamagedFileError(
            f"{path} is damaged: {text}. Stop the node and run `hps store verify --repair`; if that does not "
            "help, restore the folder from a checkpoint, or remove it: tables are loaded and streams read "
            "again, but rows written by calls are lost with it",
        )
    return rocksdb_error(f"{path}: {text}")


def is_full(error: BaseException) -> bool:
    """Return whether a disk, a quota or a file size limit is exhausted."""
    low = str(error).lower()
    return "no space left" in low or "file too large" in low


_REMEDY = (
    "Free some space, or move tiers.rocksdb.path to a larger disk; rows are still served, and writes resume "
    "by themselves within seconds once there is space"
)


def full_disk(path: Path, needed: int, why: str, remedy: str = _REMEDY) -> TierError:
    """Return the error for a full disk. ``needed``: bytes, 0 if unknown."""
    try:
        free = shutil.disk_usage(nearest_folder(path)).free
    except OSError:
        free = 0
    wanted = f", {needed:,} bytes are needed" if needed else ""
    return rocksdb_error(
        f"{path}: the disk is full: {free:,} bytes are free{wanted}. {remedy} ({why})",
    )


def nearest_folder(path: Path) -> Path:
    """Return ``path`` if it is an existing folder, else its closest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _lock_owner(path: Path) -> str:
    """Return a description of the process that holds the lock, as the kernel reports it.

    Call only if another process holds it: closing the lock file in the owning process releases the lock."""
    try:
        fd = os.open(path / "LOCK", os.O_RDWR)
    except OSError:
        return "another process"
    try:
        layout = "hhqqi4x"
        request = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        _kind, _whence, _start, _len, pid = struct.unpack(
            layout, fcntl.fcntl(fd, fcntl.F_GETLK, request)
        )
    except (OSError, struct.error):
        return "another process"
    finally:
        os.close(fd)
    if pid <= 0:
        return "another process"
    try:
        command = (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (OSError, UnicodeDecodeError):
        return f"process {pid}"
    command = command.strip()
    # 400 characters include the file of `hps serve --config FILE` and still fit a log line.
    return f"process {pid} ({command if len(command) <= 400 else command[:399] + '…'})"
