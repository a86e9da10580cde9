"""Checkpoints: a consistent copy of a database while it is served, and the way back.

A checkpoint is a database folder itself: table files are hard links where the file system allows it (they
are never changed), else copies. Load records, stream positions and tombstones lie in the database, so they
travel with it. Both directions work in a folder beside the target, which gets its name when everything is
there: a crash leaves the target as it was, and what it left beside it is removed by the next attempt.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rocksdict import Checkpoint

from hps.errors import TierError
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
    NAME,
    full_disk,
    is_full,
    nearest_folder,
    translate_rocksdb_error,
)

_MEND = "Free some, or name a folder on another disk; the database itself is as it was"
_TABLE_FILES = {".sst", ".blob"}


def checkpoint(database: RocksDbDatabase, folder: Path) -> None:
    """Copy the open ``database`` to ``folder``, which must be empty or not exist."""
    with database.errors():
        database.writable()
        _refuse_contents(folder, "a checkpoint")
        part = _part(folder)
        # RocksDB's binding holds the interpreter lock during a checkpoint: what takes long is done before.
        database.flush()
        try:
            Checkpoint(database.db).create_checkpoint(str(part))
            part.chmod(part.stat().st_mode & PRIVATE)
            _publish(part, folder)
        except Exception as error:
            shutil.rmtree(part, ignore_errors=True)
            if is_full(error):
                raise full_disk(folder, 0, str(error), _MEND) from error
            if isinstance(error, OSError):
                raise translate_rocksdb_error(error, folder) from error
            raise


def restore(folder: Path, path: Path) -> None:
    """Make the database ``path`` from the checkpoint ``folder``. ``path`` must be empty or not exist, so
    it cannot be open either. Raises TierError; a damaged checkpoint is refused."""
    folder, path = Path(folder), Path(path)
    if not existing_families(folder):
        raise TierError(NAME, f"{folder} holds no checkpoint: there is no database in it")
    _refuse_contents(path, "a restored database")
    part = _part(path)
    try:
        make_private(part, exist_ok=False)
        _copy(folder, part, path)
        _check(part, folder)
        _publish(part, path)
    except OSError as error:
        raise translate_rocksdb_error(error, path) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def move_checkpoint(made: Path, folder: Path) -> None:
    """Put the checkpoint ``made`` at ``folder``, on whichever disk that is. ``made`` is gone afterwards,
    however it ends. Raises TierError."""
    try:
        _refuse_contents(folder, "a checkpoint")
        part = _part(folder)
        try:
            make_private(part, exist_ok=False)
            _copy(made, part, folder)
            _publish(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise translate_rocksdb_error(error, folder) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _copy(folder: Path, part: Path, path: Path) -> None:
    """Link table files where possible; copy what the database will write to."""
    for file in sorted(folder.iterdir()):
        if not file.is_file() or file.name == "LOCK":
            continue
        target = part / file.name
        if file.suffix in _TABLE_FILES:
            try:
                os.link(file, target)
                continue
            except OSError:
                needed, free = file.stat().st_size, shutil.disk_usage(nearest_folder(part)).free
                if needed > free:
                    raise full_disk(path, needed, f"copying {file}") from None
        shutil.copyfile(file, target)
        _sync(target)


def _check(part: Path, folder: Path) -> None:
    """Open it for reading, which finds missing and truncated files."""
    try:
        opened = DatabaseHandle(OpenSettings(part, "read_only", RocksDbTuning()))
        opened.close()
    except TierError as error:
        raise TierError(NAME, f"the checkpoint {folder} cannot be restored: {error}") from error


def _refuse_contents(folder: Path, what: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TierError(
            NAME,
            f"{folder} is not an empty folder; {what} is never put over what is there: name another "
            "one, or move this one away",
        )


def _part(folder: Path) -> Path:
    """The folder beside ``folder`` to work in, on the same file system; what a killed attempt left there
    is removed."""
    part = folder.parent / f".{folder.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    make_private(folder.parent)
    return part


def _publish(part: Path, folder: Path) -> None:
    _sync(part)
    # Takes the place of an empty folder as well.
    part.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
