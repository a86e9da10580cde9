"""Models of a Triton repository: a folder with ``config.pbtxt`` and numbered versions.

Format: Triton's ``model_config.proto``, in protobuf's text form.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from hps.config.model_schema import FeatureSpec, ModelSpec
from hps.dense.base import TensorInfo
from hps.dense.onnx import OnnxModel
from hps.errors import ModelError
from hps.models.repository import ModelVersion

DenseKind = Literal["onnxruntime", "python"]
_FILES = Path(__file__).with_name("files")


def export_dense(version: ModelVersion, repository: Path, kind: DenseKind) -> Path:
    """Write the model ``<m>.dense``, ``version``'s network, into a Triton ``repository``; returns its folder.

    ``onnxruntime`` is Triton's own backend of that name, ``python`` a model in Python that does the same
    where that is missing. Raises ModelError when the version has no network.
    """
    if version.dense is None:
        raise ModelError(f"{version.name}/{version.version} has no dense.onnx to export")
    network = OnnxModel(version.dense, "cpu")
    folder = repository / f"{version.name}.dense"
    config = pb.ModelConfig(
        name=folder.name, backend=kind, max_batch_size=version.spec.max_batch_size
    )
    for tensors, into in ((network.inputs, config.input), (network.outputs, config.output)):
        for tensor in tensors:
            _add(into, tensor)
    config.dynamic_batching.SetInParent()
    files = _write(folder, config, version.version, "dense_model.py" if kind == "python" else None)
    shutil.copy(version.dense, files / ("dense.onnx" if kind == "python" else "model.onnx"))
    return folder


def export_lookup(
    version: ModelVersion, repository: Path, config: Path, instances: int = 1
) -> Path:
    """Write the model ``<m>.lookup``: ``instances`` in Triton's python backend, attached to the node that was
    opened with the configuration file ``config``. It takes HPS's ``KEYS`` and ``NUMKEYS``, or a tensor per
    feature; returns its folder."""
    spec, tables = version.spec, {table.name: table for table in version.spec.tables}
    folder = repository / f"{version.name}.lookup"
    made = pb.ModelConfig(name=folder.name, backend="python", max_batch_size=spec.max_batch_size)
    made.input.add(name="KEYS", data_type=pb.TYPE_INT64, dims=[-1], optional=True)
    made.input.add(name="NUMKEYS", data_type=pb.TYPE_INT32, dims=[-1], optional=True)
    made.output.add(name="OUTPUT0", data_type=pb.TYPE_FP32, dims=[-1])
    for feature in features_of(spec):
        made.input.add(
            name=feature.name, data_type=pb.TYPE_INT64, dims=[feature.hotness or -1], optional=True
        )
        table = tables[feature.table]
        datatype = "FP16" if table.dtype == "float16" else "FP32"
        made.output.add(
            name=feature.name, data_type=pb.DataType.Value(f"TYPE_{datatype}"), dims=[table.dim]
        )
    made.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=instances)
    made.dynamic_batching.SetInParent()
    made.parameters["config"].string_value = str(config.absolute())
    _write(folder, made, version.version, "lookup_model.py")
    return folder


def export_ensemble(version: ModelVersion, repository: Path) -> Path:
    """Write the ensemble ``<m>``: what ``<m>.lookup`` finds goes into ``<m>.dense``; returns its folder.

    Raises ModelError when the version has no dense part, or one whose vectors are not pooled.
    """
    spec, dense = version.spec, version.spec.dense
    if dense is None:
        raise ModelError(f"{version.name}/{version.version} has no dense part to put behind it")
    folder = repository / version.name
    made = pb.ModelConfig(
        name=version.name, platform="ensemble", max_batch_size=spec.max_batch_size
    )
    steps = made.ensemble_scheduling.step
    lookup = steps.add(model_name=f"{version.name}.lookup", model_version=-1)
    network = steps.add(model_name=f"{version.name}.dense", model_version=-1)
    for feature in features_of(spec):
        if feature.pooling == "none":
            raise ModelError(
                f"feature {feature.name!r} is not pooled: Triton's ensembles cannot reshape its rows"
            )
        made.input.add(name=feature.name, data_type=pb.TYPE_INT64, dims=[feature.hotness or -1])
        vectors = f"{feature.name}.vectors"
        lookup.input_map[feature.name] = feature.name
        lookup.output_map[feature.name] = vectors
        network.input_map[dense.embeddings.get(feature.name, feature.name)] = vectors
    for tensor in dense.inputs:
        _add(made.input, TensorInfo(tensor.name, tensor.datatype, tuple(tensor.shape)))
        network.input_map[tensor.name] = tensor.name
    for tensor in dense.outputs:
        _add(made.output, TensorInfo(tensor.name, tensor.datatype, tuple(tensor.shape)))
        network.output_map[tensor.name] = tensor.name
    _write(folder, made, version.version)
    return folder


def features_of(spec: ModelSpec) -> list[FeatureSpec]:
    """Those of ``model.yaml``; without any, one per table with the table's name."""
    return spec.features or [FeatureSpec(name=t.name, table=t.name) for t in spec.tables]


def _write(folder: Path, config: pb.ModelConfig, version: int, model: str | None = None) -> Path:
    files = folder / str(version)
    files.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    if model is not None:
        shutil.copy(_FILES / model, files / "model.py")
    return files


def _add(into: Any, tensor: TensorInfo) -> None:
    into.add(
        name=tensor.name,
        data_type=pb.DataType.Value(f"TYPE_{tensor.datatype}"),
        # Triton wants a dimension beside the batch; a tensor without one has it added and taken away.
        dims=tensor.shape[1:] or (1,),
    )
    if not tensor.shape[1:]:
        into[-1].reshape.SetInParent()
