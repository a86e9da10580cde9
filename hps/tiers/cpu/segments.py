"""Files of the CPU cache in shared memory, with their owner and readers.

``<folder>/hps.<name>/`` has a file per table, and two with marks and counts of each that is mapped;
``tables.json``, always replaced as a whole, lists them; ``owner.json`` names the process that may write;
``readers/`` has a file per reading process. The owner holds a lock on ``owner.lock``, and each reader one on
its own file. The kernel releases a lock when its process ends, so a new owner detects a killed one even from
another container, where PIDs differ. The new owner removes or takes over the files of the dead one."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import ConfigError
from hps.native import CacheTable
from hps.native.mapped_format import MappedFile, open_mapped
from hps.tiers.cpu.use_counts import UseCounts
from hps.tiers.file_lock import FileLock, is_locked
from hps.types import EmbeddingTable, Source

if TYPE_CHECKING:
    from hps.tiers.mapped.overlaid_table import OverlaidTable

SHARED_MEMORY = Path("/dev/shm")
_BLOCK = 512  # of st_blocks, which counts what is allocated
Entry = dict[str, Any]


def catalog(path: Path) -> dict[str, Entry]:
    """Return the tables of the folder by their IDs; empty if the folder is missing."""
    return _read(path / "tables.json")


def attach(path: Path, table: EmbeddingTable, entry: Entry) -> CacheTable:
    """Attach to the table of ``entry``.

    Raises OSError if it is gone, ValueError if its dim or dtype differs from ``table``."""
    from hps.native import _core

    if (entry["dim"], entry["row_format"]) != (table.dim, table.row_format.name):
        raise ValueError(
            f"the shared cache has table {table.id} with dim {entry['dim']} of {entry['row_format']}, not "
            f"{table.dim} of {table.row_format.name}"
        )
    file = os.open(path / entry["file"], os.O_RDWR | os.O_CLOEXEC)
    try:
        like = np.empty((0, table.row_width), table.row_dtype)
        code = table.row_format.code
        return _core.CacheTable.attach(file, like, int(Source.CPU), code)  # type: ignore[return-value] # its twin has the same methods
    finally:
        os.close(file)


def attach_mapped(path: Path, table: EmbeddingTable, entry: Entry) -> tuple[MappedFile, UseCounts]:
    """Map the file of the ``mapped`` entry of a table, with the owner's marks and counts of its rows.

    Raises OSError if these are gone, ValueError or ModelError if the file is not the owner's."""
    bits: Any = np.memmap(path / entry["marks"], np.uint64, "r")
    file = open_mapped(Path(entry["path"]), entry["version"], int(Source.CPU), bits)
    header = file.header
    if not header.is_of(entry["digest"], table):
        raise ValueError(f"{header.path} is not the file that the owner maps for table {table.id}")
    return file, UseCounts(file.table, np.memmap(path / entry["uses"], np.uint8, "r+"))


class Segments:
    """The shared cache's folder, as its owner uses it.

    Raises ConfigError if a running process owns ``name``. ``take_over``: keep the unchanged tables of a
    dead owner."""

    def __init__(self, name: str, folder: Path = SHARED_MEMORY, *, take_over: bool = False) -> None:
        self.name, self.folder = name, folder
        self.path = folder / f"hps.{name}"
        self._entries: dict[EmbeddingTable, Entry] = {}
        self._leftovers: dict[str, Entry] = {}
        self._publish_lock = threading.Lock()  # one thread may drop a table while another makes one
        try:
            with _locked(self.path):
                self._claim(take_over)
        except OSError as error:
            raise ConfigError(
                f"cannot create the shared cache in {folder}: {error.strerror}; see "
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
            self._remove_leftovers(take_over)
            self._owner = {"pid": os.getpid(), "claim": secrets.token_hex(8)}
            _write(self.path / "owner.json", self._owner)
        except BaseException:
            self._lock.release()
            raise

    def _remove_leftovers(self, take_over: bool) -> None:
        self._leftovers = catalog(self.path) if take_over else {}
        kept = {entry["file"] for entry in self._leftovers.values()}
        for file in self.path.glob("*.table"):
            if file.name not in kept:
                file.unlink()
        for file in self.path.glob("*.marks"):
            _hide_all_rows(file)
            file.unlink()
        for file in (*self.path.glob("*.uses"), *self.path.glob("*.anchor")):
            file.unlink()
        if not take_over:
            (self.path / "tables.json").unlink(missing_ok=True)

    def take_over_table(self, table: EmbeddingTable, rows: int, eviction: str) -> CacheTable | None:
        """Repair and return the table that a dead owner left; None if there is none or it differs."""
        entry = self._leftovers.pop(table.id, None)
        if entry is None:
            return None
        entry.pop("mapped", None)  # the dead owner's
        requested = (rows, eviction, table.dim, table.row_format.name)
        if (entry["rows"], entry["eviction"], entry["dim"], entry["row_format"]) == requested:
            with contextlib.suppress(OSError, ValueError):
                held = attach(self.path, table, entry)
                held.repair()
                self._entries[table] = entry
                self.publish(table)
                return held
        (self.path / entry["file"]).unlink(missing_ok=True)
        return None

    def check_free_space(self, size: int, description: str) -> None:
        """Raise ConfigError if ``size`` bytes don't fit into the folder."""
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if size > free:
            raise ConfigError(
                f"{description} takes {size:,} bytes, and {self.folder} has {free:,} bytes free; enlarge it "
                "(mount -o remount,size=..., docker run --shm-size, an emptyDir of medium Memory) or "
                "lower the cache's capacity_bytes, share or cache_rows"
            )

    def create(self, table: EmbeddingTable, rows: int, eviction: str) -> int:
        """Return an open file for a new table; `publish` makes it visible to readers."""
        name = f"{secrets.token_hex(8)}.table"  # a fresh name: readers recognise a new table by it
        self._entries[table] = {
            "file": name,
            "rows": rows,
            "eviction": eviction,
            "dim": table.dim,
            "row_format": table.row_format.name,
        }
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def share_mapped(self, table: EmbeddingTable, mapped: OverlaidTable) -> NDArray[np.uint8]:
        """Let attached processes read ``table``, which is published, from ``mapped`` first.

        Returns the memory (rows,) for its `UseCounts`. Raises OSError if there is no space."""
        name, header = secrets.token_hex(8), mapped.file.header
        shown: Entry = {
            "path": str(header.path),
            "digest": header.digest,
            "version": mapped.version,
            "marks": f"{name}.marks",
            "uses": f"{name}.uses",
        }
        mapped.marks.link(self.path / shown["marks"])
        with open(self.path / shown["uses"], "xb", opener=_private) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, header.rows))
        uses: NDArray[np.uint8] = np.memmap(self.path / shown["uses"], np.uint8, "r+")
        self._entries[table] = self._entries[table] | {"mapped": shown}
        self.publish(table)
        return uses

    def publish(self, table: EmbeddingTable) -> None:
        """Make ``table`` visible to attached processes, in place of one with the same ID."""
        with self._publish_lock:
            published = _read(self.path / "tables.json")
            replaced = published.get(table.id)
            published[table.id] = self._entries[table]
            _write(self.path / "tables.json", published)
        self._unlink(replaced or {}, published[table.id])

    def drop(self, table: EmbeddingTable) -> None:
        """Hide ``table`` from attached processes, unless another one has replaced it.

        Attached processes keep its memory until their next poll."""
        entry = self._entries.pop(table, None)
        if entry is None:
            return
        with self._publish_lock:
            published = _read(self.path / "tables.json")
            if published.get(table.id) == entry:
                del published[table.id]
                _write(self.path / "tables.json", published)
        self._unlink(entry, {})

    def _unlink(self, entry: Entry, kept: Entry) -> None:
        """Remove the files of ``entry`` that ``kept`` does not name."""
        for name in _files(entry) - _files(kept):
            (self.path / name).unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """Return path, size, owner, and number of reading processes."""
        size, owner = 0, self._owner["pid"]
        for file in (
            f for ending in ("table", "marks", "uses") for f in self.path.glob(f"*.{ending}")
        ):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile, with its table
                size += file.stat().st_blocks * _BLOCK
        return {"path": str(self.path), "bytes": size, "owner": owner, "readers": self._readers()}

    def _readers(self) -> int:
        alive = 0
        for file in self.path.glob("readers/[!.]*"):  # skips files that are being written
            with contextlib.suppress(FileNotFoundError):
                if is_locked(file):
                    alive += 1
                else:
                    file.unlink()
        return alive

    def close(self) -> None:
        """Remove all files. Attached processes keep their memory until their next poll. Idempotent.

        Does nothing in a fork of the owner, or if another process has taken over."""
        if os.getpid() == self._owner["pid"] and self._owner == _read(self.path / "owner.json"):
            with contextlib.suppress(FileNotFoundError), _locked(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


class CacheReaderLock:
    """Registers this process as a reader of ``path``, so that the owner can count it. Raises OSError."""

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
    """Create ``path`` if necessary, and lock out other owners that would claim or remove it."""
    lock: FileLock | None = None
    while lock is None:
        path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another owner has just removed the folder
            lock = FileLock(path / "lock", wait=True)
    try:
        yield
    finally:
        lock.release()


def _files(entry: Entry) -> set[str]:
    """The names of a table's files."""
    mapped = entry.get("mapped", {})
    return {name for name in (entry.get("file"), mapped.get("marks"), mapped.get("uses")) if name}


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _hide_all_rows(marks: Path) -> None:
    """Set all bits of a dead owner's file: processes that are attached to it know no newer rows."""
    with contextlib.suppress(OSError, ValueError):
        words: Any = np.memmap(marks, np.uint8, "r+")
        words[8:] = 255
        words[:8] = 255


def _read(path: Path) -> dict[str, Any]:
    """Return the file's contents; empty if it is missing or invalid."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(path: Path, value: dict[str, Any]) -> None:
    """Replace the file as a whole: readers see the old or the new version, even if this process is killed."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(value))
    new.replace(path)
