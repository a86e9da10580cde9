"""DirectorySource: updates from files that appear in a folder, without Kafka.

    updates/20260131-1200.hpsu              native messages, one after the other
    updates/ctr.user.20260131-1200.npz      rows of table user of model ctr; Parquet likewise
    updates/applied/, updates/rejected/     destinations; next to a rejected file, the reason

A file appears complete: written under a name that begins with a dot, then renamed. Files are applied in
the order of their names and moved once the stores have them, so a crash repeats a file and loses none;
the rows' versions make that harmless. Rows without a version get the file's modification time. Applied
files are kept for versions that are served later (`hps.updates.files.applied_files`)."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hps.config.update_settings import DirectorySettings
from hps.errors import ConfigError, Unavailable
from hps.tiers.positions import TopicPartition
from hps.updates.files.update_files import ENDINGS, UpdateFile
from hps.updates.source import DeadLetter, HeldRows, UpdateBatch
from hps.updates.topics import NamedTables

log = logging.getLogger(__name__)

BLOCK = 1 << 16
"""Largest number of rows per poll; a single message may have more."""
APPLIED, _REJECTED = "applied", "rejected"
_CHECK_EVERY_S = 0.2
_WARN_EVERY_S = 30.0


class DirectorySource:
    """An `UpdateSource`, and the `DeadLetters` of its files. ``tables`` by `model/table`.

    Called by one thread; `lag` by any. Raises ConfigError when the folder cannot be made."""

    def __init__(
        self,
        settings: DirectorySettings,
        tables: NamedTables,
        block: int = BLOCK,
    ) -> None:
        self.problem: str | None = None
        self._folder = settings.path
        self._keep_applied = settings.keep_applied
        self._ahead_s = settings.max_ahead_s
        self._tables = tables
        self._block = block
        self.on_applied: Callable[[int], None] = lambda _applied_ms: None
        """Called with the time, in Unix milliseconds, when a file was moved to ``applied/``."""
        self._names: deque[str] = deque()
        self._was_listed = False
        self._reading: UpdateFile | None = None
        self._batches: Iterator[UpdateBatch] = iter(())
        # Batches that were polled and not committed; with the last batch of a file, that file.
        self._polled: deque[tuple[UpdateBatch, UpdateFile | None]] = deque()
        self._warned_at = float("-inf")
        try:
            for folder in (self._folder / APPLIED, self._folder / _REJECTED):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"updates.directory.path: {self._folder} cannot be used: {error.strerror or error}; name a "
                "folder that this process may write to"
            ) from None

    def poll(self, timeout_s: float) -> UpdateBatch | None:
        """See `UpdateSource`. An empty batch ends each file: committed, it moves the file away."""
        until, path = time.monotonic() + timeout_s, None
        while self._reading is None and (path := self._next()) is None:
            left = until - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, _CHECK_EVERY_S))
        if path is not None:
            self._reading = UpdateFile(path, self._tables, self._block, self._ahead_s)
            self._batches = self._reading.batches()
        batch = next(self._batches, None)
        if batch is not None:
            self._polled.append((batch, None))
            return batch
        reading = self._reading
        self._reading = None
        end = UpdateBatch(())
        self._polled.append((end, reading))
        return end

    def commit(self, batch: UpdateBatch) -> None:
        """See `UpdateSource`. Raises Unavailable when a file cannot be moved."""
        if not any(each is batch for each, _ in self._polled):
            return
        while True:
            each, ended = self._polled[0]
            if ended is not None:
                self._settle(ended)
            self._polled.popleft()
            if each is batch:
                return

    def keep_alive(self) -> None:
        """Nothing to do: files wait."""

    def restart(self) -> None:
        """Nothing to do: no store keeps positions of files."""

    def rewind(self) -> None:
        """Restart files that are not moved yet."""
        self._stop()
        self._polled.clear()
        self._names.clear()
        self._was_listed = False

    def keep(self, letters: Sequence[DeadLetter]) -> Sequence[DeadLetter]:
        """Nothing to do: the whole file is kept in ``rejected/`` when its end is committed."""
        return letters

    def report(self) -> None:
        """Nothing to do: each rejected file is logged when it is moved."""

    def lag(self) -> dict[tuple[str, int], int] | None:
        """Files that waited when the folder was last listed; None before."""
        if not self._was_listed:
            return None
        return {(str(self._folder), 0): len(self._names) + (self._reading is not None)}

    def held(self) -> dict[TopicPartition, HeldRows]:
        """None: files do not wait for a network."""
        return {}

    def close(self) -> None:
        self._stop()

    def _stop(self) -> None:
        self._reading = None
        self._batches = iter(())  # closes the file

    # -- files -------------------------------------------------------------------------------------

    def _next(self) -> Path | None:
        """The next file, or None."""
        if not self._names:
            taken = {ended.path.name for _, ended in self._polled if ended is not None}
            try:
                with os.scandir(self._folder) as entries:
                    found = [each.name for each in entries if is_update_file(each)]
            except OSError as error:
                self.problem = f"{self._folder} cannot be read: {error.strerror or error}"
                self._warn(self.problem)
                return None
            self.problem = None
            self._names.extend(sorted(set(found) - taken))
            self._was_listed = True
        return self._folder / self._names.popleft() if self._names else None

    def _settle(self, ended: UpdateFile) -> None:
        """Move a finished file to ``applied/`` or ``rejected/``."""
        path = ended.path
        try:
            if ended.faults:
                target = _free(self._folder / _REJECTED / path.name)
                reason = target.with_name(f"{target.name}.reason")
                reason.write_text(ended.report())
                os.replace(path, target)
                log.error("%s was rejected: %s; see %s", path, ended.faults[0], reason)
            elif self._keep_applied:
                target = _free(self._folder / APPLIED / path.name)
                os.replace(path, target)
                self.on_applied(target.stat().st_ctime_ns // 1_000_000)
            else:
                path.unlink()
        except FileNotFoundError:
            log.warning("%s disappeared while it was applied", path)
        except OSError as error:
            raise Unavailable(
                f"{path} cannot be moved away: {error.strerror or error}; let this process write to "
                f"{self._folder} and the folders in it"
            ) from None

    def _warn(self, text: str) -> None:
        now = time.monotonic()
        if now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            log.warning("updates from files wait: %s", text)


class PendingFiles:
    """Implements `hps.updates.arrival_times.PendingUpdates`: a file waits until it is moved away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._oldest_s: float | None = None

    def poll(self) -> None:
        arrived = []
        with os.scandir(self._folder) as entries:
            for each in entries:
                try:
                    if is_update_file(each):
                        arrived.append(each.stat().st_ctime)  # a rename counts as arrival
                except FileNotFoundError:
                    continue  # it was applied meanwhile
        self._oldest_s = min(arrived, default=None)

    def ages_s(self) -> Mapping[TopicPartition, float | None]:
        oldest_s = self._oldest_s
        age_s = 0.0 if oldest_s is None else max(0.0, time.time() - oldest_s)
        return {(str(self._folder), 0): age_s}


def is_update_file(entry: os.DirEntry[str]) -> bool:
    """True for a complete update file."""
    name = entry.name
    return not name.startswith(".") and name.endswith(ENDINGS) and entry.is_file()


def _free(path: Path) -> Path:
    """An unused name."""
    number, found = 1, path
    while found.exists():
        found = path.with_name(f"{path.stem}.{number}{path.suffix}")
        number += 1
    return found
