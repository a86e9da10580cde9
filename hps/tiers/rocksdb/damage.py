"""Damaged table files that reads come across; each is reported once."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

_TABLE_FILE = re.compile(r"(\d+)\.sst\b")
_UNNAMED = "(not named)"


class DamagedFiles:
    """Damaged files of the database at ``path`` that reads have found since it was opened. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tables: dict[str, str] = {}
        self._lock = threading.Lock()
        self.changed: Callable[[], None] = lambda: None
        """Called for each new damaged file, on the thread that found it."""

    def found(self, error: Exception, table_of: Callable[[int], str]) -> None:
        """Record the file that RocksDB's ``error`` names, if any, with its table.

        ``table_of``: returns the table of a file number."""
        named = _TABLE_FILE.search(str(error))
        file = named[0] if named else _UNNAMED
        with self._lock:
            if file in self._tables:
                return
            table = self._tables[file] = table_of(int(named[1]) if named else 0)
        log.error(
            "rocksdb %s: table file %s of table %s is damaged: %s. Rows in the damaged part are answered by "
            "the default, and marked degraded. Stop the node and run `hps store verify --repair`",
            self._path,
            file,
            table,
            str(error),  # text: a stored exception would keep the database alive
        )
        self.changed()

    def add(self, file: Path, table: str) -> bool:
        """Record a damaged file that is not RocksDB's; return False if it is known."""
        with self._lock:
            if str(file) in self._tables:
                return False
            self._tables[str(file)] = table
        return True

    def tables(self) -> dict[str, str]:
        """Return the table of each damaged file that still exists, by file name."""
        with self._lock:
            found = dict(self._tables)
        return {
            file: table
            for file, table in found.items()
            if file == _UNNAMED or (self._path / file).exists()
        }
