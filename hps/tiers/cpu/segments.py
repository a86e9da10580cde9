"""The CPU cache's tables as files in shared memory: who owns them, who reads them, what becomes of them.

``<folder>/hps.<name>/`` has a file per table; ``tables.json``, replaced whole, tells which; ``owner.json``
who may write; ``readers/`` has a file per process that reads. The owner holds a lock on ``owner.lock`` and
each reader on its own file, which the kernel drops when they end: so a killed container is known for dead
by its successor, whose process numbers are others. What a dead owner left is removed by the next one, or
taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hps.errors import ConfigError
from hps.native import CacheTable
from hps.tiers.file_lock import FileLock, is_locked
from hps.types import EmbeddingTable, Source

SHARED_MEMORY = Path("/dev/shm")
Entry = dict[str, Any]


def _size(file: Path) -> int:
    """In bytes; 0 when it has been removed meanwhile, with its table."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def catalog(path: Path) -> dict[str, Entry]:
    """The tables in the folder, by their ids; empty when there is no such folder."""
    return _read(path / "tables.json")


def attach(path: Path, table: EmbeddingTable, entry: Entry) -> CacheTable:
    """The table of ``entry``. Raises OSError when it has gone, ValueError when it is another."""
    from hps.native import _core

    if (entry["dim"], entry["dtype"]) != (table.dim, table.dtype.str):
        raise ValueError(
            f"the shared cache has table {table.id} with dim {entry['dim']} and {entry['dtype']}, not "
            f"{table.dim} and {table.dtype.str}"
        )
    file = os.open(path / entry["file"], os.O_RDWR | os.O_CLOEXEC)
    try:
        like = np.empty((0, table.dim), table.dtype)
        return _core.CacheTable.attach(file, like, int(Source.CPU))  # type: ignore[return-value]
    finally:
        os.close(file)


class Segments:
    """The owner's side. Raises ConfigError when a living process owns ``name``. ``take_over``: keep the
    tables of an owner that died, as it left them, where they are to be just like that."""

    def __init__(self, name: str, folder: Path = SHARED_MEMORY, *, take_over: bool = False) -> None:
        self.name, self.folder = name, folder
        self.path = folder / f"hps.{name}"
        self._entries: dict[EmbeddingTable, Entry] = {}
        self._left: dict[str, Entry] = {}
        self._showing = threading.Lock()  # one thread may drop a table while another makes one
        try:
            with _locked(self.path):
                self._claim(take_over)
        except OSError as error:
            raise ConfigError(
                f"the shared cache can't be made in {folder}: {error.strerror}; see "
                "tiers.cpu_cache.shared.folder"
            ) from error

    def _claim(self, take_over: bool) -> None:
        try:
            self._lock = FileLock(self.path / "owner.lock")
        except BlockingIOError:
            owner = _read(self.path / "owner.json").get("pid", "unknown")
            raise ConfigError(
                f"the shared cache {self.name!r} belongs to process {owner} (as its container numbers it), "
                "which runs; give this node another tiers.cpu_cache.shared.name"
            ) from None
        try:
            self._remove_former(take_over)
            self._owner = {"pid": os.getpid(), "claim": secrets.token_hex(8)}
            _write(self.path / "owner.json", self._owner)
        except BaseException:
            self._lock.release()
            raise

    def _remove_former(self, take_over: bool) -> None:
        self._left = catalog(self.path) if take_over else {}
        kept = {entry["file"] for entry in self._left.values()}
        for file in self.path.glob("*.table"):
            if file.name not in kept:
                file.unlink()
        if not take_over:
            (self.path / "tables.json").unlink(missing_ok=True)

    def taken_over(self, table: EmbeddingTable, rows: int, eviction: str) -> CacheTable | None:
        """The table as a dead owner left it, mended."""
        entry = self._left.pop(table.id, None)
        if entry is None:
            return None
        asked = (rows, eviction, table.dim, table.dtype.str)
        if (entry["rows"], entry["eviction"], entry["dim"], entry["dtype"]) == asked:
            with contextlib.suppress(OSError, ValueError):
                held = attach(self.path, table, entry)
                held.mend()
                self._entries[table] = entry
                self.publish(table)
                return held
        (self.path / entry["file"]).unlink(missing_ok=True)
        return None

    def check_room(self, size: int, what: str) -> None:
        """Raise ConfigError when ``size`` bytes don't fit into the folder."""
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if size > free:
            raise ConfigError(
                f"{what} takes {size:,} bytes, and {self.folder} has {free:,} bytes free; enlarge it "
                "(mount -o remount,size=..., docker run --shm-size, an emptyDir of medium Memory) or "
                "lower the cache's capacity_bytes, share or cache_rows"
            )

    def create(self, table: EmbeddingTable, rows: int, eviction: str) -> int:
        """An open file for a new table, which is shown to others by `publish`."""
        name = f"{secrets.token_hex(8)}.table"  # never used before: by it others see what is new
        self._entries[table] = {
            "file": name,
            "rows": rows,
            "eviction": eviction,
            "dim": table.dim,
            "dtype": table.dtype.str,
        }
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def publish(self, table: EmbeddingTable) -> None:
        """Show ``table`` to those who attach, in place of one with its id."""
        with self._showing:
            shown = _read(self.path / "tables.json")
            replaced = shown.get(table.id)
            shown[table.id] = self._entries[table]
            _write(self.path / "tables.json", shown)
        if replaced and replaced["file"] != shown[table.id]["file"]:
            (self.path / replaced["file"]).unlink(missing_ok=True)

    def drop(self, table: EmbeddingTable) -> None:
        """Take ``table`` back from those who attach, but not one that has taken its place; who has it keeps
        the memory until it looks again."""
        entry = self._entries.pop(table, None)
        if entry is None:
            return
        with self._showing:
            shown = _read(self.path / "tables.json")
            if shown.get(table.id) == entry:
                del shown[table.id]
                _write(self.path / "tables.json", shown)
        (self.path / entry["file"]).unlink(missing_ok=True)

    def facts(self) -> dict[str, Any]:
        """Where it is, its size, its owner, and how many processes read it."""
        size = sum(map(_size, self.path.glob("*.table")))
        owner = self._owner["pid"]
        return {"path": str(self.path), "bytes": size, "owner": owner, "readers": self._readers()}

    def _readers(self) -> int:
        living = 0
        for file in self.path.glob("readers/[!.]*"):  # not those being written
            with contextlib.suppress(FileNotFoundError):
                if is_locked(file):
                    living += 1
                else:
                    file.unlink()
        return living

    def close(self) -> None:
        """Remove everything. Who is attached keeps what it has until it looks again. Idempotent; does
        nothing in a fork of the owner, and when another process has taken over."""
        if os.getpid() == self._owner["pid"] and self._owner == _read(self.path / "owner.json"):
            with contextlib.suppress(FileNotFoundError), _locked(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


class CacheReaderLock:
    """This process as a reader of ``path``, for the owner to count. Raises OSError."""

    def __init__(self, path: Path) -> None:
        folder, name = path / "readers", f"{os.getpid()}-{secrets.token_hex(8)}"
        folder.mkdir(exist_ok=True)
        hidden = folder / f".{name}"
        self._lock = FileLock(hidden)
        self._file = hidden.rename(folder / name)  # locked before the owner sees it

    def close(self) -> None:
        self._file.unlink(missing_ok=True)
        self._lock.release()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Meanwhile nobody else claims or removes ``path``, which is there."""
    while True:
        path.mkdir(mode=0o700, parents=False, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path / "lock").st_ino == os.fstat(lock).st_ino:
                    yield
                    return
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a fork may hold the descriptor, too
            os.close(lock)


def _read(path: Path) -> dict[str, Any]:
    """What the file says; nothing when it isn't there."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, value: dict[str, Any]) -> None:
    """Replaced whole: whoever reads it, or dies here, finds the old one or the new one."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(value))
    new.replace(path)
