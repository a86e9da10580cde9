"""Descriptions of models (`hps/v1/lookup.proto`), and their comparison between nodes."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from hps.errors import ModelError
from hps.lookup.base import Feature, LookupModel
from hps.v1 import lookup_pb2 as pb

_DATATYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP16": np.dtype("<f2")}
_DATATYPE_OF = {dtype: name for name, dtype in _DATATYPES.items()}


def describe_model(model: LookupModel) -> Any:
    """Make the ``DescribeResponse`` of ``model``."""
    response = pb.DescribeResponse(
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
    content = response.SerializeToString(deterministic=True)
    response.digest = int.from_bytes(blake2b(content, digest_size=8).digest(), "little")
    return response


def _feature(feature: Feature) -> Any:
    return pb.Feature(
        name=feature.name,
        table=feature.table.name,
        key_offset=feature.key_offset % 2**64,
        pooling=feature.pooling,
        hotness=feature.hotness or 0,
        context=feature.context,
        max_norm=feature.max_norm or 0,
    )


def check_same_description(address: str, remote: Any, local: LookupModel) -> None:
    """Check that a node's ``DescribeResponse`` equals ``local``. Raises ``ModelError`` if not."""
    tables = {table.name: table for table in remote.tables}
    for name, mine in local.tables.items():
        table = tables.get(name)
        theirs = (table.dim, _DATATYPES.get(table.datatype), table.key_bits) if table else None
        if theirs != (mine.dim, mine.dtype, mine.key_bits):
            difference = "has no such table"
            if table:
                difference = f"has dim {table.dim}, {table.datatype}, {table.key_bits}-bit keys"
            raise ModelError(
                f"table '{name}' of model '{local.name}' version {local.version}: here dim {mine.dim}, "
                f"{mine.dtype}, {mine.key_bits}-bit keys, but {address} {difference}; both must be of the "
                "same model.yaml"
            )
    features = {feature.name: feature for feature in remote.features}
    for name, feature in local.features.items():
        wanted = _feature(feature)
        reported = features.get(name)
        if reported != wanted:
            shown = " ".join(str(reported).split()) if reported else "nothing"
            raise ModelError(
                f"feature '{name}' of model '{local.name}' version {local.version}: here "
                f"{' '.join(str(wanted).split())}, but {address} has {shown}; both must be of the same "
                "model.yaml"
            )
