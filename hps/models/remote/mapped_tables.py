"""The files ``mapped`` of a version's tables, which the manifest does not have, in remote repositories.

They are optional: a file that does not fit its table is left out, and the table served from its other
files."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path

from hps.errors import ModelError
from hps.models.delta_files import open_files
from hps.models.manifest import DELTA_FOLDER, TABLES_FOLDER, Manifest
from hps.models.mapped_file import MAPPED_FILE
from hps.models.remote.partial_file import RemoteEntry
from hps.models.remote.store import RemoteStore
from hps.native.mapped_format import damaged_blocks, read_header
from hps.tiers.mapped.masked_positions import MASKED_POSITIONS_FILE

log = logging.getLogger(__name__)


def mapped_paths(manifest: Manifest) -> list[str]:
    """Where the mapped files of a version may be, by their paths in its folder."""
    paths = []
    for name, entry in manifest.tables.items():
        paths.append(f"{TABLES_FOLDER}/{name}/{MAPPED_FILE}")
        if entry.delta is not None:
            files = MAPPED_FILE, MASKED_POSITIONS_FILE
            paths += [f"{TABLES_FOLDER}/{name}/{DELTA_FOLDER}/{file}" for file in files]
    return paths


def mapped_entries(store: RemoteStore, prefix: str, manifest: Manifest) -> dict[str, RemoteEntry]:
    """The mapped files that the store has below ``prefix``."""
    paths = mapped_paths(manifest)
    sizes = store.sizes([f"{prefix}/{path}" for path in paths])
    return {p: RemoteEntry(size, None) for p, size in zip(paths, sizes, strict=True) if size}


def remove_damaged(folder: Path, manifest: Manifest) -> bool:
    """Check the downloaded mapped files of a version, all blocks, and remove those that don't fit.

    Returns whether there was one."""
    found = list(_damaged(folder, manifest))
    for path, why in found:
        log.warning("download: %s is not used: %s", path, why)
        path.unlink()
    return bool(found)


def require_undamaged(folder: Path, manifest: Manifest, paths: Collection[str]) -> None:
    """Check those mapped files of a version that are among ``paths`` in its folder, all blocks.

    Raises ModelError for the first one that is damaged or does not fit its table."""
    for path, why in _damaged(folder, manifest, paths):
        raise ModelError(
            f"{path} is not published: {why}. Remove the file and publish the version again, which writes it "
            "from the table's other files"
        )


def _damaged(
    folder: Path, manifest: Manifest, paths: Collection[str] | None = None
) -> Iterator[tuple[Path, str]]:
    """Yield the mapped files, of ``paths`` if they are given, that cannot be used, and why."""
    for name, entry in manifest.tables.items():
        if not (folder / TABLES_FOLDER / name).is_dir():
            continue  # only the network was downloaded
        files = open_files(folder / TABLES_FOLDER / name, name, entry.dim, manifest)
        for pair in files.pairs:
            path = pair.folder / MAPPED_FILE
            if not path.is_file():
                continue
            if paths is not None and str(path.relative_to(folder)) not in paths:
                continue
            try:
                header = read_header(path)
                if header.digest != pair.digest:
                    yield path, "it was made from other files than the table's"
                elif blocks := damaged_blocks(header):
                    yield path, f"{len(blocks)} of its blocks do not match their checksums"
            except ModelError as error:
                yield path, str(error)
