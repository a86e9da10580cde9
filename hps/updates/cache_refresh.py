"""Refresh of resident rows in the caches, after the stores have the changes."""

from __future__ import annotations

from concurrent.futures import CancelledError

import numpy as np

from hps.errors import Unavailable
from hps.tiers.base import newest_of_each
from hps.tiers.positions import TableChanges
from hps.types import EmbeddingTable
from hps.updates.cache_writer import CacheWriter


def refresh(
    caches: CacheWriter, table: EmbeddingTable, changes: TableChanges, *, versioned: bool
) -> None:
    """Change the resident rows and wait for it. Raises Unavailable when the caches are closed."""
    last = _last_changes(changes)
    versions, gone_versions = last.versions, last.deleted_versions
    if not versioned:
        versions, gone_versions = np.zeros_like(versions), np.zeros_like(gone_versions)
    waiting = []
    if len(last.keys):
        waiting.append(caches.update(table, last.keys, last.vectors, versions))
    if len(last.deleted):
        waiting.append(caches.delete(table, last.deleted, gone_versions))
    try:
        for each in waiting:
            each.result()
    except CancelledError:
        raise Unavailable("the node is closing; the current updates will be read again") from None


def _last_changes(changes: TableChanges) -> TableChanges:
    """Reduce ``changes`` to one per key: the highest version; on a tie a deletion, then the last row."""
    split = len(changes.keys)
    keys = np.concatenate([changes.keys, changes.deleted])
    versions = np.concatenate([changes.versions, changes.deleted_versions])
    at = newest_of_each(keys, versions)
    if at is None:
        return changes
    return changes.select(at[at < split], at[at >= split] - split)
