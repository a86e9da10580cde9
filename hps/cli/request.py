"""Parse one request from JSON or flags: names to keys and tensors, without losing a bit of a key.

JSON is ``{"user": 17, "ad": [4, 8], "tags": [[1, 2], []], "depth": [[2.0]]}``: a number is one
sample, a list is a batch, a list of lists is multi-hot (of any lengths). ``{"features": {…},
"dense": {…}}`` and the Open Inference Protocol's ``{"inputs": […]}`` are accepted too."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cli.column_arrays import as_samples
from hps.errors import BadRequest, ConfigError
from hps.tools.signature import DenseInput, ModelSignature
from hps.types import JaggedKeys

Features = dict[str, JaggedKeys]
DenseInputs = dict[str, NDArray[Any]]


def parse_json(text: str, signature: ModelSignature) -> tuple[Features, DenseInputs]:
    """Parse a request in JSON. Raises BadRequest."""
    import orjson

    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadRequest('the request must be a JSON object such as {"user": 17, "ad": [4, 8]}')
    if isinstance(data.get("inputs"), list):
        return _from_protocol(data["inputs"], signature)
    if isinstance(data.get("features"), dict) and "features" not in signature.names:
        data = data["features"] | data.get("dense", {})
    return parse_values(data, signature)


def parse_flags(flags: list[str], signature: ModelSignature) -> tuple[Features, DenseInputs]:
    """Parse ``name=1,2,3`` (a batch of three) or ``name=[[1,2],[3]]`` (JSON). Raises BadRequest."""
    import orjson

    values: dict[str, Any] = {}
    for flag in flags:
        name, equals, text = flag.partition("=")
        if not equals:
            raise ConfigError(f"--input {flag!r} must look like name=1,2,3")
        try:
            values[name] = orjson.loads(text if text.startswith("[") else f"[{text}]")
        except orjson.JSONDecodeError:
            raise ConfigError(f"--input {flag!r}: {text!r} is not a list of numbers") from None
    return parse_values(values, signature)


def parse_values(
    values: Mapping[str, Any], signature: ModelSignature
) -> tuple[Features, DenseInputs]:
    signature.check_known(values)
    signature.check_complete(values)
    features = {name: keys_from(name, values[name]) for name in signature.features}
    dense = {
        name: dense_from(name, values[name], wanted) for name, wanted in signature.dense.items()
    }
    return features, dense


def keys_from(name: str, value: Any) -> JaggedKeys:
    """Convert a number, a list of numbers, or a list of lists to keys."""
    rows = value if isinstance(value, list) else [value]
    bags = [row if isinstance(row, list) else [row] for row in rows]
    flat = [key for bag in bags for key in bag]
    for key in flat:
        if not isinstance(key, int) or isinstance(key, bool) or not -(2**63) <= key < 2**64:
            raise BadRequest(
                f"feature {name!r}: {key!r} is not a key, a whole number from -2^63 to 2^64-1"
            )
    keys = np.array([key & (2**64 - 1) for key in flat], np.uint64).view(np.int64)
    return as_samples(keys, np.array([len(bag) for bag in bags], np.int64))


def dense_from(name: str, value: Any, wanted: DenseInput) -> NDArray[Any]:
    """Convert numbers to a tensor ``(batch, *shape[1:])``; one sample needs no outer list."""
    try:
        array = np.asarray(value, wanted.dtype)
    except (ValueError, TypeError):
        raise BadRequest(
            f"input {name!r} must be numbers in the shape {list(wanted.shape)}, -1 the batch"
        ) from None
    inner = wanted.shape[1:]
    if array.ndim == 1 and inner == (1,):
        return array.reshape(-1, 1)
    if array.shape == (0,):
        return np.empty((0, *(max(size, 0) for size in inner)), wanted.dtype)
    while array.ndim < len(wanted.shape):
        array = array[None]
    fits = array.ndim == len(wanted.shape) and all(
        want in (-1, got) for want, got in zip(inner, array.shape[1:], strict=True)
    )
    if not fits:
        raise BadRequest(
            f"input {name!r} has the shape {list(array.shape)}, the model wants "
            f"{list(wanted.shape)}, -1 the batch"
        )
    return np.ascontiguousarray(array)


def _from_protocol(inputs: list[Any], signature: ModelSignature) -> tuple[Features, DenseInputs]:
    tensors: dict[str, tuple[list[Any], list[int]]] = {}
    try:
        for tensor in inputs:
            tensors[tensor["name"]] = (_flatten(tensor["data"]), list(tensor["shape"]))
    except (TypeError, KeyError) as error:
        raise BadRequest(
            f"an input needs name, shape, datatype and data; missing: {error}"
        ) from None
    values: dict[str, Any] = {}
    weights: dict[str, list[Any]] = {}
    for name, (data, shape) in tensors.items():
        if name.endswith(".weights"):
            weights[name.removesuffix(".weights")] = data
        elif not name.endswith(".offsets"):
            ends = tensors.get(f"{name}.offsets", (None, []))[0]
            values[name] = _nested(name, data, shape, ends)
    features, dense = parse_values(values, signature)
    for name, data in weights.items():
        if name in features:
            keys = features[name]
            features[name] = JaggedKeys(
                keys.keys, keys.batch, keys.offsets, np.asarray(data, np.float32)
            )
    return features, dense


def _nested(name: str, data: list[Any], shape: list[int], ends: list[int] | None) -> Any:
    if ends is not None:
        return [data[a:b] for a, b in pairwise(ends)]
    try:
        return np.array(data, object).reshape(shape).tolist()
    except ValueError:
        raise BadRequest(
            f"input {name!r} has {len(data)} values, its shape {shape} another number"
        ) from None


def _flatten(data: Any) -> list[Any]:
    if not isinstance(data, list):
        return [data]
    return [leaf for item in data for leaf in _flatten(item)]
