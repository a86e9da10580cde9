"""The file ``masked_positions`` of a delta: which records of the base's mapped file it replaces or removes.

A header, then positions (uint64). The header has the digest of the whole table and the checksum of the base's
header, so that the three files are used only together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import ModelError
from hps.native import crc32
from hps.native.mapped_format import MappedHeader

MASKED_POSITIONS_FILE = "masked_positions"
_MAGIC = b"HPS-MASK"
_HEADER = np.dtype(
    [("magic", "S8"), ("digest", "S64"), ("base_crc", "<u4"), ("crc", "<u4"), ("rows", "<u8")]
)


def write_masked_positions(
    path: Path, digest: str, base: MappedHeader, positions: NDArray[np.int64]
) -> None:
    """Write the file. ``digest``: of the whole table. Raises OSError."""
    data = positions.astype("<u8")
    header = np.zeros(1, _HEADER)
    header["magic"], header["digest"] = _MAGIC, digest
    header["base_crc"], header["rows"] = base.fields["crc"], len(data)
    header["crc"] = _checksum(header, data)
    with path.open("wb") as file:
        header.tofile(file)
        data.tofile(file)
        file.flush()
        os.fsync(file.fileno())


def read_masked_positions(path: Path, base: MappedHeader) -> tuple[str, NDArray[np.int64]]:
    """Return the digest of the whole table, and the positions (m,). Raises ModelError."""
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise ModelError(f"cannot open {path}: {error.strerror}") from error
    if len(data) < _HEADER.itemsize:
        raise _unusable(path, "it is truncated")
    header = data[: _HEADER.itemsize].view(_HEADER)
    positions = data[_HEADER.itemsize :]
    if header["magic"][0] != _MAGIC or len(positions) != 8 * int(header["rows"][0]):
        raise _unusable(path, "it is truncated, or no list of positions")
    if header["crc"][0] != _checksum(header, positions):
        raise _unusable(path, "it is damaged")
    if header["base_crc"][0] != base.fields["crc"]:
        raise _unusable(path, f"it belongs to another file than {base.path}")
    found = positions.view("<u8").astype(np.int64)
    if len(found) and int(found.max()) >= base.rows:
        raise _unusable(path, "it is damaged")
    return header["digest"][0].decode("ascii", "replace"), found


def _checksum(header: NDArray[Any], data: NDArray[Any]) -> int:
    clear = header.copy()
    clear["crc"] = 0
    return crc32(data.view(np.uint8), crc32(clear.view(np.uint8)))


def _unusable(path: Path, why: str) -> ModelError:
    return ModelError(f"{path}: {why}; import the version again")
