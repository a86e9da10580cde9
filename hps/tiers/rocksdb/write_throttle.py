"""Write throttle: keeps disk space free, and waits for compactions that fall behind.

A full disk stops writes, not reads; RocksDB itself accepts writes again within five seconds of free space.
RocksDB also stops writes while compactions are too far behind. The binding would hold the interpreter lock
for as long, and so stop every thread of the node. Therefore `write` makes RocksDB reject such a write, and
waits without the lock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rocksdict import Rdict, WriteBatch, WriteOptions

from hps.tiers.rocksdb.errors import full_disk, nearest_folder, rocksdb_error

# The longest time that a batch waits for compactions.
STALL_SECONDS = 10.0
_POLL_SECONDS = 0.005


def _options(*, no_slowdown: bool) -> WriteOptions:
    options = WriteOptions()
    options.no_slowdown = no_slowdown
    return options


_REFUSE, _SLOW = _options(no_slowdown=True), _options(no_slowdown=False)


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """State of a database.

    Bytes of its table files, of the free disk, and the free bytes below which it rejects writes; bytes
    that compactions still have to rewrite; whether writes are stopped now, and bytes/s they are slowed
    down to (0 = not); background jobs that failed since the start; seconds that writes have waited for
    compactions; an upper bound of the acknowledged writes that the start found missing, 1 if unknown;
    damaged table files found since the start."""

    table_bytes: int
    free_bytes: int
    min_free_bytes: int
    pending_compaction_bytes: int
    running_compactions: int
    writes_stopped: bool
    delayed_write_rate: int
    background_errors: int
    stalled_seconds: float
    lost_writes: int
    damaged_files: int


class WriteThrottle:
    """The throttle of one database. `write` is for one thread at a time; the rest is thread-safe."""

    def __init__(self, db: Callable[[], Rdict], path: Path, min_free_bytes: int) -> None:
        self._db = db
        self._path = path
        self._min_free = min_free_bytes
        self._stalled_seconds = 0.0

    def free_bytes(self) -> int:
        disk = os.statvfs(nearest_folder(self._path))
        return disk.f_bavail * disk.f_frsize

    def check(self, needed: int = 0) -> None:
        """Raise TierError if writing ``needed`` bytes would leave less than ``min_free_bytes``."""
        if self._min_free and self.free_bytes() < self._min_free + needed:
            why = f"tiers.rocksdb.min_free_bytes: {self._min_free:,} are kept free"
            raise full_disk(self._path, self._min_free + needed, why)

    def write(self, fill: Callable[[WriteBatch], None]) -> None:
        """Write one batch; ``fill`` may be called twice.

        Raises TierError if compactions don't catch up within ``STALL_SECONDS``."""
        options = _REFUSE
        while True:
            batch = WriteBatch(raw_mode=True)
            fill(batch)
            try:
                self._db().write(batch, options)
                return
            except Exception as error:
                if options is _SLOW or "write stall" not in str(error).lower():
                    raise
            self._wait()
            # From now on RocksDB may slow the write down by some milliseconds, which lets compactions catch
            # up.
            options = _SLOW

    def _wait(self) -> None:
        began = time.monotonic()
        while self._int("is-write-stopped"):
            waited = time.monotonic() - began
            if waited > STALL_SECONDS:
                self._stalled_seconds += waited
                raise rocksdb_error(
                    f"{self._path}: writes have been stopped for {waited:.0f} s, as compactions are "
                    f"behind; write more slowly, or raise tiers.rocksdb.threads",
                )
            time.sleep(_POLL_SECONDS)
        self._stalled_seconds += time.monotonic() - began

    def _int(self, name: str) -> int:
        return int(self._db().property_int_value(f"rocksdb.{name}") or 0)

    def figures(
        self, families: list[Rdict], *, lost_writes: int, damaged_files: int
    ) -> StoreFigures:
        def total(name: str) -> int:
            return sum(int(f.property_int_value(f"rocksdb.{name}") or 0) for f in families)

        return StoreFigures(
            total("total-sst-files-size"),
            self.free_bytes(),
            self._min_free,
            total("estimate-pending-compaction-bytes"),
            self._int("num-running-compactions"),
            bool(self._int("is-write-stopped")),
            self._int("actual-delayed-write-rate"),
            self._int("background-errors"),
            self._stalled_seconds,
            lost_writes,
            damaged_files,
        )
