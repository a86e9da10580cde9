"""Files that versions of a model have in common: neither downloaded nor uploaded again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hps.errors import ModelError
from hps.models.manifest import FILE_NAME, TABLES_FOLDER, Manifest, read_manifest
from hps.models.remote.mapped_tables import mapped_paths
from hps.models.table_sharing import link_file

log = logging.getLogger(__name__)


def link_downloaded(model: Path, hidden: Path, manifest: Manifest, paths: Iterable[str]) -> None:
    """Link those files ``paths`` of ``manifest`` into ``hidden`` that a version in the folder ``model`` has.

    Complete versions were checked when they were downloaded. Raises OSError."""
    wanted = identities(manifest)
    have = {}
    for folder in model.glob("[1-9]*"):
        with suppress(ModelError):
            for path, identity in identities(read_manifest(folder / FILE_NAME)).items():
                have[identity] = folder / path
    linked = 0
    for path in paths:
        source, target = have.get(wanted[path]), hidden / path
        if source is None or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # it has no such file, or is being evicted
            link_file(source, target)
            target.with_name(f"{target.name}.part").unlink(missing_ok=True)
            linked += 1
    if linked:
        log.info("download: %s: %d files are those of other versions", hidden, linked)


def identities(manifest: Manifest) -> dict[str, str]:
    """What identifies the contents of each file of a version, by its path: checksums.

    Of files that are not in the manifest, those of the files that they are made from."""
    found = {path: entry.checksum for path, entry in manifest.files().items()}
    for name, table in manifest.tables.items():
        folder = f"{TABLES_FOLDER}/{name}/"
        own = {path: entry.checksum for path, entry in table.files().items()}
        base = [own["key"], own["emb_vector"]]
        for path in mapped_paths(manifest):
            if path.startswith(folder):
                file = path.removeprefix(folder)
                of = base if file == "mapped" else sorted(own.values())
                found[path] = f"{file} of {' '.join(of)}"
    return found


def uploaded_files(manifests: Mapping[int, Manifest], model: str) -> dict[str, str]:
    """The paths in a store of files, by `identities`, of the versions ``manifests``."""
    return {
        identity: f"{model}/{version}/{path}"
        for version, manifest in sorted(manifests.items())
        for path, identity in identities(manifest).items()
    }
