"""Validation of lookup requests; every message names cause and remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hps.errors import BadRequest
from hps.lookup.base import Feature, LookupModel
from hps.suggestions import hint_for
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, VectorArray, as_keys

_INT64 = np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)


def unknown_name_error(kind: str, name: str, known: Iterable[str], model: str) -> BadRequest:
    """Make the error for an unknown name, with the most similar known one."""
    return BadRequest(f"model {model!r} has no {kind} {name!r}{hint_for(name, known)}")


def _keys(n: int) -> str:
    return "1 key" if n == 1 else f"{n} keys"


def check_keys(feature: Feature, keys: JaggedKeys) -> JaggedKeys:
    """Validate a feature's keys; return ``keys`` itself if nothing had to be converted."""
    flat = keys.keys
    if flat.dtype != _INT64 or flat.ndim != 1 or not flat.flags.c_contiguous:
        keys = _converted(feature.name, keys)
        flat = keys.keys
    n, batch = len(flat), keys.batch
    most = feature.max_hotness
    if most is not None and n > batch * most:
        raise BadRequest(
            f"feature {feature.name!r} takes at most {_keys(most)} per sample (max_hotness), got {_keys(n)} "
            f"for a batch of {batch}"
        )
    if keys.weights is not None:
        keys = _check_weights(feature, keys)
    if keys.offsets is not None:
        return _check_offsets(feature, keys)
    hotness = feature.hotness
    if hotness is not None and n != batch * hotness:
        per_sample = f"{n / batch:g} per sample" if batch else "no sample"
        raise BadRequest(
            f"feature {feature.name!r} takes {_keys(hotness)} per sample, got {_keys(n)} for a batch of "
            f"{batch} ({per_sample})"
        )
    if batch < 0 or n % batch if batch else n:
        raise BadRequest(
            f"feature {feature.name!r}: {_keys(n)} cannot be divided into a batch of {batch}; send "
            f"'{feature.name}.offsets' for bags of different lengths"
        )
    return keys


def _converted(name: str, keys: JaggedKeys) -> JaggedKeys:
    try:
        flat = as_keys(keys.keys)
    except TypeError as error:
        raise BadRequest(f"feature {name!r}: {error}") from None
    if flat.ndim != 1:
        raise BadRequest(f"feature {name!r}: keys must be one flat array, got shape {flat.shape}")
    return JaggedKeys(flat, keys.batch, keys.offsets, keys.weights)


def _check_weights(feature: Feature, keys: JaggedKeys) -> JaggedKeys:
    assert keys.weights is not None
    weights, n = np.asarray(keys.weights), len(keys.keys)
    if feature.pooling == "none":
        raise BadRequest(
            f"feature {feature.name!r} is not pooled, so '{feature.name}.weights' has no meaning"
        )
    if weights.shape != (n,):
        raise BadRequest(
            f"feature {feature.name!r}: weights have shape {list(weights.shape)}, keys have [{n}]"
        )
    if weights.dtype == _FLOAT32:
        return keys
    if weights.dtype.kind not in "fiu":
        raise BadRequest(f"feature {feature.name!r}: weights must be numbers, got {weights.dtype}")
    return JaggedKeys(keys.keys, keys.batch, keys.offsets, weights.astype(np.float32))


def _check_offsets(feature: Feature, keys: JaggedKeys) -> JaggedKeys:
    """Validate offsets: ``batch + 1`` integers from 0 to the number of keys, never decreasing."""
    name, n, batch = feature.name, len(keys.keys), keys.batch
    offsets = np.asarray(keys.offsets)
    if offsets.dtype.kind not in "iu":
        raise BadRequest(f"feature {name!r}: offsets must be integers, got {offsets.dtype}")
    if offsets.shape != (batch + 1,) or batch < 0:
        raise BadRequest(
            f"feature {name!r}: offsets have shape {list(offsets.shape)}, a batch of {batch} needs "
            f"[{batch + 1}]"
        )
    if offsets[0] != 0 or offsets[-1] != n:
        raise BadRequest(
            f"feature {name!r}: offsets run from {offsets[0]} to {offsets[-1]}, they must run from 0 "
            f"to the number of keys, {n}"
        )
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        i = int(falls[0])
        raise BadRequest(
            f"feature {name!r}: offsets fall from {offsets[i]} to {offsets[i + 1]} at sample {i}"
        )
    if feature.hotness is not None:
        uneven = np.flatnonzero(np.diff(offsets) != feature.hotness)
        if len(uneven):
            i = int(uneven[0])
            raise BadRequest(
                f"feature {name!r} takes {_keys(feature.hotness)} per sample, sample {i} has "
                f"{offsets[i + 1] - offsets[i]}"
            )
    if offsets.dtype == _INT64:
        return keys
    return JaggedKeys(keys.keys, batch, offsets.astype(np.int64), keys.weights)


def check_sizes(model: LookupModel, request: LookupRequest) -> int:
    """Validate that batch sizes agree and are within the model's limits. Returns the number of keys."""
    total, batch, first = 0, -1, ""
    for name, keys in request.features.items():
        total += len(keys.keys)
        size = keys.batch
        if size != batch and not request.by_table:
            if size == 1 and model.features[name].context:
                continue
            if batch >= 0:
                raise BadRequest(
                    f"batch sizes differ: feature {first!r} has {batch}, feature {name!r} has {size}"
                )
            batch, first = size, name
    if batch > model.max_batch_size:
        raise BadRequest(
            f"inference request batch-size must be <= {model.max_batch_size} for "
            f"'{model.name}', got {batch}; send smaller batches or raise max_batch_size"
        )
    if request.by_table and model.max_table_keys:
        _check_table_keys(model, request)
    if total > model.max_keys:
        raise BadRequest(
            f"a request to '{model.name}' may have at most {_keys(model.max_keys)}, got {total}; send "
            "smaller batches or raise server.max_keys"
        )
    return total


def _check_table_keys(model: LookupModel, request: LookupRequest) -> None:
    for name, keys in request.features.items():
        most = model.max_table_keys.get(name)
        if most is not None and len(keys.keys) > most:
            raise BadRequest(
                f"table {name!r} of {model.name!r} takes at most {_keys(most)} per request "
                f"(max_batch_size {model.max_batch_size} times max_hotness), got {len(keys.keys)}"
            )


def check_out(
    name: str, out: VectorArray, shape: tuple[int, ...], dtype: np.dtype[np.generic]
) -> None:
    """Validate that a caller's array can hold the vectors of ``name`` without conversion."""
    if not isinstance(out, np.ndarray):
        raise BadRequest(f"out[{name!r}] must be a NumPy array, got {type(out).__name__}")
    wrong = None
    if out.shape != shape:
        wrong = f"has shape {list(out.shape)}, the vectors have {list(shape)}"
    elif out.dtype != dtype:
        wrong = f"is {out.dtype}, the table is {dtype}"
    elif not out.flags.c_contiguous:
        wrong = "is not C-contiguous; pass an array made by np.empty, and copy from it"
    elif not out.flags.writeable:
        wrong = "is read-only"
    if wrong:
        raise BadRequest(f"out[{name!r}] {wrong}")


def check_targets(
    table: EmbeddingTable,
    features: Sequence[Feature],
    keys: Sequence[JaggedKeys],
    out: Mapping[str, VectorArray],
) -> None:
    """Validate the shapes and dtypes of the caller's arrays for these features."""
    for feature, jagged in zip(features, keys, strict=True):
        if feature.name in out:
            n = len(jagged.keys) if feature.pooling == "none" else jagged.batch
            check_out(feature.name, out[feature.name], (n, table.dim), table.dtype)


def check_out_names(out: Mapping[str, VectorArray], request: LookupRequest, model: str) -> None:
    """Raise BadRequest for an array of ``out`` that no feature of the request fills."""
    for name in out:
        if name not in request.features:
            raise unknown_name_error("requested feature", name, request.features, model)
