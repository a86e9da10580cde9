"""Checkpoints: consistent copies of a database made while it is served, and their restore.

A checkpoint is a database folder itself. Its table files, which never change, are hard links if the file
system allows it, else copies. It includes everything in the database: load records, stream positions,
tombstones. Both directions work in a temporary folder next to the target and rename it when complete: a
crash leaves the target unchanged, and the next attempt removes the temporary folder."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rocksdict import Checkpoint

from hps.errors import TierError, Unavailable
from hps.tiers.rocksdb.database import RocksDbDatabase
from hps.tiers.rocksdb.database_handle import DatabaseHandle
from hps.tiers.rocksdb.database_options import (
    PRIVATE,
    OpenSettings,
    RocksDbTuning,
    existing_families,
    make_private,
)
from hps.tiers.rocksdb.errors import (
    full_disk,
    is_full,
    nearest_folder,
    rocksdb_error,
    translate_rocksdb_error,
)

log = logging.getLogger(__name__)

_REMEDY = "Free some space, or name a folder on another disk; the database itself is unchanged"
_TABLE_FILES = {".sst", ".blob"}


def checkpoint(database: RocksDbDatabase, folder: Path) -> None:
    """Copy the open ``database`` to ``folder``, which must be empty or missing."""
    with database.errors():
        database.writable()
        _refuse_contents(folder, "a checkpoint")
        temporary = _temporary_folder(folder)
        # RocksDB's binding holds the interpreter lock during a checkpoint, so slow steps come first.
        database.flush()
        try:
            Checkpoint(database.db).create_checkpoint(str(temporary))
            temporary.chmod(temporary.stat().st_mode & PRIVATE)
            _publish(temporary, folder)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if is_full(error):
                raise full_disk(folder, 0, str(error), _REMEDY) from error
            if isinstance(error, OSError):
                raise translate_rocksdb_error(error, folder) from error
            raise


def restore(folder: Path, path: Path) -> None:
    """Restore the database ``path`` from the checkpoint ``folder``.

    ``path`` must be empty or missing; therefore it cannot be open. Raises TierError, also for a damaged
    checkpoint."""
    folder, path = Path(folder), Path(path)
    if not existing_families(folder):
        raise rocksdb_error(f"{folder} holds no checkpoint: there is no database in it")
    _refuse_contents(path, "a restored database")
    temporary = _temporary_folder(path)
    try:
        make_private(temporary, exist_ok=False)
        _copy(folder, temporary, path)
        _check(temporary, folder)
        _publish(temporary, path)
    except OSError as error:
        raise translate_rocksdb_error(error, path) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def move_checkpoint(made: Path, folder: Path) -> None:
    """Move the checkpoint ``made`` to ``folder``, also across disks.

    ``made`` is removed in any case. Raises TierError."""
    try:
        _refuse_contents(folder, "a checkpoint")
        temporary = _temporary_folder(folder)
        try:
            make_private(temporary, exist_ok=False)
            _copy(made, temporary, folder)
            _publish(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise translate_rocksdb_error(error, folder) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _copy(folder: Path, temporary: Path, path: Path) -> None:
    """Copy the checkpoint into ``temporary``: link table files if possible, copy the other files."""
    for file in sorted(folder.iterdir()):
        if not file.is_file() or file.name == "LOCK":
            continue
        target = temporary / file.name
        if file.suffix in _TABLE_FILES:
            try:
                os.link(file, target)
                continue
            except OSError:
                needed, free = (
                    file.stat().st_size,
                    shutil.disk_usage(nearest_folder(temporary)).free,
                )
                if needed > free:
                    raise full_disk(path, needed, f"copying {file}") from None
        shutil.copyfile(file, target)
        _sync(target)


def _check(temporary: Path, folder: Path) -> None:
    """Open the copy read-only, which detects missing and truncated files."""
    try:
        opened = DatabaseHandle(OpenSettings(temporary, "read_only", RocksDbTuning()))
        opened.close()
    except TierError as error:
        raise rocksdb_error(f"the checkpoint {folder} cannot be restored: {error}") from error


def _refuse_contents(folder: Path, what: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise rocksdb_error(
            f"{folder} is not an empty folder; {what} never overwrites existing files: name another "
            "one, or move this one away",
        )


def _temporary_folder(folder: Path) -> Path:
    """Return an empty temporary folder next to ``folder``, on the same file system.

    Removes the folder of a killed attempt."""
    temporary = folder.parent / f".{folder.name}.part"
    shutil.rmtree(temporary, ignore_errors=True)
    make_private(folder.parent)
    return temporary


def _publish(temporary: Path, folder: Path) -> None:
    _sync(temporary)
    # Replaces an empty folder too.
    temporary.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class CheckpointFolder:
    """Manages the checkpoints in ``folder``, named by their time, of the database at ``path``.

    New nodes start from them. ``folder`` may be on another file system, such as one that several nodes
    share: ``make(target)`` makes a checkpoint of hard links next to the database, which takes a moment, and
    it is then copied. RocksDB's binding must not copy the files: it would hold the interpreter lock
    meanwhile. Thread-safe."""

    def __init__(self, folder: Path, path: Path, make: Callable[[Path], None]) -> None:
        self.folder = folder
        self._hard_links = path.with_name(f".{path.name}.checkpoint")
        self._make = make
        self._busy = threading.Lock()

    def add(self, keep: int, now: Callable[[], float] = time.time) -> Path:
        """Make a checkpoint, then remove all but the newest ``keep``.

        Raises TierError, or Unavailable while another checkpoint is being made."""
        if not self._busy.acquire(blocking=False):
            raise Unavailable("another checkpoint is in progress; retry when it is complete")
        try:
            target = self.folder / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now()))
            shutil.rmtree(self._hard_links, ignore_errors=True)  # left by a killed attempt
            self._make(self._hard_links)
            move_checkpoint(self._hard_links, target)
            for old in complete_checkpoints(self.folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
            return target
        finally:
            self._busy.release()


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first; empty if the folder is missing."""
    if not folder.is_dir():
        return []
    return sorted(each for each in folder.iterdir() if each.is_dir() and each.name[0] != ".")


def bootstrap(folder: Path, path: Path) -> Path | None:
    """Restore the database ``path`` from the newest intact checkpoint in ``folder``.

    Returns that checkpoint; None if the database exists already or there is no checkpoint. Raises TierError
    if no checkpoint can be restored."""
    if existing_families(path):
        return None
    failure: TierError | None = None
    for checkpoint in reversed(complete_checkpoints(folder)):
        try:
            restore(checkpoint, path)
            return checkpoint
        except TierError as error:
            log.warning("%s", error)
            failure = failure or error
    if failure is not None:
        raise failure
    return None
