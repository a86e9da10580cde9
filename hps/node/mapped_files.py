"""Mapped files as a node's only store, and where their row marks are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hps.config.schema import Settings
from hps.models.loader import open_mapped_tables
from hps.node.model_opening import OpenedTables

if TYPE_CHECKING:
    from hps.tiers.mapped import MappedFileTier


def shared_folder(settings: Settings) -> Path | None:
    """The folder of the shared CPU cache, in which other processes find row marks; None if there is none."""
    shared = settings.tiers.cpu_cache.shared
    return None if shared.name is None else shared.folder


def open_file_tier(settings: Settings, opened: Sequence[OpenedTables]) -> MappedFileTier:
    """Serve the mapped files of the tables ``opened``. Raises ModelError if one has none."""
    from hps.tiers.mapped import MappedFileTier

    tier = MappedFileTier(shared=shared_folder(settings))
    for model in opened:
        open_mapped_tables(model.version, model.tables.values(), tier)
    return tier
