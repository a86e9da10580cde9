"""Inputs and outputs of a network as ``model.yaml`` defines them, and their check."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hps.config.model_schema import DenseSpec, TensorSpec
from hps.dense.base import DenseModel, NetworkTensor, check_network
from hps.errors import ModelError
from hps.lookup.base import Feature, features_by_input

_LENGTH_TYPES = frozenset({"INT32", "INT64", "FP32"})
_MASK_TYPES = frozenset({"BOOL", "INT32", "INT64", "FP16", "FP32"})


def check_wiring(
    model: str, spec: DenseSpec, features: Mapping[str, Feature], network: DenseModel
) -> dict[str, NetworkTensor]:
    """Check ``spec`` against the network; return the tensors that it is fed, by name.

    Raises ``ModelError`` for a mismatch."""
    fed = fed_tensors(model, spec, features)
    outputs = {tensor.name: tensor for tensor in spec.outputs}
    check_network(model, network, fed.values(), served_tensors(spec))
    _check_ranking(model, spec.ranking_output, outputs)
    return fed


def fed_tensors(
    model: str, spec: DenseSpec, features: Mapping[str, Feature]
) -> dict[str, NetworkTensor]:
    """Return ``model.yaml``'s tensors that the network is fed, by their names in the network."""
    fed = [_info(tensor) for tensor in spec.inputs]
    for name in spec.embeddings:
        if name not in features:
            raise ModelError(
                f"{model}: dense.embeddings names feature {name!r}; the features are "
                f"{', '.join(features)}"
            )
    for feature in features.values():
        shape: tuple[int, ...] = (-1, feature.table.dim)
        if feature.pooling == "none":
            length = feature.max_length or feature.hotness
            if length is None:
                raise ModelError(
                    f"{model}: feature {feature.name!r} is not pooled and feeds the network, so "
                    "model.yaml must give its hotness, or max_length to pad its vectors"
                )
            shape = (-1, length, feature.table.dim)
        datatype = "FP16" if feature.table.dtype == np.float16 else "FP32"
        fed.append(NetworkTensor(spec.embeddings.get(feature.name, feature.name), datatype, shape))
    fed += [tensor for _, tensor in mask_tensors(model, spec, features)]
    fed += [tensor for _, tensor in length_tensors(model, spec, features)]
    named = {tensor.name: tensor for tensor in fed}
    if len(named) != len(fed):
        names = [tensor.name for tensor in fed]
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelError(f"{model}: model.yaml feeds network input {twice!r} twice")
    return named


def mask_tensors(
    model: str, spec: DenseSpec, features: Mapping[str, Feature]
) -> list[tuple[Feature, NetworkTensor]]:
    """Return the masks that the network is fed, each with a feature of its keys. Raises ``ModelError``."""
    return [
        (feature, NetworkTensor(name, "BOOL", (-1, length), _MASK_TYPES))
        for feature, length, name in _of_padded(model, "masks", spec.masks, features)
    ]


def length_tensors(
    model: str, spec: DenseSpec, features: Mapping[str, Feature]
) -> list[tuple[Feature, NetworkTensor]]:
    """Return the lengths that the network is fed, each with a feature of its keys. Raises ``ModelError``."""
    return [
        (feature, NetworkTensor(name, "INT64", (-1,), _LENGTH_TYPES))
        for feature, _, name in _of_padded(model, "lengths", spec.lengths, features)
    ]


def _of_padded(
    model: str, group: str, named: Mapping[str, str], features: Mapping[str, Feature]
) -> list[tuple[Feature, int, str]]:
    """Return a feature with ``max_length`` for each of ``named``, its length, and the network's input."""
    inputs = features_by_input(features)
    found: list[tuple[Feature, int, str]] = []
    for name, tensor in named.items():
        feature = inputs[name][0] if name in inputs else None
        if feature is None or feature.max_length is None:
            raise ModelError(
                f"{model}: dense.{group} names feature {name!r}, which has no max_length in model.yaml"
            )
        found.append((feature, feature.max_length, tensor))
    return found


def served_tensors(spec: DenseSpec) -> list[NetworkTensor]:
    """Return the network's outputs that ``model.yaml`` serves."""
    return [_info(tensor) for tensor in spec.outputs]


def _check_ranking(model: str, stated: str | None, outputs: Mapping[str, TensorSpec]) -> None:
    name = stated or next(iter(outputs))
    if name not in outputs:
        raise ModelError(
            f"{model}: dense.ranking_output is {name!r}; the outputs are {', '.join(outputs)}"
        )
    if stated and any(size > 1 for size in outputs[name].shape[1:]):
        raise ModelError(
            f"{model}: dense.ranking_output {name!r} has shape {outputs[name].shape}; top_k sorts by "
            "one number per sample"
        )


def _info(tensor: TensorSpec) -> NetworkTensor:
    return NetworkTensor(tensor.name, tensor.datatype, tuple(tensor.shape))
