"""Mapped tables on the fast path: those whose files fit in memory are read there by lookups."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from hps.cgroups import memory_limit
from hps.config import Settings
from hps.errors import HpsError, ModelError
from hps.native.mapped_format import HEADER_BYTES
from hps.node.mapped_files import damaged_mapped_file
from hps.threads import rest
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.mapped.overlaid_table import OverlaidTable
from hps.tiers.mapped.verified_files import VerifiedFiles
from hps.types import EmbeddingTable, KeyArray

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Hashable)
Pending = tuple[EmbeddingTable, KeyArray | None]
"""A table whose file is to be read into memory, and its hot keys, which come first."""
_CHUNK_BYTES = 64 << 20
_CHUNK_KEYS = 1 << 16
# From this share of its pages in memory, a file is read on the fast path at once.
_RESIDENT = 0.999


class MappedMemory:
    """Puts mapped tables of ``cache`` on its fast path once their files are in memory.

    ``find`` returns a table's mapped file and bits; None if there is none that lookups may read directly. The
    files together take at most ``budget`` bytes; further tables are read through the stores until others
    are released. ``verified``: files that need not be verified again. Thread-safe."""

    def __init__(
        self,
        cache: CpuCache,
        find: Callable[[EmbeddingTable], OverlaidTable | None],
        budget: int,
        verified: VerifiedFiles | None = None,
    ) -> None:
        self._cache, self._find = cache, find
        self._verified = VerifiedFiles() if verified is None else verified
        self._budget = self._left = budget
        self._admitted: dict[EmbeddingTable, OverlaidTable] = {}
        self._waiting: dict[EmbeddingTable, None] = {}  # for memory of others, in this order
        # The thread that frees a replaced version releases its tables while a load admits others.
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def fitting(self, tables: Iterable[EmbeddingTable]) -> set[EmbeddingTable]:
        """The tables that `admit` would reserve memory for, in this order, or has; if the cache has them."""
        with self._lock:
            left, admitted = self._left, set(self._admitted)
        new = {t: self._find(t) for t in tables if t not in admitted}
        sizes = {t: mapped.file.header.bytes for t, mapped in new.items() if mapped is not None}
        return {*admitted, *fitting_tables(sizes, left)}

    def admit(self, table: EmbeddingTable) -> bool:
        """Reserve memory for a table's file; return whether its rows are to be read from there.

        False: a table whose file fits the budget alone waits until others are released."""
        with self._lock:
            return self._admit(table)

    def _admit(self, table: EmbeddingTable) -> bool:
        if table in self._admitted:
            return True
        self._waiting.pop(table, None)
        mapped = self._find(table) if self._cache.capacity(table) else None
        if mapped is None or (size := mapped.file.header.bytes) > self._budget:
            return False
        if size > self._left:
            self._waiting[table] = None
            return False
        self._left -= size
        self._admitted[table] = mapped
        return True

    def waiting(self, tables: Iterable[EmbeddingTable]) -> list[EmbeddingTable]:
        """Those of ``tables`` that wait for memory which other tables have."""
        with self._lock:
            return [table for table in tables if table in self._waiting]

    def is_resident(self, table: EmbeddingTable) -> bool:
        """True if the file of an admitted table is in memory."""
        return self._admitted[table].file.resident() >= _RESIDENT

    def bytes(self, table: EmbeddingTable) -> int:
        """The length of the file of an admitted table."""
        return self._admitted[table].file.header.bytes

    def map(self, table: EmbeddingTable) -> None:
        """Put an admitted table on the fast path, unless it is there or was released."""
        with self._lock:
            mapped = self._admitted.get(table)
            if mapped is None or self._cache.is_mapped(table):
                return
            try:
                self._cache.map_table(table, mapped)
            except OSError as error:  # no space for its bits
                log.warning("table %s is not read from memory: %r", table.id, error)

    def load(
        self, table: EmbeddingTable, hot: KeyArray | None = None, *, verify: bool = False
    ) -> None:
        """Read the file of an admitted table into memory, pages of ``hot`` keys first, and `map` it.

        ``verify``: raise ModelError if a block of the table's files is damaged; no rows are marked then."""
        mapped = self._admitted[table]
        try:
            for _ in self._steps(mapped, hot, verify=verify):
                if self._closed.is_set():
                    return
                rest(without_lock=True)
        except ModelError as error:
            raise damaged_mapped_file(table, error) from error
        self.map(table)

    def load_later(self, pending: Sequence[Pending]) -> None:
        """Like `load`, for several tables, on a thread."""
        with self._lock:
            if not pending or self._closed.is_set():
                return
            thread = threading.Thread(
                target=self._run, args=(pending,), name="hps-mapped-memory", daemon=True
            )
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]
            thread.start()

    def release(self, tables: Iterable[EmbeddingTable]) -> None:
        """Free the memory reserved for ``tables``, and admit and load those that wait for it.

        Call it before the tables leave the cache: they are not mapped there any more."""
        with self._lock:
            for table in tables:
                self._waiting.pop(table, None)
                mapped = self._admitted.pop(table, None)
                if mapped is not None:
                    self._left += mapped.file.header.bytes
            admitted = [table for table in [*self._waiting] if self._admit(table)]
        for table in admitted:
            log.info("table %s: its mapped file fits in memory now, reading it", table.id)
        self.load_later([(table, None) for table in admitted])

    def close(self) -> None:
        """Stop the threads. Close this before the cache and the stores."""
        with self._lock:
            self._closed.set()
        for thread in self._threads:
            thread.join()

    def _run(self, pending: Sequence[Pending]) -> None:
        for table, hot in pending:
            try:
                self.load(table, hot)
            except KeyError:
                continue  # released meanwhile
            except HpsError as error:
                log.warning("table %s was not read into memory: %s", table.id, error)

    def _steps(
        self, mapped: OverlaidTable, hot: KeyArray | None, *, verify: bool
    ) -> Iterator[None]:
        for start in range(0, 0 if hot is None else len(hot), _CHUNK_KEYS):
            assert hot is not None
            mapped.populate(hot[start : start + _CHUNK_KEYS])
            yield
        end = int(mapped.file.header.fields["checksums"])
        # The index first: every lookup reads it.
        first = int(mapped.file.header.fields["parts"])
        mapped.load(first, end)
        # Each chunk is verified and mapped before the next one: a large file is read from the disk once.
        checks = self._verify(mapped) if verify else iter(())
        verified = 0
        for begin in range(HEADER_BYTES, first, _CHUNK_BYTES):
            until = min(begin + _CHUNK_BYTES, first)
            while verified < until:
                verified = next(checks, until)
                yield
            mapped.load(begin, until)
            yield
        for _ in checks:  # the index, and the delta
            yield

    def _verify(self, mapped: OverlaidTable) -> Iterator[int]:
        """Verify a table's files; yields as `VerifiedFiles.verify` does for the first one."""
        for file in mapped.files:
            yield from self._verified.verify(file)


def fitting_tables(sizes: Mapping[T, int], budget: int) -> list[T]:
    """The tables whose mapped files lookups read directly: those that fit ``budget`` bytes, in their order.

    ``sizes``: the bytes of each table's file."""
    found = []
    for table, size in sizes.items():
        if size <= budget:
            budget -= size
            found.append(table)
    return found


def memory_budget(settings: Settings) -> int:
    """The bytes of mapped files that are read on the fast path: as set, or half of the memory limit."""
    chosen = settings.tiers.mapped.memory_bytes
    return memory_limit() // 2 if chosen is None else chosen
