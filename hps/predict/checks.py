"""Validation of prediction requests against their model: names, shapes, types, batch sizes.

Features and dense inputs marked ``context`` may have batch 1 and are broadcast over the others' batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.config.model_schema import DenseSpec, TensorSpec
from hps.dense.base import DATATYPES
from hps.errors import BadRequest
from hps.lookup.base import Feature
from hps.lookup.checks import unknown_name_error
from hps.types import PredictRequest

TOP_K_INDEX = "top_k_index"

Arrays = dict[str, NDArray[Any]]


class PredictChecks:
    """Checks the requests of one model. Thread-safe."""

    def __init__(self, model: str, spec: DenseSpec, features: Mapping[str, Feature]) -> None:
        self._model = model
        self._features = features
        self._keys = {name: feature.input for name, feature in features.items()}
        self._inputs = {tensor.name: tensor for tensor in spec.inputs}
        self._dense = {name: name for name in self._inputs}
        self._outputs = tuple(tensor.name for tensor in spec.outputs)

    def inputs(self, request: PredictRequest) -> tuple[Arrays, int]:
        """Return the dense inputs ``(batch, ...)``, converted where safe, and the batch.

        Raises ``BadRequest``."""
        features = self._features
        _same_names("feature", request.features, self._keys, self._model)
        _same_names("input", request.dense, self._dense, self._model)
        sizes = [(n, k.batch, features[n].context) for n, k in request.features.items()]
        inputs = {}
        for name, array in request.dense.items():
            spec = self._inputs[name]
            inputs[name] = checked = _checked(spec, array)
            sizes.append((name, checked.shape[0], spec.context))
        for feature in features.values():
            if feature.pooling != "none" or feature.max_length is not None:
                continue
            if request.features[feature.name].offsets is not None:
                raise BadRequest(
                    f"feature {feature.name!r} is not pooled and feeds a network, which takes "
                    f"{feature.hotness} keys per sample; send it without offsets, or set max_length in "
                    "model.yaml to pad it"
                )
        batch = _batch(sizes)
        return {name: broadcast_batch(array, batch) for name, array in inputs.items()}, batch

    def outputs(self, request: PredictRequest) -> tuple[str, ...]:
        """Return the requested outputs in the order of ``model.yaml``. Raises ``BadRequest``."""
        if request.top_k is not None and request.top_k < 1:
            raise BadRequest(f"top_k must be at least 1, got {request.top_k}")
        if request.outputs is None:
            return self._outputs
        for name in request.outputs:
            if name not in self._outputs and not (name == TOP_K_INDEX and request.top_k):
                raise unknown_name_error("output", name, self._outputs, self._model)
        return tuple(name for name in self._outputs if name in request.outputs)


def _same_names(kind: str, got: Mapping[str, Any], expected: Mapping[str, str], model: str) -> None:
    """Raise BadRequest unless ``got`` has exactly the names of ``expected``.

    ``expected`` maps each name to the one that requests use, for the message."""
    if got.keys() == expected.keys():
        return
    for name in got:
        if name not in expected:
            others = dict.fromkeys(sent for sent in expected.values() if sent != name)
            raise unknown_name_error(kind, name, others, model)
    missing = dict.fromkeys(sent for name, sent in expected.items() if name not in got)
    raise BadRequest(
        f"the request to model {model!r} misses {kind} {', '.join(map(repr, missing))}"
    )


def _checked(spec: TensorSpec, array: Any) -> NDArray[Any]:
    """Convert a dense input to ``model.yaml``'s shape and type; float64 is narrowed to float32."""
    values, wanted = np.asarray(array), DATATYPES[spec.datatype]
    if values.dtype != wanted:
        if not np.can_cast(values.dtype, wanted, "same_kind"):
            raise BadRequest(f"input {spec.name!r} is {spec.datatype}, got {values.dtype}")
        with np.errstate(over="ignore"):
            values = values.astype(wanted)
    fits = values.ndim == len(spec.shape) and all(
        want in (-1, size) for want, size in zip(spec.shape[1:], values.shape[1:], strict=True)
    )
    if not fits:
        raise BadRequest(f"input {spec.name!r} has shape {spec.shape}, got {list(values.shape)}")
    return np.ascontiguousarray(values)


def _batch(sizes: list[tuple[str, int, bool]]) -> int:
    """Return the common batch; context tensors may have 1 instead."""
    batch, first = -1, ""
    for name, size, context in sizes:
        if size == batch or (context and size == 1):
            continue
        if batch >= 0:
            raise BadRequest(f"batch sizes differ: {first!r} has {batch}, {name!r} has {size}")
        batch, first = size, name
    return batch if batch >= 0 else 1


def broadcast_batch(array: NDArray[Any], batch: int) -> NDArray[Any]:
    """Repeat ``array (1, ...)`` to ``(batch, ...)``, C-contiguous as networks need it."""
    if array.shape[0] == batch:
        return array
    return np.repeat(array, batch, axis=0)
