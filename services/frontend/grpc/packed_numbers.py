"""Arrays sent as packed little-endian bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from services.frontend.errors import short_value

INT64, FLOAT32 = np.dtype("<i8"), np.dtype("<f4")


def unpack_numbers(name: str, what: str, packed: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """``packed`` as an array ``(n,)``, read-only, without a copy.

    Raises ``BadRequest``, naming ``what`` of ``name``, if the size does not fit.
    """
    if len(packed) % dtype.itemsize:
        raise BadRequest(
            f"{what} of {short_value(name)}: {len(packed)} bytes are not a multiple of {dtype.itemsize}, "
            f"the size of {dtype.name}"
        )
    return np.frombuffer(packed, dtype)
