"""What `hps model verify` looks at: everything about a version that can be told from its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hps.errors import ModelError
from hps.models.manifest import checksum_file, compare_checksum
from hps.models.repository import ModelVersion
from hps.models.sorting import Duplicates, sort_last
from hps.models.tables import TableFiles
from hps.types import Progress

Level = Literal["OK", "WARN", "FAIL"]
_BLOCK_ROWS = 1 << 16
# Keys are sorted to find duplicates; beyond this many that would take more than 512 MB.
_MAX_SORTED = 16_000_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was looked at, how it came out, and what to do about it."""

    what: str
    level: Level
    text: str


def check_version(version: ModelVersion, progress: Progress) -> Iterator[Finding]:
    """Checksums, NaN and infinite values, duplicate keys; sizes and row counts were checked when the
    version was opened."""
    for warning in version.warnings:
        yield Finding("layout", "WARN", warning)
    for files in version.tables.values():
        yield Finding(
            f"table {files.name}", "OK", f"rows: {files.rows:,} of dim {files.dim}; sizes fit"
        )
        yield check_files(files, progress)
        yield from _contents(files, progress)
    if version.spec.dense is not None:
        yield _dense(version)


def check_files(files: TableFiles, progress: Progress) -> Finding:
    """A table's checksums against its manifest's."""
    what = f"table {files.name}: checksums"
    if not files.entries():
        return Finding(what, "WARN", "no manifest to compare with; import the version to have one")
    with progress.task(f"checking {files.name}", files.bytes, "bytes") as step:
        try:
            for path, entry in files.entries():
                compare_checksum(path, entry.checksum, checksum_file(path, step))
        except ModelError as error:
            return Finding(what, "FAIL", str(error))
    return Finding(what, "OK", "as in the manifest")


def _contents(files: TableFiles, progress: Progress) -> Iterator[Finding]:
    what = f"table {files.name}: values"
    with progress.task(f"reading {files.name}", files.rows) as step:
        broken = done = 0
        first = ""
        for keys, vectors in files.blocks(_BLOCK_ROWS):
            rows = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
            if len(rows) and not broken:
                first = f"row {done + rows[0]} (key {keys[rows[0]]})"
            broken += len(rows)
            done += len(keys)
            step(len(keys))
    if broken:
        text = f"{broken:,} rows hold NaN or infinity, the first is {first}"
        yield Finding(what, "WARN", text)
    else:
        yield Finding(what, "OK", "all finite")
    if files.rows <= _MAX_SORTED:
        yield _duplicates(files)


def _duplicates(files: TableFiles) -> Finding:
    found = Duplicates()
    sort_last(files.keys().view(np.uint64), found)
    what = f"table {files.name}: keys"
    if found.count:
        text = f"{found.count:,} rows repeat the key of a later row and will not be served"
        return Finding(what, "WARN", text)
    return Finding(what, "OK", "each stands once")


def _dense(version: ModelVersion) -> Finding:
    if version.dense is None:
        return Finding("dense.onnx", "WARN", "missing: only a Triton can run the network")
    entry = version.manifest.dense if version.manifest else None
    if entry is None:
        return Finding("dense.onnx", "WARN", "no checksum to compare with")
    try:
        compare_checksum(version.dense, entry.checksum, checksum_file(version.dense))
    except ModelError as error:
        return Finding("dense.onnx", "FAIL", str(error))
    return Finding("dense.onnx", "OK", "checksum as in the manifest")
