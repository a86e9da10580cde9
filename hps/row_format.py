"""Row formats: how a table's rows are stored, in every tier.

A row has ``dim`` values, which lookups return as float32 or float16. It is stored in one of these formats
(byte for byte: `hps/native/include/hps/row_format.hpp`):

* ``float32``, ``float16``, ``bfloat16``: the values;
* ``float8_e4m3``: 8-bit values and a float32 scale, the scheme of HPS's ``fp8_quant``;
* ``int8``: 8-bit values, a float16 scale and a float16 bias: FBGEMM's fused 8-bit rows with half scale and
  bias, TorchEasyRec's ``QUint8RowwiseF16``;
* ``int4``: the same with two values a byte, FBGEMM's fused 4-bit rows.

Tiers copy stored rows and do not interpret them: arrays of ``width`` items of ``dtype`` a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

ROW_FORMAT_NAMES = "float32", "float16", "bfloat16", "float8_e4m3", "int8", "int4"
"""The formats in the order of their codes."""
_DTYPES = "<f4", "<f2", "<u2", "u1", "u1", "u1"
_FIRST_SCALED, _SCALE_BYTES = ROW_FORMAT_NAMES.index("float8_e4m3"), 4


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A row format.

    ``code``: its number in the compiled core, None for rows of another NumPy type, which are stored as they
    are. ``dtype``: of a stored row's items."""

    name: str
    code: int | None
    dtype: np.dtype[Any]

    @property
    def is_plain(self) -> bool:
        """True if a stored row is its vector, in the row's dtype."""
        return self.code is None or self.code < 2

    def width(self, dim: int) -> int:
        """The items of a stored row of ``dim`` values."""
        if self.code is None or self.code < _FIRST_SCALED:
            return dim
        return (-(-dim // 2) if self.name == "int4" else dim) + _SCALE_BYTES

    def dim(self, width: int) -> int:
        """The values of a stored row of ``width`` items; an even number in int4."""
        if self.code is None or self.code < _FIRST_SCALED:
            return width
        return (width - _SCALE_BYTES) * (2 if self.name == "int4" else 1)

    def row_bytes(self, dim: int) -> int:
        """The bytes of a stored row of ``dim`` values."""
        return self.width(dim) * self.dtype.itemsize


_FORMATS: dict[str, RowFormat] = {
    name: RowFormat(name, code, np.dtype(dtype))
    for code, (name, dtype) in enumerate(zip(ROW_FORMAT_NAMES, _DTYPES, strict=True))
}


FLOAT32 = _FORMATS["float32"]


def row_format(name: str) -> RowFormat:
    """Return the format of that name, or of the NumPy type of that name. Raises TypeError for others."""
    dtype = None if name in _FORMATS else np.dtype(name)
    return _FORMATS[name] if dtype is None else row_format_of(dtype)


def row_format_of(dtype: Any) -> RowFormat:
    """Return the format of rows that are vectors of ``dtype``."""
    dtype = np.dtype(dtype)
    return _FORMATS.get(dtype.name if dtype.kind == "f" else "") or RowFormat(
        dtype.name, None, dtype
    )
