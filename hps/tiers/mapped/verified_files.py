"""Mapped files whose block checksums were verified by this process: each is verified once.

Also the checksums of the files that they were made from, which are computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hps.errors import ModelError
from hps.native.mapped_format import BLOCK_BYTES, HEADER_BYTES, MappedFile

_BLOCKS = 8
"""Blocks that are verified at a time."""


class FileStamp(NamedTuple):
    """Identifies a file and its contents: it changes when the file is replaced or written."""

    device: int
    inode: int
    mtime_ns: int
    bytes: int

    @classmethod
    def of(cls, file: MappedFile) -> FileStamp:
        """The stamp of the file that is now under the path of ``file``. Raises OSError."""
        return cls.of_path(file.header.path)

    @classmethod
    def of_path(cls, path: Path) -> FileStamp:
        """The stamp of the file under ``path``. Raises OSError."""
        status = path.stat()
        return cls(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


class VerifiedFiles:
    """Stamps of the files whose blocks all match their checksums. Thread-safe.

    Hard links to a file count as that file."""

    def __init__(self) -> None:
        self._stamps: dict[tuple[int, int], FileStamp] = {}
        self._checksums: dict[tuple[int, int], tuple[FileStamp, str]] = {}

    def __contains__(self, stamp: FileStamp) -> bool:
        return self._stamps.get(stamp[:2]) == stamp

    def add(self, stamp: FileStamp) -> None:
        """Record a file; ``stamp`` must be from before its blocks were verified."""
        self._stamps[stamp[:2]] = stamp

    def verify(self, file: MappedFile) -> Iterator[int]:
        """Verify ``file``, unless that was done; yield the end of what is verified, in bytes, ascending.

        Marks no rows. Raises ModelError for damage, and for a file that cannot be read."""
        header = file.header
        try:
            stamp = FileStamp.of(file)
        except OSError as error:
            raise ModelError(f"cannot read {header.path}: {error.strerror}") from error
        if stamp in self:
            return
        for first in range(0, header.blocks, _BLOCKS):
            if damaged := file.damaged_blocks(first, _BLOCKS):
                raise ModelError(f"{header.path}: wrong checksum in block {damaged[0]}")
            yield HEADER_BYTES + (first + _BLOCKS) * BLOCK_BYTES
        self.add(stamp)

    def checksum(self, path: Path, compute: Callable[[], str]) -> str:
        """Return a file's checksum; ``compute`` is called again once the file was replaced or written.

        Raises OSError."""
        stamp = FileStamp.of_path(path)
        known = self._checksums.get(stamp[:2])
        if known is None or known[0] != stamp:
            known = self._checksums[stamp[:2]] = stamp, compute()
        return known[1]
