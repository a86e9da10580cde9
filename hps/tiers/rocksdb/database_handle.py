"""An open database with its files and locks: as a primary, read-only, or as a secondary."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from rocksdict import DBRecoveryMode

from hps.errors import TierError
from hps.tiers.rocksdb.acknowledged_writes import (
    AcknowledgedRecord,
    AcknowledgedWrites,
    has_writer,
    read_acknowledged,
)
from hps.tiers.rocksdb.database_options import (
    OpenSettings,
    check_manifest,
    existing_families,
    make_options,
    open_database,
    open_read_only,
    repair_folder,
    temporary_folder,
)
from hps.tiers.rocksdb.errors import rocksdb_error
from hps.tiers.rocksdb.recovery import LogRecovery, LostWrites, lost_by_reader

# Attempts of a reader: the primary may remove files while they are opened; the next attempt finds newer
# ones.
_ATTEMPTS = 20


class DatabaseHandle:
    """An open database with its existing column families and ``more``, which are created.

    ``lost``: the acknowledged writes that were missing; None if there were none."""

    lost: LostWrites | None = None

    def __init__(self, settings: OpenSettings, more: Iterable[str] = ()) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self._acknowledged: AcknowledgedWrites | None = None
        check_manifest(settings.path)
        if os.path.isdir(repair_folder(settings.path)) and not settings.repair:
            raise rocksdb_error(
                f"{settings.path}: a repair was interrupted; run `hps store verify --repair` again, which "
                "continues it",
            )
        if settings.access == "primary":
            self._open_primary(settings, more)
        else:
            self._open_reader(settings)

    def _open_primary(self, settings: OpenSettings, more: Iterable[str]) -> None:
        self._prepare(settings, more)
        recovery = LogRecovery(settings, self.options, self.families)
        self.db = recovery.open()
        self.lost = recovery.lost
        self._acknowledged = AcknowledgedWrites(settings.path, self.db.latest_sequence_number())

    def _open_reader(self, settings: OpenSettings) -> None:
        for attempt in range(_ATTEMPTS):
            known = read_acknowledged(settings.path)
            try:
                # Reads the MANIFEST, which the primary may replace, too.
                self._prepare(settings)
                if self.families:
                    self._open_prepared_reader(settings)
            except TierError:
                self.clean()
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                break
        if not self.families:
            raise rocksdb_error(
                f"{settings.path} holds no database, and access: {settings.access} does not create "
                "one; load it once with access: primary",
            )
        self._find_loss(settings, known)

    def _open_prepared_reader(self, settings: OpenSettings) -> None:
        # A reader must tolerate a partial last record: the primary may be writing it.
        self.options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
        if settings.access == "secondary":
            # A secondary skips damaged and missing files, as if their rows had never been written; opening
            # read-only checks that all can be opened.
            with open_read_only(settings, self.options, self.families):
                pass
        self._folder = temporary_folder(settings)
        self.db = open_database(settings, self.options, self.families, self._folder)

    def _find_loss(self, settings: OpenSettings, known: AcknowledgedRecord | None) -> None:
        """Compare what a reader found with the record of acknowledged writes.

        Skipped while a primary is moving writes from its log to table files."""
        if known is None or has_writer(settings.path) or known != read_acknowledged(settings.path):
            return
        try:
            self.lost = lost_by_reader(settings, known, self.db.latest_sequence_number())
        except TierError:
            self.close()
            raise

    def _prepare(self, settings: OpenSettings, more: Iterable[str] = ()) -> None:
        self.families = {*existing_families(settings.path), *more}
        self.options = make_options(settings, len(self.families))
        self._identity = _identity(settings.path)

    def acknowledge(self) -> None:
        """Record everything written so far as acknowledged. For one thread at a time."""
        if self._acknowledged is not None:
            self._acknowledged.note(self.db.latest_sequence_number())

    def replaced(self, path: Path) -> bool:
        """Return whether the path now leads to another database."""
        return _identity(path) != self._identity

    def clean(self) -> None:
        """Remove a reader's temporary folder; calls in flight still finish."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def close(self) -> None:
        """Close without the binding's flush of each table."""
        self.db.cancel_all_background(True)
        self.clean()
        try:
            self.db.close()
        except Exception as error:
            # The binding's own flush on close runs after background work has been stopped.
            if "Shutdown in progress" not in str(error):
                raise
        finally:
            if self._acknowledged is not None:
                self._acknowledged.close()


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = (path / "IDENTITY").stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns
