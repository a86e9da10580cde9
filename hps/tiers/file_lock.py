"""File locks that show whether their holder is alive, even from another PID namespace."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet


class FileLock:
    """An exclusive `flock` on ``path``, held until `release` or the end of this process.

    The kernel releases it however the process ends. A fork of the process does not hold it."""

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        """Create the file if necessary and lock it; ``wait`` for a process that holds the lock.

        Without ``wait``, raises BlockingIOError for such a process. Raises OSError for other failures."""
        operation = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
        self._file = -1
        while self._file < 0:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, operation)
                # The previous holder may have removed the file before this process locked it.
                with suppress(FileNotFoundError):
                    if os.stat(path).st_ino == os.fstat(file).st_ino:
                        self._file = file
            finally:
                if self._file < 0:
                    os.close(file)
        _held.add(self)

    def release(self) -> None:
        """Release the lock; the file stays. Idempotent."""
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a fork may still have the descriptor open
            self.close()

    def close(self) -> None:
        """Close the descriptor without unlocking: called in a fork, it leaves the lock to the parent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def is_locked(path: Path) -> bool:
    """Return whether a process holds a `FileLock` on ``path``. Raises OSError if the file is missing."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


_held: WeakSet[FileLock] = WeakSet()


def _close_all() -> None:
    """Close the descriptors in a fork; open ones would keep the locks after the parent's end."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_all)
