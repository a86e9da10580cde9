"""NumPy twin of the conversions between rows and vectors (src/row_convert.cpp).

Every operation is rounded to float32, so that the bits are those of the compiled core. Formats:
`hps.row_format`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.row_format import ROW_FORMAT_NAMES
from hps.types import IndexArray, VectorArray

Floats = NDArray[np.float32]
Octets = NDArray[np.uint8]
_SCALE = 4
LARGEST_FLOAT8 = np.float32(448)
LEAST_SCALE = np.float32(1) / (LARGEST_FLOAT8 * np.float32(512))
"""Of float8 rows, as in HPS."""


def decode_rows(
    rows: VectorArray, numbers: IndexArray | None, out: VectorArray, format: int
) -> None:
    """Decode ``rows[numbers[i]]``, or ``rows[i]`` without ``numbers (n,)``, to ``out (n, dim)``.

    ``out`` is float32 or float16, to which each value is rounded."""
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = decoded(
            rows if numbers is None else rows.take(numbers, axis=0), out.shape[1], format
        )


def encode_rows(vectors: Floats, format: int, rows: VectorArray, storable: Octets) -> None:
    """Encode ``vectors (n, dim)`` to ``rows (n, width)``; ``storable (n,)`` is 0 for a vector that the
    format can't hold, whose row is undefined: a value is not finite, or too large."""
    with np.errstate(all="ignore"):
        held = np.asarray(np.isfinite(vectors).all(axis=1), bool)
        found = _ENCODERS[ROW_FORMAT_NAMES[format]](np.where(held[:, None], vectors, 0), held)
    rows[...] = found.view(rows.dtype)
    storable[...] = held


def decoded(rows: VectorArray, dim: int, format: int) -> Floats:
    """Return the vectors (n, dim) float32 of ``rows (n, width)``."""
    name = ROW_FORMAT_NAMES[format]
    if name in ("float32", "float16"):
        return rows.astype(np.float32)
    if name == "bfloat16":
        bits: NDArray[np.uint32] = rows.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    octets: Octets = np.ascontiguousarray(rows).view(np.uint8)
    tail = np.ascontiguousarray(octets[:, -_SCALE:])
    vectors: Floats
    if name == "float8_e4m3":
        vectors = FLOAT8_VALUES[octets[:, :dim]] * tail.view("<f4")
        return vectors
    codes = octets[:, :-_SCALE]
    if name == "int4":
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(rows), 2 * codes.shape[1])[
            :, :dim
        ]
    scale, bias = tail.view("<f2").astype(np.float32).T[:, :, None]
    vectors = codes.astype(np.float32) * scale + bias
    return vectors


def _float8_values() -> Floats:
    magnitude = np.arange(128)
    exponent, mantissa = magnitude >> 3, magnitude & 7
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


FLOAT8_VALUES = _float8_values()
"""The value of each float8 E4M3, by its byte."""


def _encode_float16(vectors: Floats, held: NDArray[np.bool_]) -> NDArray[Any]:
    rows = vectors.astype("<f2")
    held &= np.isfinite(rows).all(axis=1)
    return rows


def _encode_bfloat16(vectors: Floats, held: NDArray[np.bool_]) -> NDArray[Any]:
    bits = vectors.view(np.uint32)
    rows = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    held &= (rows & 0x7F80 != 0x7F80).all(axis=1)
    return rows


def _encode_float8(vectors: Floats, _held: NDArray[np.bool_]) -> NDArray[Any]:
    largest = np.abs(vectors).max(axis=1, initial=0)[:, None]
    scale = np.maximum(largest / LARGEST_FLOAT8, LEAST_SCALE)
    scaled = vectors * (np.float32(1) / scale)
    magnitude = np.abs(scaled)
    bits = magnitude.view(np.uint32)
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20).astype(np.int64) - (120 << 3)
    small = np.rint(magnitude * np.float32(512)).astype(np.int64)
    codes = np.where(magnitude < 2.0**-6, small, np.minimum(normal, 0x7E))
    codes |= np.where(np.signbit(scaled), 0x80, 0)
    return np.concatenate([codes.astype(np.uint8), scale.astype("<f4").view(np.uint8)], axis=1)


def _encode_int(vectors: Floats, held: NDArray[np.bool_], most: int) -> tuple[Octets, Octets]:
    """Return the codes (n, dim) and the scales and biases (n, 4), by FBGEMM's rule."""
    bias = vectors.min(axis=1)[:, None].astype("<f2")
    lowest = bias.astype(np.float32)
    reach = vectors.max(axis=1)[:, None] - lowest
    scale = np.where(reach == 0, np.float32(1), reach / np.float32(most)).astype("<f2")
    scale[scale == 0] = 1
    held &= np.isfinite(scale[:, 0]) & np.isfinite(bias[:, 0])
    codes = np.rint((vectors - lowest) * (np.float32(1) / scale.astype(np.float32)))
    codes = np.nan_to_num(codes.clip(0, most)).astype(np.uint8)
    return codes, np.concatenate([scale, bias], axis=1).view(np.uint8)


def _encode_int8(vectors: Floats, held: NDArray[np.bool_]) -> NDArray[Any]:
    return np.concatenate(_encode_int(vectors, held, 255), axis=1)


def _encode_int4(vectors: Floats, held: NDArray[np.bool_]) -> NDArray[Any]:
    codes, tail = _encode_int(vectors, held, 15)
    codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return np.concatenate([codes[:, ::2] | codes[:, 1::2] << 4, tail], axis=1)


_ENCODERS = {
    "float32": lambda vectors, _held: vectors.astype("<f4"),
    "float16": _encode_float16,
    "bfloat16": _encode_bfloat16,
    "float8_e4m3": _encode_float8,
    "int8": _encode_int8,
    "int4": _encode_int4,
}
