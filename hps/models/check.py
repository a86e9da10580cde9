"""Checks of `hps model verify`: faults of a version that show in its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hps.errors import ModelError
from hps.models.delta_files import DeltaFiles
from hps.models.fused_files import FusedFiles
from hps.models.manifest import checksum_file, compare_checksum
from hps.models.mapped_file import MAPPED_FILE
from hps.models.repository import ModelVersion
from hps.models.tables import TableFiles
from hps.native.mapped_format import damaged_blocks, read_header
from hps.tiers.mapped.masked_positions import MASKED_POSITIONS_FILE, read_masked_positions
from hps.types import Progress

Level = Literal["OK", "WARN", "FAIL"]
_BLOCK_ROWS = 1 << 16
_MAPPED_BLOCKS = 64
# To find repeated keys, this many are sorted at a time, which takes 256 MB.
_SORTED_KEYS = 16_000_000
_MIXER = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True, slots=True)
class VersionFinding:
    """Result of one check: what was checked, the outcome, and the remedy."""

    what: str
    level: Level
    text: str


def check_version(version: ModelVersion, progress: Progress) -> Iterator[VersionFinding]:
    """Check checksums, NaN and infinite values, and duplicate keys.

    Sizes and row counts were checked when the version was opened."""
    for warning in version.warnings:
        yield VersionFinding("layout", "WARN", warning)
    for files in version.tables.values():
        yield VersionFinding(
            f"table {files.name}", "OK", f"rows: {files.rows:,} of dim {files.dim}; sizes fit"
        )
        yield check_files(files, progress)
        for pair in files.pairs:
            yield from _mapped(version, pair, progress)
        yield from _masked_positions(files)
        yield from _contents(files, progress)
        yield _repeated(files, _key_bits(version, files.name))
    if version.spec.dense is not None:
        yield _dense(version)


def check_files(files: TableFiles, progress: Progress) -> VersionFinding:
    """Compare a table's checksums with its manifest's."""
    what = f"table {files.name}: checksums"
    if not files.entries():
        return VersionFinding(
            what, "WARN", "no manifest to compare with; import the version to have one"
        )
    with progress.task(f"checking {files.name}", files.bytes, "bytes") as step:
        try:
            for path, entry in files.entries():
                compare_checksum(path, entry.checksum, checksum_file(path, step))
        except ModelError as error:
            return VersionFinding(what, "FAIL", str(error))
    return VersionFinding(what, "OK", "as in the manifest")


def _mapped(
    version: ModelVersion, files: TableFiles, progress: Progress
) -> Iterator[VersionFinding]:
    """Compare a table's mapped file, if it has one, with its checksums and with the other files."""
    what, path = f"table {files.name}: mapped file", files.folder / MAPPED_FILE
    if not path.exists():
        return
    (spec,) = (spec for spec in version.spec.tables if spec.name == files.name)
    try:
        header = read_header(path)
        fits = (header.row_format.name, header.key_bits) == (
            spec.row_format,
            _key_bits(version, files.name),
        )
        if not fits or (header.digest, header.dim) != (files.digest, files.dim):
            text = f"{path} was written for other files and is not used; import the version again"
            yield VersionFinding(what, "WARN", text)
            return
        damaged: list[int] = []
        with progress.task(f"checking {files.name}, mapped", header.blocks) as step:
            for block in range(0, header.blocks, _MAPPED_BLOCKS):
                damaged += damaged_blocks(header, block, _MAPPED_BLOCKS)
                step(min(_MAPPED_BLOCKS, header.blocks - block))
    except ModelError as error:
        yield VersionFinding(what, "FAIL", str(error))
        return
    if damaged:
        text = (
            f"{path}: {len(damaged)} of {header.blocks} blocks are damaged, the first is {damaged[0]}; "
            "import the version again"
        )
        yield VersionFinding(what, "FAIL", text)
    else:
        yield VersionFinding(what, "OK", f"whole; blocks: {header.blocks:,}")


def _masked_positions(files: TableFiles) -> Iterator[VersionFinding]:
    """Check which rows of the base's mapped file a delta masks."""
    if not isinstance(files, DeltaFiles):
        return
    what = f"table {files.name}: masked rows"
    base = files.base.folder / MAPPED_FILE
    path = files.delta.folder / MASKED_POSITIONS_FILE
    masked = files.masked_rows()
    if not (path.exists() and base.exists()):
        yield VersionFinding(what, "OK", f"{len(masked):,} rows of the base")
        return
    try:
        digest, positions = read_masked_positions(path, read_header(base))
    except ModelError as error:
        yield VersionFinding(what, "FAIL", str(error))
        return
    if (digest, len(positions)) != (files.digest, len(masked)):
        yield VersionFinding(what, "WARN", f"{path} was written for other files and is not used")
    else:
        yield VersionFinding(what, "OK", f"{len(masked):,} rows of the base")


def _contents(files: TableFiles, progress: Progress) -> Iterator[VersionFinding]:
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
        yield VersionFinding(what, "WARN", text)
    else:
        yield VersionFinding(what, "OK", "all finite")


def _repeated(files: TableFiles, key_bits: int) -> VersionFinding:
    what = f"table {files.name}: keys"
    if count := repeated_keys(files, key_bits):
        return VersionFinding(what, "WARN", repeated_text(count))
    return VersionFinding(what, "OK", "no key is repeated")


def repeated_text(count: int) -> str:
    """Return the warning about ``count`` rows whose key is repeated."""
    return f"{count:,} rows repeat the key of a later row and will not be served"


def repeated_by_table(version: ModelVersion) -> dict[str, int]:
    """Return `repeated_keys` of every table of ``version``."""
    return {
        name: repeated_keys(files, _key_bits(version, name))
        for name, files in version.tables.items()
    }


def repeated_keys(files: TableFiles, key_bits: int = 64) -> int:
    """Count rows whose key is repeated in a later row.

    Reads all keys once per 16 million rows; takes 512 MB at most."""
    passes = max(1, -(-files.rows // _SORTED_KEYS))
    count = 0
    for turn in range(passes):
        parts = [np.empty(0, np.uint64)]
        for start in range(0, files.rows, _SORTED_KEYS):
            keys = files.keys(start, start + _SORTED_KEYS).view(np.uint64)
            if key_bits == 32:
                keys = keys & np.uint64(0xFFFF_FFFF)
            if passes > 1:
                keys = keys[(keys * _MIXER >> np.uint64(32)) % np.uint64(passes) == turn]
            parts.append(keys)
        found = np.sort(np.concatenate(parts))
        count += int(np.count_nonzero(found[1:] == found[:-1]))
    return count


def check_disjoint_tables(files: TableFiles, key_bits: int) -> None:
    """Raise ModelError if a fused table joins tables that have a key in common.

    Reads all keys of a fused table."""
    if not isinstance(files, FusedFiles):
        return
    within = sum(repeated_keys(part, key_bits) for part in files.parts)
    if between := repeated_keys(files, key_bits) - within:
        folders = ", ".join(str(part.folder) for part in files.parts)
        raise ModelError(
            f"table '{files.name}': {between:,} keys are in several of {folders}, but fuse_embedding_table "
            "joins them into one table: give each table its own range of keys, or set fuse_embedding_table "
            "to false, in HPS too, which must then load its databases again"
        )


def _key_bits(version: ModelVersion, table: str) -> int:
    (spec,) = (spec for spec in version.spec.tables if spec.name == table)
    return 32 if spec.key_dtype == "uint32" else 64


def _dense(version: ModelVersion) -> VersionFinding:
    if version.dense is None:
        return VersionFinding(
            "dense.onnx", "WARN", "missing: only a Triton server can run the network"
        )
    entry = version.manifest.dense if version.manifest else None
    if entry is None:
        return VersionFinding("dense.onnx", "WARN", "no checksum to compare with")
    try:
        compare_checksum(version.dense, entry.checksum, checksum_file(version.dense))
    except ModelError as error:
        return VersionFinding("dense.onnx", "FAIL", str(error))
    return VersionFinding("dense.onnx", "OK", "checksum as in the manifest")
