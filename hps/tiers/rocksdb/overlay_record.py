"""Overlay records: tables whose rows are in a mapped file, with newer rows and deletions in RocksDB.

The record is in the column family ``default`` under ``overlay:<column family>``, and written before the first
row. Every entry of such a table was decided by the version rule against the file, so it hides the file's row
of its key, also a tombstone that has expired. A bulk load of the table removes the record."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rocksdict import Rdict

from hps.tiers.rocksdb.load_record import LoadRecord


@dataclass(frozen=True, slots=True)
class OverlayRecord:
    """The mapped file ``path`` of a table, and ``load``, which describes its rows as if they were loaded.

    ``delta``: a second mapped file, with rows that replace some of the first one's."""

    load: LoadRecord
    path: Path
    delta: Path | None = None


class OverlayRecords:
    """The overlay records of all tables."""

    def __init__(self, db: Callable[[], Rdict]) -> None:
        self._db = db

    def get(self, family: str) -> OverlayRecord | None:
        text = self._db().get(overlay_key(family))
        if text is None:
            return None
        stored = json.loads(text)
        delta = stored.get("delta")
        path = Path(stored["path"])
        return OverlayRecord(LoadRecord(**stored["load"]), path, delta and Path(delta))

    def put(self, family: str, record: OverlayRecord) -> None:
        value = {"load": asdict(record.load), "path": str(record.path)}
        if record.delta is not None:
            value["delta"] = str(record.delta)
        self._db().put(overlay_key(family), json.dumps(value).encode())


def overlay_key(family: str) -> bytes:
    """Return the key of a table's overlay record."""
    return f"overlay:{family}".encode()
