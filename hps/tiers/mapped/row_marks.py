"""Marks of the rows of a mapped file, in memory that other processes may share."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hps.native import bitmap_words

Bits = NDArray[np.uint64]


class RowMarks:
    """A bit per row, which hides it.

    ``words (bitmap_words(rows),)``: the number of bits that are set, then the bits. ``folder``: of a memory
    file system. The words are then in a file without a name there, which ends with the process; `link`
    gives it one. Raises OSError if the folder has no space or no such files."""

    def __init__(self, rows: int, folder: Path | None = None) -> None:
        self.rows = rows
        n, self._file = bitmap_words(rows), -1
        self._anchor: Path | None = None
        if folder is None:
            self.words: Bits = np.zeros(n, np.uint64)
            return
        self._file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._file, 0, n * 8)  # without space, a write would end the process
        self.words = np.frombuffer(mmap.mmap(self._file, n * 8), np.uint64)

    def link(self, path: Path) -> None:
        """Name the file ``path``, in the same file system. Raises OSError; also if it is in no folder.

        A second name, which ends with this object, stays: without one, the file could get no other."""
        if self._anchor is None:
            anchor = path.with_suffix(".anchor")
            self._link(anchor)
            self._anchor = anchor
        self._link(path)

    def _link(self, path: Path) -> None:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # With a folder, os.link follows the symbolic link in /proc; without one, it does not.
            source = f"/proc/self/fd/{self._file}"
            os.link(source, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(folder)

    def hide_all(self) -> None:
        """Hide every row."""
        self.words[1:] = ~np.uint64(0)
        self.words[0] = self.rows

    def __del__(self) -> None:
        if self._anchor is not None:
            self._anchor.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)
