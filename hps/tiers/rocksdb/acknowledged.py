"""Record of acknowledged writes, kept beside the database to detect a write-ahead log that lost some.

RocksDB replays what it finds of its log: a log file that was cut or removed looks like one that was never
longer. RocksDB numbers its writes, so the file `hps-acknowledged` holds the number of the last write that was
acknowledged, and the names and lengths of the log files as of at most a second before it. Like the log it
is written without fsync: it survives ``kill -9``.

Format: 20 decimal digits (the number), a newline, one line of JSON padded with spaces.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_FILE = "hps-acknowledged"
_DIGITS = 20
_LIST_EVERY_S = 1.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Noted:
    """The record of an earlier process: the last acknowledged ``sequence`` number, the length of each log
    file by its name, and whether the machine has run without a restart since."""

    sequence: int
    logs: dict[str, int]
    same_boot: bool

    @property
    def newest(self) -> str:
        """The name of the log file that the last of these writes are in."""
        return max(self.logs, default="")


class Acknowledged:
    """Writes the record of one open database. One thread at a time."""

    def __init__(self, path: Path, sequence: int) -> None:
        self._path = path
        self._about = {"identity": _text(path / "IDENTITY"), "boot": _text(_BOOT)}
        self._length = 0
        self._file = os.open(path / _FILE, os.O_WRONLY | os.O_CREAT, 0o660)
        self._listed = 0.0
        self.note(sequence)

    def note(self, sequence: int) -> None:
        """Record that every write up to ``sequence`` is acknowledged: 3 µs. A disk that refuses this, and has
        taken the write itself, keeps an older record."""
        with suppress(OSError):
            os.pwrite(self._file, b"%020d" % sequence, 0)
            if (now := time.monotonic()) - self._listed > _LIST_EVERY_S:
                self._listed = now
                self._list()

    def close(self) -> None:
        """To be called once the database is closed."""
        with suppress(OSError):
            self._list()
        os.close(self._file)

    def _list(self) -> None:
        about = json.dumps(self._about | {"logs": log_files(self._path)})
        self._length = max(self._length, len(about))
        os.pwrite(self._file, f"\n{about.ljust(self._length)}\n".encode(), _DIGITS)


def noted(path: Path) -> Noted | None:
    """The record beside the database at ``path``; None where there is none, or that of another database."""
    try:
        digits, about = (path / _FILE).read_text().split("\n")[:2]
        found = json.loads(about)
        if found["identity"] != _text(path / "IDENTITY"):
            return None
        return Noted(int(digits), found["logs"], found["boot"] == _text(_BOOT))
    except (OSError, ValueError, KeyError):
        return None


def log_files(path: Path) -> dict[str, int]:
    """Names and lengths of the log files, oldest first."""
    found = {}
    with os.scandir(path) as files:
        for file in files:
            if file.name.endswith(".log") and file.name[:-4].isdigit():
                with suppress(FileNotFoundError):
                    found[file.name] = file.stat().st_size
    return dict(sorted(found.items()))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
