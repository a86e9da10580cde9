"""Requests and results as `hps/v1/lookup.proto` has them, and whether two nodes mean the same model."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from hps.errors import HpsError, ModelError
from hps.lookup.base import Feature, LookupModel
from hps.types import JaggedKeys, LookupRequest, LookupResult
from hps.v1 import lookup_pb2 as pb

_DATATYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP16": np.dtype("<f2")}
_DATATYPE_OF = {dtype: name for name, dtype in _DATATYPES.items()}
_INT64, _FLOAT32 = np.dtype("<i8"), np.dtype("<f4")
_UINT8, _UINT64 = np.dtype("u1"), np.dtype("<u8")


def described(model: LookupModel) -> Any:
    """The ``DescribeResponse`` that tells of ``model``."""
    told = pb.DescribeResponse(
        model=model.name,
        version=model.version,
        tables=[
            pb.Table(
                name=table.name,
                dim=table.dim,
                datatype=_DATATYPE_OF[table.dtype],
                key_bits=table.key_bits,
            )
            for table in model.tables.values()
        ],
        features=[_feature(feature) for feature in model.features.values()],
        max_batch_size=model.max_batch_size,
        max_keys=model.max_keys,
    )
    content = told.SerializeToString(deterministic=True)
    told.digest = int.from_bytes(blake2b(content, digest_size=8).digest(), "little")
    return told


def _feature(feature: Feature) -> Any:
    return pb.Feature(
        name=feature.name,
        table=feature.table.name,
        key_offset=feature.key_offset % 2**64,
        pooling=feature.pooling,
        hotness=feature.hotness or 0,
        context=feature.context,
    )


def encoded(
    model: str, version: int, request: LookupRequest, features: Mapping[str, JaggedKeys]
) -> bytes:
    """``request`` for the ``features`` as they were checked."""
    message = pb.LookupRequest(
        model=model, version=version, by_table=request.by_table, report=request.want_source
    )
    for name, keys in features.items():
        given = message.keys.add(name=name, keys=keys.keys.tobytes(), batch=keys.batch)
        if keys.offsets is not None:
            given.offsets = keys.offsets.astype(_INT64, copy=False).tobytes()
        if keys.weights is not None:
            given.weights = keys.weights.astype(_FLOAT32, copy=False).tobytes()
    packed: bytes = message.SerializeToString()
    return packed


def decoded(
    response: Any, features: Mapping[str, Feature], asked: Mapping[str, JaggedKeys]
) -> LookupResult:
    """The result of a ``LookupResponse``; its arrays are read-only. Raises ``HpsError`` for an answer to
    another question."""
    result = LookupResult(
        {},
        defaulted=response.defaulted,
        degraded=tuple(response.degraded),
        stale_s=response.stale_s,
    )
    for given in response.vectors:
        name = given.name
        keys, feature = asked.get(name), features.get(name)
        if keys is None or feature is None:
            raise HpsError(f"a lookup node answered {name!r}, which it was not asked for")
        table = feature.table
        rows = len(keys.keys) if feature.pooling == "none" else keys.batch
        values = given.vectors
        dtype = _DATATYPES.get(given.datatype)
        fits = given.dim == table.dim and len(values) == rows * table.row_bytes
        if dtype is None or dtype != table.dtype or not fits:
            raise HpsError(
                f"a lookup node answered {len(values)} bytes of {given.datatype} and dim {given.dim} for "
                f"{name!r}, not {rows} rows of {table.dtype} and dim {table.dim}"
            )
        result.vectors[name] = np.frombuffer(values, dtype).reshape(rows, table.dim)
        if packed := given.sources:
            result.sources[name] = np.frombuffer(packed, _UINT8)
            result.versions[name] = np.frombuffer(given.versions, _UINT64)
    if result.vectors.keys() != asked.keys():
        raise HpsError(f"a lookup node answered {list(result.vectors)} of {list(asked)}")
    return result


def check_same(address: str, there: Any, here: LookupModel) -> None:
    """That the node's ``DescribeResponse`` and ``here`` mean the same. Raises ``ModelError``, naming what
    differs."""
    tables = {table.name: table for table in there.tables}
    for name, mine in here.tables.items():
        table = tables.get(name)
        theirs = (table.dim, _DATATYPES.get(table.datatype), table.key_bits) if table else None
        if theirs != (mine.dim, mine.dtype, mine.key_bits):
            told = "has no such table"
            if table:
                told = f"has dim {table.dim}, {table.datatype}, {table.key_bits}-bit keys"
            raise ModelError(
                f"table '{name}' of model '{here.name}' version {here.version}: here dim {mine.dim}, "
                f"{mine.dtype}, {mine.key_bits}-bit keys, but {address} {told}; both must be of the same "
                "model.yaml"
            )
    features = {feature.name: feature for feature in there.features}
    for name, feature in here.features.items():
        wanted = _feature(feature)
        given = features.get(name)
        if given != wanted:
            shown = " ".join(str(given).split()) if given else "nothing"
            raise ModelError(
                f"feature '{name}' of model '{here.name}' version {here.version}: here "
                f"{' '.join(str(wanted).split())}, but {address} has {shown}; both must be of the same "
                "model.yaml"
            )
