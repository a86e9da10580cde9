"""Checkpoints in a folder, named by their time, from which new nodes start.

The folder may be on another file system, such as one that several nodes share. A checkpoint is first
made of hard links next to the database, which takes a moment, and then copied to the folder. RocksDB's
binding must not copy the files: it would hold the interpreter lock meanwhile."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hps.errors import TierError, Unavailable
from hps.tiers.rocksdb.checkpoint import move_checkpoint, restore
from hps.tiers.rocksdb.database_options import existing_families

log = logging.getLogger(__name__)


class CheckpointFolder:
    """Manages the checkpoints in ``folder`` of the database at ``path``. Thread-safe.

    ``make(target)``: a function that makes a checkpoint in the folder ``target``."""

    def __init__(self, folder: Path, path: Path, make: Callable[[Path], None]) -> None:
        self.folder = folder
        self._beside = path.with_name(f".{path.name}.checkpoint")
        self._make = make
        self._busy = threading.Lock()

    def add(self, keep: int, now: Callable[[], float] = time.time) -> Path:
        """Make a checkpoint, then remove all but the newest ``keep``.

        Raises TierError, or Unavailable while another checkpoint is being made."""
        if not self._busy.acquire(blocking=False):
            raise Unavailable("another checkpoint is in progress; retry when it is complete")
        try:
            target = self.folder / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now()))
            shutil.rmtree(self._beside, ignore_errors=True)  # left by a killed attempt
            self._make(self._beside)
            move_checkpoint(self._beside, target)
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
