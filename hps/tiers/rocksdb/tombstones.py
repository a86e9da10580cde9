"""Index of tombstones by age, to find and remove the expired ones.

RocksDB could drop them in a compaction filter, but its Python binding does not offer one. So each tombstone
has an index entry in the column family ``default``, written in the same batch: key ``dead:<column
family>:``, then version and code, both big-endian; no value. If the key is written again, the entry becomes
stale; it is removed when it expires."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import repeat

import numpy as np
from numpy.typing import NDArray
from rocksdict import Rdict, WriteBatch

from hps.tiers.rocksdb.layout import CodeArray
from hps.types import VersionArray

_ENTRY = np.dtype([("version", ">u8"), ("code", ">u8")])
_NONE = 2**64


class TombstoneIndex:
    """The index of one column family. Not thread-safe."""

    def __init__(self, db: Callable[[], Rdict], family: str) -> None:
        self._db = db
        self._prefix = f"dead:{family}:".encode()
        # No entry is older than this version; unknown at the start.
        self._oldest = 0

    def note(self, batch: WriteBatch, code: CodeArray, versions: VersionArray) -> None:
        """Add to ``batch``, which writes these tombstones, their index entries."""
        entries = np.empty(len(code), _ENTRY)
        entries["version"], entries["code"] = versions, code
        keys = map(self._prefix.__add__, entries.view(f"V{_ENTRY.itemsize}").tolist())
        deque(map(batch.put, keys, repeat(b"")), 0)
        self._oldest = min(self._oldest, int(versions.min()))

    def expired(self, before: int, most: int) -> NDArray[np.void]:
        """Return the ``most`` oldest entries of versions below ``before``, by version and code.

        The caller must remove them: the next search begins after them."""
        found: list[bytes] = []
        if before > self._oldest:
            start = len(self._prefix)
            # Start at the last position: from the beginning, RocksDB would scan all entries removed before.
            at = self._db().iter()
            at.seek(self._prefix + self._oldest.to_bytes(8, "big"))
            self._oldest = _NONE
            while at.valid() and (key := at.key()).startswith(self._prefix):
                version = int.from_bytes(key[start : start + 8], "big")
                if version >= before or len(found) == most:
                    self._oldest = version
                    break
                found.append(key[start:])
                at.next()
            at.status()
        return np.frombuffer(b"".join(found), _ENTRY)

    def remove(self, batch: WriteBatch, entries: NDArray[np.void]) -> None:
        """Add to ``batch`` the removal of these expired entries."""
        keys = map(self._prefix.__add__, entries.view(f"V{_ENTRY.itemsize}").tolist())
        deque(map(batch.delete, keys), 0)

    def clear(self) -> None:
        self._db().delete_range(self._prefix, self._prefix + b"\xff" * (_ENTRY.itemsize + 1))
        self._oldest = _NONE
