"""The folder of the row marks of mapped files, and the checks of the files' checksums."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hps.config.schema import Settings
from hps.errors import ModelError
from hps.models.manifest import checksum_file, compare_checksum
from hps.node.model_opening import OpenedTables, tables_of
from hps.threads import rest
from hps.tiers.mapped.overlaid_table import OverlaidTable
from hps.tiers.mapped.verified_files import VerifiedFiles
from hps.types import EmbeddingTable, Progress

if TYPE_CHECKING:
    from hps.tiers.mapped import MappedFileTier, MappedTier

_CHECK_EVERY_S = 0.05


def shared_folder(settings: Settings) -> Path | None:
    """The folder of the shared CPU cache, in which other processes find row marks; None if there is none."""
    shared = settings.tiers.cpu_cache.shared
    return None if shared.name is None else shared.folder


def verify_served(
    settings: Settings,
    store: MappedTier | MappedFileTier,
    served: Sequence[OpenedTables],
    verified: VerifiedFiles,
    resources: ExitStack,
) -> None:
    """Verify the mapped files of ``served``, which its owner keeps up to date, on a thread.

    Not those of a version that is being loaded: if that fails, nothing may be marked as damaged."""
    from hps.tiers.mapped import MappedChecks

    if rate := settings.tiers.mapped.verify_bytes_per_s:
        checks = MappedChecks(store, lambda: tables_of(served), rate, verified=verified)
        resources.callback(checks.close)


def verify_before_switch(
    model: OpenedTables,
    find: Callable[[EmbeddingTable], OverlaidTable | None],
    verified: VerifiedFiles,
    pace: VerificationPace,
    progress: Progress,
) -> None:
    """Verify the files of the mapped tables of ``model``, which is not served yet; marks no rows.

    These are the mapped files and those that they were made from, which fill the caches. ``find`` returns
    a table's mapped files, ``verified`` has files that need not be verified again. Raises ModelError for
    a damaged file."""
    for name, table in model.tables.items():
        if (mapped := find(table)) is None:
            continue
        sources = model.version.tables[name].entries()
        total = sum(each.header.bytes for each in mapped.files) + sum(e.bytes for _, e in sources)
        with progress.task(f"verifying {name}", total, "bytes") as step:
            try:
                for file in mapped.files:
                    done = 0
                    for end in verified.verify(file):
                        read = min(end, file.header.bytes) - done
                        step(read)
                        pace(read)
                        done += read
            except ModelError as error:
                raise damaged_mapped_file(table, error) from error
            for path, entry in sources:
                _compare(path, entry.checksum, verified, pace)
                step(entry.bytes)


def _compare(path: Path, expected: str, verified: VerifiedFiles, pace: VerificationPace) -> None:
    try:
        found = verified.checksum(path, partial(checksum_file, path, pace))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    compare_checksum(path, expected, found)


class VerificationPace:
    """Pauses a thread after each step of bytes that it verified: at most ``bytes_per_s``, 0: any rate.

    ``require_open`` is called in between and ends the thread's work by an error."""

    def __init__(self, bytes_per_s: int, require_open: Callable[[], None]) -> None:
        self._bytes_per_s, self._require_open = bytes_per_s, require_open
        self._due = time.monotonic()

    def __call__(self, n: int) -> None:
        rest(without_lock=True)
        self._require_open()
        if not self._bytes_per_s:
            return
        self._due = max(self._due, time.monotonic() - 1.0) + n / self._bytes_per_s
        while (left := self._due - time.monotonic()) > 0:
            time.sleep(min(left, _CHECK_EVERY_S))
            self._require_open()


def damaged_mapped_file(table: EmbeddingTable, error: ModelError) -> ModelError:
    """The error of a table with a damaged mapped file, with the remedy."""
    return ModelError(
        f"table {table.id} has a damaged mapped file: {error}. Restore the file, or publish the rows "
        "as a new version"
    )
