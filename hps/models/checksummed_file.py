"""Files whose checksum is computed while they are written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from hps.models.manifest import FileEntry


class ChecksummedFile:
    """A new file whose checksum is computed while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._bytes = 0

    def __enter__(self) -> ChecksummedFile:
        self._file = self._path.open("wb", buffering=0)
        return self

    def write(self, data: Any) -> None:
        """Append an array, or a view of bytes."""
        view = memoryview(data).cast("B") if data.nbytes else memoryview(b"")
        self._digest.update(view)
        self._bytes += len(view)
        while len(view):
            view = view[self._file.write(view) :]

    def __exit__(self, *_exc: object) -> None:
        self._file.close()

    def entry(self) -> FileEntry:
        """The file's entry in a manifest."""
        return FileEntry(bytes=self._bytes, checksum=f"sha256:{self._digest.hexdigest()}")
