"""Tables that a version shares with an earlier one: the same rows, so the same files and the same table.

The version's manifest names the version that introduced such a table (`TableOrigin`). Its folder has hard
links to the files: it is complete, takes no more disk space, and survives the deletion of the other folder;
the page cache has the files once."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hps.errors import ModelError
from hps.models.manifest import (
    DELTA_FOLDER,
    FILE_NAME,
    KEY_FILE,
    MASKED_FILE,
    TABLES_FOLDER,
    VECTOR_FILE,
    Manifest,
    TableEntry,
    checksum_file,
    read_manifest,
)
from hps.models.mapped_file import MAPPED_FILE
from hps.tiers.mapped.masked_positions import MASKED_POSITIONS_FILE

Base = int | Literal["latest", "none"]
"""The version whose tables may be shared: a number, the highest lower one, or none."""
_FICLONE = 0x4004_9409
"""ioctl of Linux that lets a file share another one's blocks."""
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True, slots=True)
class BaseVersion:
    """A version whose tables may be shared."""

    folder: Path
    manifest: Manifest

    def table(self, name: str) -> Path:
        return self.folder / TABLES_FOLDER / name


def versions_sharing(model: Path, version: int, tables: Collection[str]) -> dict[int, list[str]]:
    """The other versions in the folder ``model`` that have some of ``tables`` from ``version``: their names.

    Such a version's rows are stored under ``version``. Versions without a readable manifest are left out."""
    found: dict[int, list[str]] = {}
    for path in model.glob(f"*/{FILE_NAME}"):
        with suppress(ModelError, OSError):
            manifest = read_manifest(path)
            shared = [
                table
                for table in sorted({*tables} & {*manifest.tables})
                if manifest.origin(table).version == version != manifest.version
            ]
            if shared:
                found[manifest.version] = shared
    return dict(sorted(found.items()))


def find_base(model: Path, version: int, base: Base) -> BaseVersion | None:
    """The version of the folder ``model`` with which ``version`` shares tables, None without one.

    Raises ModelError if ``base`` is a number and that version is missing or has no manifest."""
    if base == "none":
        return None
    if base != "latest":
        folder = model / str(base)
        if base == version or not (folder / FILE_NAME).is_file():
            raise ModelError(
                f"{folder} cannot be the base of version {version}: it is no other version with a {FILE_NAME}"
            )
        return BaseVersion(folder, read_manifest(folder / FILE_NAME))
    numbers = [int(each.name) for each in model.glob("[1-9]*") if each.name.isdecimal()]
    for number in sorted((n for n in numbers if n < version), reverse=True):
        folder = model / str(number)
        with suppress(ModelError):
            return BaseVersion(folder, read_manifest(folder / FILE_NAME))
    return None


def share_equal_tables(
    folder: Path, manifest: Manifest, base: BaseVersion, names: Iterable[str]
) -> Manifest:
    """Replace those tables ``names`` of ``folder`` that ``base`` has, too, by links to its files.

    Returns the manifest with their origins. Files of the base that are damaged are not linked."""
    tables = dict(manifest.tables)
    for name in names:
        theirs = base.manifest.tables.get(name)
        if theirs is None or not _is_equal(tables[name], theirs) or not is_whole(base, name):
            continue
        tables[name] = theirs.model_copy(update={"origin": base.manifest.origin(name)})
        for path in (folder / TABLES_FOLDER / name).iterdir():
            path.unlink()
        link_table(base, name, folder)
    return manifest.model_copy(update={"tables": tables})


def link_table(base: BaseVersion, name: str, folder: Path) -> None:
    """Link the files of a table of ``base`` into the version's ``folder``. Raises OSError."""
    source, target = base.table(name), folder / TABLES_FOLDER / name
    link_pair(source, target)
    if base.manifest.tables[name].delta is not None:
        link_pair(source / DELTA_FOLDER, target / DELTA_FOLDER)
        link_file(source / DELTA_FOLDER / MASKED_FILE, target / DELTA_FOLDER / MASKED_FILE)


def link_pair(source: Path, target: Path) -> None:
    """Link a pair of files, and what is made from them, from one folder into another. Raises OSError."""
    target.mkdir(parents=True, exist_ok=True)
    for file in (KEY_FILE, VECTOR_FILE):
        link_file(source / file, target / file)
    for file in (MAPPED_FILE, MASKED_POSITIONS_FILE):
        if (source / file).exists():
            link_file(source / file, target / file)


def link_file(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``; a copy where the file system has no links."""
    try:
        os.link(source, target)
        return
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
    with source.open("rb") as old, target.open("wb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError:
            shutil.copyfileobj(old, new, 1 << 20)


def _is_equal(mine: TableEntry, theirs: TableEntry) -> bool:
    return (mine.checksums, mine.dim) == (theirs.checksums, theirs.dim)


def is_whole(base: BaseVersion, name: str) -> bool:
    """Return whether the files of a table of ``base`` have their checksums; reads them."""
    try:
        return all(
            checksum_file(base.table(name) / file) == entry.checksum
            for file, entry in base.manifest.tables[name].files().items()
        )
    except OSError:
        return False
