"""Convert columns of a file to keys and dense tensors, without losing a bit of a key.

Text (CSV, JSONL) and typed columns (Parquet) are both accepted. A 64-bit key never passes through a
floating-point number, in which it would lose digits: a float column is rejected. A list column, or
a text cell with several numbers (``1 2 3``, ``[1, 2, 3]``), is a multi-hot sample; an empty cell is
a sample without keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.types import IndexArray, JaggedKeys, KeyArray

_SEPARATORS = r"[\[\],;|\s]+"


def keys_of(
    name: str,
    column: Any,
    first_row: int = 0,
    *,
    is_hex: bool = False,
    missing: Callable[[str], KeyArray] | None = None,
    hotness: int | None = None,
) -> JaggedKeys:
    """Convert an Arrow array of ``n`` samples to keys.

    ``first_row`` is the array's position in the file, for errors. ``is_hex``: text is hexadecimal, with
    or without ``0x``. ``missing`` returns the keys to use for an empty cell of a feature; without it, an
    empty cell is a sample without keys. ``hotness``: keys per sample, if the feature has a fixed number."""
    values, lengths = _flat(name, column, first_row)
    where = _ValueLocation(name, first_row, lengths)
    if _is_text(values.type):
        keys = _parse_keys(values, where, is_hex=is_hex)
    elif pa.types.is_integer(values.type):
        keys = _integers(values)
    elif len(values) == 0:
        keys = np.empty(0, np.int64)
    else:
        raise BadRequest(
            f"column {name!r} holds {values.type} values, which are not 64-bit keys; write it as "
            "int64, uint64 or text"
        )
    if missing is not None:
        empty = _missing(column, lengths)
        if len(empty):
            keys, lengths = _filled(keys, lengths, empty, missing(name))
    if hotness is not None and (lengths != hotness).any():
        odd = int(np.flatnonzero(lengths != hotness)[0])
        remedy = "" if lengths[odd] else "; --missing default gives empty cells the table's default"
        raise BadRequest(
            f"column {name!r}, row {first_row + odd + 1}: {lengths[odd]} keys, the feature takes "
            f"{hotness} per sample{remedy}"
        )
    return as_samples(keys, lengths)


def _missing(column: Any, lengths: IndexArray) -> IndexArray:
    """Positions of cells that are null or empty text; lists without elements do not count."""
    if _is_list(column.type):
        return np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
    return np.flatnonzero(lengths == 0)


def _filled(
    keys: KeyArray, lengths: IndexArray, cells: IndexArray, filler: KeyArray
) -> tuple[KeyArray, IndexArray]:
    """Insert the keys ``filler`` into each of the empty ``cells`` of ``keys``."""
    at = np.cumsum(lengths)[cells]
    keys = np.insert(keys, np.repeat(at, len(filler)), np.tile(filler, len(cells)))
    lengths = lengths.copy()
    lengths[cells] = len(filler)
    return keys, lengths


def as_samples(keys: KeyArray, lengths: IndexArray) -> JaggedKeys:
    """Build samples from flat keys and keys per sample.

    The result has a fixed hotness if every sample has the same number of keys (not 0)."""
    n = len(lengths)
    if n and lengths[0] > 0 and (lengths == lengths[0]).all():
        return JaggedKeys(keys, n)
    if n == 0:
        return JaggedKeys(keys, 0)
    offsets = np.zeros(n + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return JaggedKeys(keys, n, offsets)


def dense_of(
    name: str, column: Any, dtype: np.dtype[Any], shape: Sequence[int], first_row: int = 0
) -> NDArray[Any]:
    """Convert an Arrow array of ``n`` samples to a tensor ``(n, *shape[1:])`` of ``dtype``."""
    values, lengths = _flat(name, column, first_row)
    where = _ValueLocation(name, first_row, lengths)
    is_fixed = all(size > 0 for size in shape[1:])
    width = math.prod(shape[1:]) if is_fixed or not len(lengths) else int(lengths[0])
    if (lengths != width).any():
        odd = int(np.flatnonzero(lengths != width)[0])
        wanted = "the model's input takes" if is_fixed else "the rows before it have"
        raise BadRequest(
            f"column {name!r}, row {first_row + odd + 1}: {lengths[odd]} values, {wanted} {width}"
        )
    kind = pa.from_numpy_dtype(dtype)
    try:
        array = pc.cast(values, kind).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        raise where.error(values, lambda _value: kind, f"a {dtype} number") from None
    try:
        return np.ascontiguousarray(array, dtype).reshape(len(lengths), *shape[1:])
    except ValueError:
        got = int(lengths[0]) if len(lengths) else 0
        raise BadRequest(
            f"column {name!r} has {got} values a row, the model's input is {list(shape)}"
        ) from None


class _ValueLocation(NamedTuple):
    """The column and rows of flat values, for error messages."""

    name: str
    first_row: int
    lengths: IndexArray

    def error(self, values: Any, kind: Callable[[Any], Any], wanted: str) -> BadRequest:
        """The error of the first value that cannot be read as the Arrow type ``kind(value)``."""
        ends = np.cumsum(self.lengths)
        for i, value in enumerate(values.to_pylist()):
            try:
                pc.cast(pa.scalar(value), kind(value))
            except pa.ArrowInvalid:
                row = self.first_row + int(np.searchsorted(ends, i, "right")) + 1
                return BadRequest(f"column {self.name!r}, row {row}: {value!r} is not {wanted}")
        return BadRequest(f"column {self.name!r} is not {wanted}")


def _flat(name: str, column: Any, first_row: int) -> tuple[Any, IndexArray]:
    """Convert any column to flat values without nulls, and the number of them per sample."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if _is_list(kind):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        values = column.flatten()
        if values.null_count:
            at = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            row = first_row + int(np.searchsorted(np.cumsum(lengths), at, "right")) + 1
            raise BadRequest(
                f"column {name!r}, row {row}: the list has a null element; remove it from the list"
            )
        return values, lengths.astype(np.int64)
    if _is_text(kind):
        return _split(column)
    lengths = column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
    return column.drop_null(), lengths


def _split(column: Any) -> tuple[Any, IndexArray]:
    """Split text cells into words. Fast path: cells of one number are not split."""
    text = pc.fill_null(pc.utf8_trim_whitespace(column), "")
    if not pc.any(pc.match_substring_regex(text, _SEPARATORS)).as_py():
        filled = pc.not_equal(text, pa.scalar(""))
        return text.filter(filled), filled.to_numpy(zero_copy_only=False).astype(np.int64)
    spaced = pc.utf8_trim_whitespace(pc.replace_substring_regex(text, _SEPARATORS, " "))
    lists = pc.split_pattern(spaced, " ")
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    lengths[pc.equal(spaced, pa.scalar("")).to_numpy(zero_copy_only=False)] = 0
    words = lists.flatten()
    return words.filter(pc.not_equal(words, pa.scalar(""))), lengths


def _parse_keys(text: Any, where: _ValueLocation, *, is_hex: bool = False) -> KeyArray:
    """Parse whole numbers from -2^63 to 2^64-1, without losing a bit.

    Hexadecimal ones begin with ``0x``; with ``is_hex`` all numbers are hexadecimal."""
    if is_hex:
        text = pc.replace_substring_regex(text, "^(0[xX])?", "0x", max_replacements=1)
    negative = pc.starts_with(text, "-")
    keys = np.empty(len(text), np.uint64)
    mask = negative.to_numpy(zero_copy_only=False)
    try:
        keys[mask] = pc.cast(text.filter(negative), pa.int64()).to_numpy().view(np.uint64)
        keys[~mask] = pc.cast(text.filter(pc.invert(negative)), pa.uint64()).to_numpy()
    except pa.ArrowInvalid:
        raise where.error(
            text,
            lambda value: pa.int64() if value.startswith("-") else pa.uint64(),
            "a hexadecimal number of up to 16 digits"
            if is_hex
            else "a whole number from -2^63 to 2^64-1 (was the file written with rounded numbers? "
            "Hexadecimal ids begin with 0x, or need --hex-keys)",
        ) from None
    return keys.view(np.int64)


def _integers(values: Any) -> KeyArray:
    array = values.to_numpy(zero_copy_only=False)
    if array.dtype == np.uint64:
        return np.ascontiguousarray(array).view(np.int64)
    return np.ascontiguousarray(array, np.int64)


def _is_list(kind: Any) -> bool:
    is_variable = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_variable or pa.types.is_fixed_size_list(kind))


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
