"""Opening a primary: replay of the write-ahead log, and detection of lost acknowledged writes.

RocksDB alone would accept a log whose end is missing. So the log is replayed with absolute consistency,
which rejects every incomplete record, and the result is compared with the record of acknowledged writes
(`hps.tiers.rocksdb.acknowledged_writes`). Of the writes that are missing:

* A part of one unacknowledged write, left by a killed process, is no loss.
* After a power failure the newest writes may be missing, as docs/model-repository.md says.
* Every other loss is damage, and `OpenSettings.on_lost_writes` decides.

A reader also compares the end of its log with the record, unless a primary is writing, which has
compared it.

Not detected: the loss of a log file, or of its end after a whole record, if the file was made or written to
in the last second before the process ended and is not the newest one. A reader does not detect the loss of
any log file but the newest one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rocksdict import DBRecoveryMode, Options, Rdict

from hps.tiers.rocksdb.acknowledged_writes import AcknowledgedRecord, log_files, read_acknowledged
from hps.tiers.rocksdb.database_options import (
    OpenSettings,
    existing_families,
    open_database,
    open_read_only,
)
from hps.tiers.rocksdb.errors import DamagedFileError, rocksdb_error

log = logging.getLogger(__name__)

_AHEAD = "SST file is ahead of WALs"
_LOSS = (
    "Streamed rows are read from the stream again; rows written by calls are lost: write them again"
)


@dataclass(frozen=True, slots=True)
class LostWrites:
    """Acknowledged writes that are missing.

    ``most``: an upper bound of their number (rows, deletions and the store's own records); None if unknown.
    ``later``: writes from after the lost ones may exist, so stream positions may be ahead of the rows."""

    most: int | None
    later: bool


def lost_by_reader(
    settings: OpenSettings, known: AcknowledgedRecord, end: int
) -> LostWrites | None:
    """Return the acknowledged writes that a reader did not find; None if it found all.

    ``known``: the record. ``end``: the number of the reader's last write. Raises TierError if the loss
    is not accepted."""
    if end >= known.sequence:
        return None
    lost = LostWrites(known.sequence - end, later=False)
    _report(settings, lost.most, "its end is missing", stopped=not known.same_boot)
    return lost


def _report(settings: OpenSettings, most: int | None, fault: str, *, stopped: bool) -> None:
    """Log a loss of up to ``most`` writes (None: unknown), or raise TierError if it is not accepted.

    ``stopped``: the machine was restarted, and only its newest writes are missing."""
    number = "an unknown number of" if most is None else f"up to {most:,}"
    what = f"{number} acknowledged writes are missing from the write-ahead log ({fault})"
    if settings.on_lost_writes == "refuse" and not stopped:
        raise rocksdb_error(
            f"{settings.path} is damaged: {what}. Restore the log files or a checkpoint; or keep what "
            "can be read: `hps store verify --repair`, or tiers.rocksdb.on_lost_writes: accept. "
            f"{_LOSS}",
        )
    after = "after a restart of the machine, " if stopped else ""
    log.error("rocksdb %s: %s%s. %s", settings.path, after, what, _LOSS)


class LogRecovery:
    """Opens one primary with ``options`` and the column ``families``, and finds its lost writes."""

    def __init__(self, settings: OpenSettings, options: Options, families: Iterable[str]) -> None:
        self._settings = settings
        self._options = options
        self._families = list(families)
        self._noted = read_acknowledged(settings.path)
        self.lost: LostWrites | None = None
        """The lost writes, set by `open`; None if there are none."""

    def open(self) -> Rdict:
        """Open the database. Raises TierError, also for lost acknowledged writes that are not accepted.

        After such an error the log files are unchanged, unless what is left of them is intact."""
        known, missing = self._noted, self._missing()
        fault = ", ".join(missing.values())
        if not missing:
            mode = DBRecoveryMode.absolute_consistency()
            if known is None:  # written by a version of hps that kept no record
                mode = DBRecoveryMode.tolerate_corrupted_tail_records()
            try:
                db = self._open(mode)
            except DamagedFileError as error:
                fault = str(error.__cause__)
            else:
                if known is None or db.latest_sequence_number() >= known.sequence:
                    return db
                db.close()
                fault = "its end is missing"
        end = self._readable_end()
        if known and end is not None and end >= known.sequence and not missing:
            return self._open(DBRecoveryMode.point_in_time())  # drops only unacknowledged writes
        if known is None or end is None or any(name != known.newest for name in missing):
            return self._open_with_loss(known, None, fault)
        return self._open_with_loss(known, end, fault)

    def _open_with_loss(
        self, known: AcknowledgedRecord | None, end: int | None, fault: str
    ) -> Rdict:
        """Open without the missing writes.

        ``end``: the number of the last write before all missing ones; None if unknown."""
        settings, mode = self._settings, DBRecoveryMode.skip_any_corrupted_record()
        most = None if known is None or end is None else known.sequence - end
        stopped = known is not None and most is not None and not known.same_boot
        _report(settings, most, fault, stopped=stopped)
        if stopped:
            mode = DBRecoveryMode.point_in_time()
        db = self._open(mode)
        self.lost = LostWrites(most, later=end is None or db.latest_sequence_number() > end)
        return db

    def _missing(self) -> dict[str, str]:
        """Return the log files with unflushed writes that are missing or too short, each with its fault."""
        if self._noted is None:
            return {}
        files = log_files(self._settings.path)
        gone = {n: size for n, size in self._noted.logs.items() if files.get(n, -1) < size}
        oldest = self._oldest_needed() if gone else 0
        return {
            name: f"{name} has {files[name]:,} bytes, but had {size:,}"
            if name in files
            else f"{name} of {size:,} bytes is missing"
            for name, size in gone.items()
            if int(Path(name).stem) >= oldest
        }

    def _oldest_needed(self) -> int:
        """Return the number of the oldest log file whose writes are not all in table files."""
        with self._reading(with_logs=False) as db:
            return int(db.property_int_value("rocksdb.min-log-number-to-keep") or 0)

    def _readable_end(self) -> int | None:
        """Return the number of the last write before the log's first damaged record.

        None if table files have later writes. Raises DamagedFileError if anything but the log is damaged."""
        try:
            with self._reading() as db:
                return db.latest_sequence_number()
        except DamagedFileError as error:
            if _AHEAD in str(error):
                return None
            raise

    def _open(self, mode: DBRecoveryMode) -> Rdict:
        self._options.set_wal_recovery_mode(mode)
        return open_database(self._settings, self._options, self._families)

    def _reading(self, *, with_logs: bool = True) -> AbstractContextManager[Rdict]:
        """Open the database up to the log's first damaged record, without changing its folder."""
        self._options.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
        families = existing_families(self._settings.path)
        return open_read_only(self._settings, self._options, families, with_logs=with_logs)
