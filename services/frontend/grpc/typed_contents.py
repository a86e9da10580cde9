"""Tensors whose elements are in protobuf's typed fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from services.frontend.datatypes import BINARY_ONLY, InputRule

# Field of each datatype's elements; small integers use a wider type.
PLACES = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
_WIDE = {
    "bool_contents": np.bool_,
    "int_contents": np.int32,
    "int64_contents": np.int64,
    "uint_contents": np.uint32,
    "uint64_contents": np.uint64,
    "fp32_contents": np.float32,
    "fp64_contents": np.float64,
}


def contents(tensors: Iterable[Any], rules: Mapping[str, InputRule]) -> dict[str, NDArray[Any]]:
    """Return the elements of ``tensors``, ``(n,)`` each, in the types of their ``rules``.

    Raises ``BadRequest``.
    """
    inputs = {}
    for tensor in tensors:
        name, datatype = tensor.name, tensor.datatype
        if datatype in BINARY_ONLY:
            raise BadRequest(f"input '{name}': {datatype} can only be sent in raw_input_contents")
        dtype, count = rules[name].dtypes[datatype], prod(tensor.shape)
        used = {descriptor.name for descriptor, _ in tensor.contents.ListFields()}
        place = PLACES[datatype]
        if used - {place}:
            raise BadRequest(
                f"input '{name}' is {datatype}, whose elements belong in {place}, not in "
                f"{', '.join(sorted(used - {place}))}"
            )
        values = getattr(tensor.contents, place)
        if len(values) != count:
            raise BadRequest(
                f"unexpected number of elements {len(values)} in {place} of input '{name}': its shape "
                f"{list(tensor.shape)} takes {count}"
            )
        inputs[name] = array = np.array(values, _WIDE[place]).astype(dtype)
        if dtype.kind in "iu" and not np.array_equal(array, values):
            raise BadRequest(f"input '{name}' has a number out of range for {datatype}")
    return inputs
