"""File stamps: detect that a file was written to while it was in use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hps.errors import ModelError


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Identity of a file's contents: another one after a write or a replacement.

    A replacement of equal length within one tick of the file system's clock is not detected."""

    path: Path
    device: int
    inode: int
    bytes: int
    mtime_ns: int

    @staticmethod
    def of(path: Path) -> FileStamp:
        """Stamp the file at ``path``. Raises OSError."""
        found = os.stat(path)
        return FileStamp(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def __str__(self) -> str:
        return f"{self.device}:{self.inode}:{self.bytes}:{self.mtime_ns}"

    def check(self) -> None:
        """Raise ModelError if the file has changed."""
        try:
            now = FileStamp.of(self.path)
        except OSError as error:
            raise ModelError(
                f"{self.path} disappeared while it was read: {error.strerror}"
            ) from error
        if now != self:
            size = (
                "" if now.bytes == self.bytes else f" ({self.bytes} bytes before, {now.bytes} now)"
            )
            raise ModelError(
                f"{self.path} was changed while it was read{size}; try again when no process writes to it"
            )
