"""The file ``mapped`` of a table: its header and sections, and how it is opened and verified.

A table's rows in the order of their positions in a minimal perfect hash function, to be read by ``mmap``
straight from the page cache. Sections, in this order; all numbers little-endian:

* header: `HEADER`, 4,096 bytes, written last, with the CRC-32 of the bytes before it at its end;
* records: record ``i`` is the key with position ``i`` (int64), then its row, padded with zeros to a
  multiple of 8 bytes. The record contains the key, so that absent keys are detected with certainty
  and a row costs one read of the disk;
* parts: ``(parts, 4) uint32``: first position, keys, slots and first remap entry of each part of the index;
* pilots: a byte per bucket, ``buckets`` of them;
* remap: ``uint32`` per slot behind a part's last position, the position in the part that it stands for;
* checksums: the CRC-32 of each ``BLOCK_BYTES`` of the file between the header and this section.

`twin_mapped` defines the index. The header's ``digest`` names the portable files that the rows are from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import ModelError
from hps.row_format import ROW_FORMAT_NAMES, RowFormat, row_format
from hps.types import EmbeddingTable

MAGIC = b"HPS-MAPD"
FORMAT = 1
HEADER_BYTES = 4096
BLOCK_BYTES = 1 << 20
KEY_BYTES = 8
FIRST_FORMAT_CODE = 1
"""``dtype`` in the header: this and the row format's code."""
HEADER = np.dtype(
    {
        "names": [
            "magic", "format", "dtype", "dim", "record_bytes", "rows", "seed", "n_parts", "n_buckets",
            "parts", "pilots", "remap", "checksums", "bytes", "checksums_crc", "key_bits", "digest", "crc",
        ],
        "formats": [
            "S8", "<u4", "<u4", "<u4", "<u4", "<u8", "<u8", "<u4", "<u4",
            "<u8", "<u8", "<u8", "<u8", "<u8", "<u4", "<u4", "S64", "<u4",
        ],
        "offsets": [0, 8, 12, 16, 20, 24, 32, 40, 44, 48, 56, 64, 72, 80, 88, 92, 96, HEADER_BYTES - 4],
        "itemsize": HEADER_BYTES,
    }
)  # fmt: skip
"""``parts``, ``pilots``, ``remap`` and ``checksums`` are offsets, ``bytes`` the file's length."""


@dataclass(frozen=True, slots=True)
class MappedHeader:
    """The checked header of the file at ``path``.

    ``dim``: the values of a row, which is stored in ``row_format``.
    ``record_bytes``: of a record, key included. ``bytes``: of the file. ``key_bits``: 32 if only the low 32
    bits of the portable files' keys were taken, else 64. ``index_bytes``: of parts, pilots and remap.
    ``blocks``: the number of checksums."""

    path: Path
    rows: int
    dim: int
    row_format: RowFormat
    digest: str
    bytes: int
    record_bytes: int
    key_bits: int
    fields: NDArray[Any]

    def is_of(self, digest: str, table: EmbeddingTable) -> bool:
        """True if the file was made for ``table`` from the portable files of that digest."""
        found = self.digest, self.dim, self.row_format, self.key_bits
        return found == (digest, table.dim, table.row_format, table.key_bits)

    @property
    def index_bytes(self) -> int:
        return int(self.fields["checksums"]) - int(self.fields["parts"])

    @property
    def blocks(self) -> int:
        return (self.bytes - int(self.fields["checksums"])) // 4

    @property
    def remap_entries(self) -> int:
        return (int(self.fields["checksums"]) - int(self.fields["remap"])) // 4

    def sections(self) -> list[int]:
        """The numbers that `MappedTable` takes: rows, record bytes, seed, buckets, offsets, bytes."""
        f = self.fields
        return [
            self.rows, self.record_bytes, int(f["seed"]), int(f["n_buckets"]),
            HEADER_BYTES, int(f["pilots"]), int(f["remap"]), int(f["checksums"]),
        ]  # fmt: skip


def record_bytes(dim: int, row_format: RowFormat) -> int:
    """Return the bytes of a record, a multiple of 8."""
    return KEY_BYTES + -(-row_format.row_bytes(dim) // 8) * 8


def read_header(path: Path, file: int | None = None) -> MappedHeader:
    """Read and check the header of ``path``, from the open ``file`` if one is passed.

    Raises ModelError if the file is missing, truncated, damaged or of another kind."""
    own = _open(path) if file is None else file
    try:
        data = os.pread(own, HEADER_BYTES, 0)
        size = os.fstat(own).st_size
    finally:
        if file is None:
            os.close(own)
    if len(data) < HEADER_BYTES:
        raise _unusable(path, f"{size} bytes are too few for its header; it is truncated")
    fields = np.frombuffer(data, HEADER)[0]
    if fields["magic"] != MAGIC:
        raise _unusable(path, "it is not a mapped table, or its writer did not finish")
    if fields["format"] > FORMAT:
        raise ModelError(
            f"{path}: mapped format {fields['format']} is newer than the {FORMAT} that this release reads; "
            "update hps"
        )
    if _crc32(data[:-4]) != fields["crc"]:
        raise _unusable(path, "its header is damaged")
    if size != fields["bytes"]:
        raise _unusable(
            path, f"the header says {fields['bytes']} bytes, found {size}; it is truncated"
        )
    header = MappedHeader(
        path,
        int(fields["rows"]),
        int(fields["dim"]),
        _row_format(path, int(fields["dtype"])),
        fields["digest"].decode("ascii", "replace"),
        size,
        int(fields["record_bytes"]),
        int(fields["key_bits"]),
        fields,
    )
    _check_sections(header)
    return header


def _row_format(path: Path, code: int) -> RowFormat:
    number = code - FIRST_FORMAT_CODE
    if not 0 <= number < len(ROW_FORMAT_NAMES):
        raise ModelError(f"{path}: this release knows no row format {code}; update hps")
    return row_format(ROW_FORMAT_NAMES[number])


def _check_sections(header: MappedHeader) -> None:
    offsets = ("parts", "pilots", "remap", "checksums", "n_parts", "n_buckets")
    f = {name: int(header.fields[name]) for name in offsets}
    fits = (
        header.record_bytes == record_bytes(header.dim, header.row_format)
        and f["n_parts"] > 0
        and f["parts"] == HEADER_BYTES + header.rows * header.record_bytes
        and f["pilots"] == f["parts"] + f["n_parts"] * 16
        and f["remap"] >= f["pilots"] + f["n_buckets"]
        and f["checksums"] >= f["remap"]
        and header.blocks == -(-(f["checksums"] - HEADER_BYTES) // BLOCK_BYTES)
    )
    if not fits:
        raise _unusable(header.path, "its sections do not fit each other")


def read_parts(header: MappedHeader, file: int) -> NDArray[np.uint32]:
    """Read the parts of the index (parts, 4)."""
    data = _read(header, file, int(header.fields["parts"]), int(header.fields["n_parts"]) * 16)
    return np.frombuffer(data, "<u4").reshape(-1, 4)


def damaged_blocks(header: MappedHeader, first: int = 0, n: int | None = None) -> list[int]:
    """Return the numbers of those of ``n`` blocks from ``first`` on whose checksum does not fit.

    Reads them from the file; without ``n``, all to the end. Raises ModelError if the file was replaced or
    truncated, or its checksums are damaged. Thread-safe."""
    file = _open(header.path)
    try:
        if read_header(header.path, file).fields.tobytes() != header.fields.tobytes():
            raise _unusable(header.path, "it was replaced while it was open")
        end = int(header.fields["checksums"])
        sums = _read(header, file, end, 4 * header.blocks)
        if _crc32(sums) != header.fields["checksums_crc"]:
            raise _unusable(header.path, "its checksums are damaged")
        expected = np.frombuffer(sums, "<u4")
        last = header.blocks if n is None else min(header.blocks, first + n)
        damaged = []
        # One buffer: the pages of a new one for each block would cost as much as its checksum.
        memory = memoryview(bytearray(BLOCK_BYTES))
        for block in range(first, last):
            begin = HEADER_BYTES + block * BLOCK_BYTES
            data = memory[: min(BLOCK_BYTES, end - begin)]
            try:
                size = os.preadv(file, [data], begin)
            except OSError:  # the disk cannot read it
                size = 0
            if size < len(data) or _crc32(data) != expected[block]:
                damaged.append(block)
        return damaged
    finally:
        os.close(file)


def _read(header: MappedHeader, file: int, offset: int, size: int) -> bytes:
    try:
        data = os.pread(file, size, offset)
    except OSError as error:
        raise _unusable(header.path, f"cannot read it: {error.strerror}") from error
    if len(data) != size:
        raise _unusable(header.path, "it is truncated")
    return data


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"cannot open {path}: {error.strerror}") from error


def _crc32(data: bytes | memoryview) -> int:
    from hps.native import crc32  # chosen there between the twins

    return crc32(np.frombuffer(data, np.uint8))


def _unusable(path: Path, why: str) -> ModelError:
    return ModelError(f"{path}: {why}; import the version again")


@dataclass(frozen=True, slots=True)
class MappedFile:
    """An open mapped table: ``header``, and ``table`` to look keys up in. Thread-safe."""

    header: MappedHeader
    table: Any

    def damaged_blocks(self, first: int = 0, n: int | None = None) -> list[int]:
        """See `damaged_blocks`."""
        return damaged_blocks(self.header, first, n)

    def resident(self) -> float:
        """The share of the records and the index that is in memory."""
        return float(self.table.resident(HEADER_BYTES, int(self.header.fields["checksums"])))


def open_mapped(
    path: Path,
    version: int,
    code: int,
    bitmap: NDArray[np.uint64] | None = None,
    kernels: str | None = None,
) -> MappedFile:
    """Map the table in ``path``. Raises ModelError if the file cannot be used.

    ``version``: of all its rows. ``code``: the source code reported for them. ``bitmap``:
    ``(bitmap_words(rows),) uint64``, zeroed, which marks overridden rows; it may lie in shared memory, and
    be read-only in all processes but one. Without it, no row can be overridden."""
    from hps.native import COMPILED, MappedTable

    file = _open(path)
    try:
        header = read_header(path, file)
        parts = read_parts(header, file)
        like = np.empty((0, header.row_format.width(header.dim)), header.row_format.dtype)
        chosen: dict[str, Any] = {"kernels": kernels} if COMPILED else {}
        chosen["format"] = header.row_format.code
        try:
            table = MappedTable(
                file, like, header.sections(), parts, header.remap_entries, version, code, bitmap, **chosen
            )  # fmt: skip
        except ValueError as error:
            raise _unusable(path, f"its index is damaged ({error})") from error
        return MappedFile(header, table)
    finally:
        os.close(file)
