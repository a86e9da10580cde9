"""The folder of the row marks of mapped files, and the check of the files' checksums."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from hps.config.schema import Settings
from hps.node.model_opening import OpenedTables, tables_of
from hps.tiers.mapped.verified_files import VerifiedFiles

if TYPE_CHECKING:
    from hps.tiers.mapped import MappedFileTier, MappedTier


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
