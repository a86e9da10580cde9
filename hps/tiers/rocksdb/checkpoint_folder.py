"""Checkpoints that are kept in a folder, named by the time they were made: what new nodes begin with.

The folder may be on another file system, as one that several nodes share. A checkpoint is first made of links
beside the database, in a moment, then copied: RocksDB's binding holds the interpreter lock while it
copies files itself.
"""

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
    """Of the database at ``path``, in ``folder``; ``make`` copies the database to a folder. Any number of
    threads may call it."""

    def __init__(self, folder: Path, path: Path, make: Callable[[Path], None]) -> None:
        self.folder = folder
        self._beside = path.with_name(f".{path.name}.checkpoint")
        self._make = make
        self._busy = threading.Lock()

    def add(self, keep: int, now: Callable[[], float] = time.time) -> Path:
        """Make one, then remove all but the newest ``keep``. Raises TierError, or Unavailable while
        another one is being made."""
        if not self._busy.acquire(blocking=False):
            raise Unavailable("a checkpoint is being made already; ask again when it is there")
        try:
            target = self.folder / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now()))
            shutil.rmtree(self._beside, ignore_errors=True)  # of an attempt that was killed
            self._make(self._beside)
            move_checkpoint(self._beside, target)
            for old in complete_checkpoints(self.folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
            return target
        finally:
            self._busy.release()


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first; none where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(each for each in folder.iterdir() if each.is_dir() and each.name[0] != ".")


def bootstrap(folder: Path, path: Path) -> Path | None:
    """Make the database ``path`` from the newest checkpoint in ``folder`` that is whole. Returns which, or
    None where the database is there already or there is no checkpoint. Raises TierError when none of
    them can be restored."""
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
