"""A model's inputs, from the server's metadata or from its description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hps.errors import BadRequest
from hps.suggestions import hint_for

if TYPE_CHECKING:
    from hps.config.model_schema import ModelSpec

NUMPY_TYPES: dict[str, str] = {
    "BOOL": "bool", "UINT8": "uint8", "INT8": "int8", "INT16": "int16", "INT32": "int32",
    "INT64": "int64", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
# Batch size for servers that do not state a limit.
MAX_BATCH = 65_536


@dataclass(frozen=True, slots=True)
class DenseInput:
    """A dense input: its dtype and shape, batch first, -1 = any."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """The inputs that a request may have: features (keys) and dense inputs."""

    model: str
    features: tuple[str, ...]
    dense: Mapping[str, DenseInput]
    max_batch: int = MAX_BATCH
    hotness: Mapping[str, int] = field(default_factory=dict)
    """Keys per sample of the features for which that is fixed."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.features, *self.dense)

    def check_known(self, names: Mapping[str, Any]) -> None:
        """Reject names that the model does not have; the error names the nearest one it has."""
        for name in names:
            if name in self.features or name in self.dense:
                continue
            raise BadRequest(
                f"model {self.model!r} has no input {name!r}{hint_for(name, self.names, 'it takes')}"
            )

    def check_complete(self, names: Mapping[str, Any]) -> None:
        missing = [name for name in self.names if name not in names]
        if missing:
            raise BadRequest(
                f"model {self.model!r} also needs {', '.join(missing)}; a sample without keys of a "
                "feature has an empty list"
            )

    @staticmethod
    def of_spec(spec: ModelSpec) -> ModelSignature:
        features = [feature.name for feature in spec.served_features]
        inputs = spec.dense.inputs if spec.dense else []
        dense = {
            t.name: DenseInput(np.dtype(NUMPY_TYPES[t.datatype]), tuple(t.shape)) for t in inputs
        }
        fixed = {f.name: f.hotness for f in spec.served_features if f.hotness is not None}
        return ModelSignature(spec.name, tuple(features), dense, spec.max_batch_size, fixed)

    @staticmethod
    def of_metadata(metadata: Mapping[str, Any], max_batch: int = MAX_BATCH) -> ModelSignature:
        """Build from the protocol's model metadata.

        hps servers name the features; for other servers, 64-bit tensors are features."""
        sources = metadata.get("parameters", {}).get("source_outputs")
        named = None if sources is None else {name.partition(".")[0] for name in sources}
        features: list[str] = []
        dense: dict[str, DenseInput] = {}
        fixed: dict[str, int] = {}
        for tensor in metadata["inputs"]:
            name, datatype = tensor["name"], tensor["datatype"]
            if name.endswith((".offsets", ".weights")):
                continue
            if name in named if named is not None else datatype in ("INT64", "UINT64"):
                features.append(name)
                if tensor["shape"][-1] > 0:
                    fixed[name] = int(tensor["shape"][-1])
            else:
                dense[name] = DenseInput(np.dtype(NUMPY_TYPES[datatype]), tuple(tensor["shape"]))
        return ModelSignature(str(metadata["name"]), tuple(features), dense, max_batch, fixed)
