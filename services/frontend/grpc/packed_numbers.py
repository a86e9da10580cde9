"""Numbers that travel as bytes, little endian and without gaps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from services.frontend.errors import short_value

INT64, FLOAT32 = np.dtype("<i8"), np.dtype("<f4")


def unpack_numbers(name: str, what: str, packed: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """``packed`` as ``(n,)``, read-only and not copied. ``BadRequest``, naming ``what`` of ``name`` it was to
    be, when it is not."""
    if len(packed) % dtype.itemsize:
        raise BadRequest(
            f"{what} of {short_value(name)}: {len(packed)} bytes are no {dtype.name} numbers, which take "
            f"{dtype.itemsize} each"
        )
    return np.frombuffer(packed, dtype)
