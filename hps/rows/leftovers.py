"""Leftovers: rows of model versions that cannot be served any more."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

from hps.errors import ModelError, NotFound
from hps.models.manifest import FILE_NAME, read_manifest
from hps.models.repository import Repository
from hps.rows.tiers import parse_family

_SHOWN = 3


def unserved_families(
    families: Iterable[str], served: Collection[tuple[str, int]], repository: Repository
) -> str:
    """Return a warning about ``families`` whose version no model repository has; "" if there are none.

    ``families``: RocksDB's column families. Native layout only. Excludes versions (model, number) in
    ``served``."""
    tables = [table for name in families if (table := parse_family(name, "native"))]
    versions = sorted({(table.model, table.version) for table in tables} - set(served))
    gone = [each for each in versions if each[1] not in _versions(repository, each[0])]
    if not gone:
        return ""
    names = ", ".join(f"{model}/{version}" for model, version in gone[:_SHOWN])
    more = f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
    model, version = gone[0]
    return (
        f"RocksDB holds rows of {names}{more}, which are no longer in the model repository; `hps store ls` "
        f"shows how much, `hps store erase {model} --version {version}` removes them while the node is "
        "stopped"
    )


def _versions(repository: Repository, model: str) -> set[int]:
    """The versions in the repository, and those that introduced tables which these share."""
    try:
        versions = set(repository.versions(model))
    except (ModelError, NotFound):  # also without a repository, beside a ps.json
        return set()
    for version in sorted(versions):
        with suppress(ModelError):
            manifest = read_manifest(repository.root / model / str(version) / FILE_NAME)
            versions |= manifest.table_versions()
    return versions
