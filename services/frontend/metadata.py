"""Description of a served model in the protocol: metadata, configuration, extensions.

Generated from ``model.yaml``. Each name describes one format of requests, which a client can use
unchanged (perf_analyzer sends every input and requests every output that it finds here): ``<m>.lookup`` a
tensor per feature, ``<m>`` of a model without a network HPS's ``KEYS`` and ``NUMKEYS``. Both accept the
other format, too; ``parameters`` names it, and the optional tensors of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from hps.lookup.base import features_by_input
from hps.node.node import ServedModel
from hps.predict.checks import TOP_K_INDEX
from hps.types import Source
from services.frontend.hps_keys_format import KEYS, KEYS_SOURCE, NUMKEYS, OUTPUT0, HpsKeysFormat
from services.frontend.sequence_outputs import SequenceOutputs

SERVER_NAME = "hps"
PLATFORM = "hps"
# Only implemented extensions, by Triton's names.
EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "statistics", "logging")

SOURCE_CODES = {source.name.lower(): int(source) for source in Source}


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A named tensor; the first dimension of ``shape`` is the batch, -1 is variable."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False

    def metadata(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of one name. ``parameters`` holds what the protocol has no field for."""

    name: str
    version: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    max_batch_size: int
    parameters: dict[str, Any] = field(default_factory=dict)

    def metadata(self) -> dict[str, Any]:
        """``GET /v2/models/<m>``."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": PLATFORM,
            "inputs": [tensor.metadata() for tensor in self.inputs],
            "outputs": [tensor.metadata() for tensor in self.outputs],
            "parameters": self.parameters,
        }

    def config(self) -> dict[str, Any]:
        """``GET /v2/models/<m>/config``: Triton's ModelConfig. Dimensions are without the batch."""
        return {
            "name": self.name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": self.max_batch_size,
            "input": [
                {
                    "name": tensor.name,
                    "data_type": f"TYPE_{tensor.datatype}",
                    "format": "FORMAT_NONE",
                    "dims": list(tensor.shape[1:]),
                    "is_shape_tensor": False,
                    "allow_ragged_batch": False,
                    "optional": tensor.optional,
                }
                for tensor in self.inputs
            ],
            "output": [
                {
                    "name": tensor.name,
                    "data_type": f"TYPE_{tensor.datatype}",
                    "dims": list(tensor.shape[1:]),
                    "label_filename": "",
                    "is_shape_tensor": False,
                }
                for tensor in self.outputs
            ],
            "instance_group": [],
            "parameters": {
                key: {"string_value": value if type(value) is str else orjson.dumps(value).decode()}
                for key, value in self.parameters.items()
            },
            "model_transaction_policy": {"decoupled": False},
        }


def ranking_info(served: ServedModel) -> ModelInfo:
    """``<m>`` with a network: features and dense inputs in, named outputs out."""
    dense = served.spec.dense
    assert dense is not None
    inputs = [
        *_key_inputs(served),
        *(TensorMetadata(t.name, t.datatype, (-1, *t.shape[1:])) for t in dense.inputs),
    ]
    outputs = [TensorMetadata(t.name, t.datatype, (-1, *t.shape[1:])) for t in dense.outputs]
    ranking_output = dense.ranking_output or dense.outputs[0].name
    parameters = {
        **_common(served),
        "top_k": f"request parameter: keep the k best by '{ranking_output}' and add output "
        f"'{TOP_K_INDEX}' INT64 [k]",
        "context": [
            n for n, (f, *_) in features_by_input(served.engine.features).items() if f.context
        ]
        + [t.name for t in dense.inputs if t.context],
        "lookup_model": f"{served.name}.lookup",
    }
    return _info(served, served.name, inputs, outputs, parameters)


def lookup_info(served: ServedModel) -> ModelInfo:
    """``<m>.lookup``: any of the features in, their vectors out."""
    features = served.engine.features.values()
    inputs = _key_inputs(served, optional=True)
    outputs = [
        TensorMetadata(f.name, "FP16" if f.table.dtype.itemsize == 2 else "FP32", (-1, f.table.dim))
        for f in features
    ]
    parameters = {
        **_common(served),
        "sequence_outputs": list(SequenceOutputs(served.engine.model).names),
        "also_accepts": _tables_form(served),
    }
    return _info(served, f"{served.name}.lookup", inputs, outputs, parameters)


def tables_info(served: ServedModel) -> ModelInfo:
    """``<m>`` without a network: HPS's contract."""
    inputs = [TensorMetadata(KEYS, "INT64", (-1, -1)), TensorMetadata(NUMKEYS, "INT32", (-1, -1))]
    outputs = [TensorMetadata(OUTPUT0, "FP32", (-1, -1))]
    parameters = {
        **_common(served),
        "tables": HpsKeysFormat(served.engine).names,
        "also_accepts": f"the tensors of '{served.name}.lookup'",
    }
    return _info(served, served.name, inputs, outputs, parameters)


def server_metadata(version: str, *, control: bool, shared_memory: bool = False) -> dict[str, Any]:
    """``GET /v2``; ``control``: models can be loaded and unloaded; ``shared_memory``: tensors may be in
    memory that clients share with the server."""
    also = {"model_repository": control, "system_shared_memory": shared_memory}
    extensions = [*EXTENSIONS, *(name for name, offered in also.items() if offered)]
    return {"name": SERVER_NAME, "version": version, "extensions": extensions}


def _info(
    served: ServedModel,
    name: str,
    inputs: list[TensorMetadata],
    outputs: list[TensorMetadata],
    parameters: dict[str, Any],
) -> ModelInfo:
    return ModelInfo(
        name,
        str(served.version),
        tuple(inputs),
        tuple(outputs),
        served.spec.max_batch_size,
        parameters,
    )


def _common(served: ServedModel) -> dict[str, Any]:
    """Parameters of every name."""
    features = served.engine.features.values()
    return {
        "source_codes": SOURCE_CODES,
        "source_outputs": [f"{f.name}.source" for f in features],
        "jagged_inputs": [
            f"{name}.{part}"
            for name, (feature, *_) in features_by_input(served.engine.features).items()
            if feature.hotness is None
            for part in ("offsets", "weights")
        ],
        "key_datatypes": "any integer type; UINT64 keeps its bits",
    }


def _tables_form(served: ServedModel) -> str:
    form = HpsKeysFormat(served.engine)
    tables = ", ".join(f"{name}[{dim}]" for name, dim in form.dims(served.engine).items())
    return (
        f"'{KEYS}' INT64 [1,n] and '{NUMKEYS}' INT32 [1,{len(form.names)}], keys per table in "
        f"the order {tables}; answers '{OUTPUT0}' FP32 flat, on request '{KEYS_SOURCE}' UINT8"
    )


def _key_inputs(served: ServedModel, *, optional: bool = False) -> list[TensorMetadata]:
    return [
        TensorMetadata(name, "INT64", (-1, feature.hotness or -1), optional)
        for name, (feature, *_) in features_by_input(served.engine.features).items()
    ]
