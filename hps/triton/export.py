"""Export of models to a Triton repository: folders with ``config.pbtxt`` and numbered versions.

Format: Triton's ``model_config.proto``, in protobuf's text form."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from hps.config.model_schema import FeatureSpec
from hps.dense.base import NetworkTensor
from hps.dense.onnx import OnnxModel
from hps.errors import ModelError
from hps.models.repository import ModelVersion
from hps.node.model_opening import features_of
from hps.predict.network_inputs import fed_tensors, served_tensors

DenseKind = Literal["onnxruntime", "python", "pytorch", "tensorrt", "tensorflow"]
MODEL_FILES: dict[DenseKind, str] = {
    "onnxruntime": "model.onnx",
    "python": "dense.onnx",
    "pytorch": "model.pt",
    "tensorrt": "model.plan",
    "tensorflow": "model.savedmodel",
}
"""File name of the network in the version's folder, by the backend that runs it."""
_FILES = Path(__file__).with_name("files")


def export_dense(version: ModelVersion, repository: Path, kind: DenseKind) -> Path:
    """Write the model ``<m>.dense``, ``version``'s network, into a Triton ``repository``; return its folder.

    ``kind`` is Triton's backend; ``python`` is a model in Python that replaces ``onnxruntime`` where that is
    missing. For the other three the caller must put the network, in their format, at `MODEL_FILES`.
    PyTorch's backend matches inputs to the names of ``forward``'s arguments, and outputs to the order of
    ``model.yaml``. Raises ModelError when the version has no network."""
    ours = kind in ("onnxruntime", "python")
    if version.dense is None and (ours or version.spec.dense is None):
        raise ModelError(f"{version.name}/{version.version} has no dense.onnx to export")
    folder = repository / f"{version.name}.dense"
    config = pb.ModelConfig(
        name=folder.name, backend=kind, max_batch_size=version.spec.max_batch_size
    )
    if kind == "tensorflow":
        config.platform = "tensorflow_savedmodel"
    inputs, outputs = network_of(version)
    for tensors, into in ((inputs, config.input), (outputs, config.output)):
        for tensor in tensors:
            _add(into, tensor)
    config.dynamic_batching.SetInParent()
    _keep_versions(config, version)
    files = _write(folder, config, version.version, "dense_model.py" if kind == "python" else None)
    if ours and version.dense is not None:
        shutil.copy(version.dense, files / MODEL_FILES[kind])
    return folder


def export_lookup(
    version: ModelVersion,
    repository: Path,
    config: Path,
    instances: int = 1,
    gpus: Sequence[int] = (),
) -> Path:
    """Write the model ``<m>.lookup`` and return its folder.

    It has ``instances`` in Triton's python backend, attached to the node that was opened with the
    configuration file ``config``, and takes HPS's ``KEYS`` and ``NUMKEYS``, or a tensor per feature. With
    ``gpus`` each of them has as many instances, whose vectors are in its memory. Vectors of a float16 table
    are FP16, or FP32 for a network that takes that."""
    spec, types = version.spec, vector_types(version)
    folder = repository / f"{version.name}.lookup"
    made = pb.ModelConfig(name=folder.name, backend="python", max_batch_size=spec.max_batch_size)
    # Requests that wait at the same time share a call, however many keys each has.
    made.input.add(
        name="KEYS", data_type=pb.TYPE_INT64, dims=[-1], optional=True, allow_ragged_batch=True
    )
    made.input.add(name="NUMKEYS", data_type=pb.TYPE_INT32, dims=[-1], optional=True)
    made.output.add(name="OUTPUT0", data_type=pb.TYPE_FP32, dims=[-1])
    for feature in spec.served_features:
        made.input.add(
            name=feature.name,
            data_type=pb.TYPE_INT64,
            dims=[feature.hotness or -1],
            optional=True,
            allow_ragged_batch=feature.hotness is None,
        )
        for name in feature.vectors:
            _add(made.output, types[name])
    kind = pb.ModelInstanceGroup.KIND_GPU if gpus else pb.ModelInstanceGroup.KIND_CPU
    made.instance_group.add(kind=kind, count=instances, gpus=gpus)
    if gpus:
        made.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value = "no"
    made.dynamic_batching.SetInParent()
    _keep_versions(made, version)
    made.parameters["config"].string_value = str(config.absolute())
    _write(folder, made, version.version, "lookup_model.py")
    return folder


def export_ensemble(version: ModelVersion, repository: Path) -> Path:
    """Write the ensemble ``<m>``: outputs of ``<m>.lookup`` are inputs of ``<m>.dense``; return its folder.

    Raises ModelError when the version has no dense part, or a feature with any number of vectors."""
    spec, dense = version.spec, version.spec.dense
    if dense is None:
        raise ModelError(f"{version.name}/{version.version} has no dense part for an ensemble")
    folder = repository / version.name
    made = pb.ModelConfig(
        name=version.name, platform="ensemble", max_batch_size=spec.max_batch_size
    )
    steps = made.ensemble_scheduling.step
    # Of one version, so that no request mixes two while Triton loads another one.
    number = version.version
    lookup = steps.add(model_name=f"{version.name}.lookup", model_version=number)
    network = steps.add(model_name=f"{version.name}.dense", model_version=number)
    for feature in spec.served_features:
        if feature.pooling == "none" and feature.hotness is None:
            raise ModelError(
                f"feature {feature.name!r} is not pooled and has no hotness: Triton's ensembles want as many "
                "rows for each sample"
            )
        made.input.add(name=feature.name, data_type=pb.TYPE_INT64, dims=[feature.hotness or -1])
        lookup.input_map[feature.name] = feature.name
        for name in feature.vectors:
            lookup.output_map[name] = f"{name}.vectors"
            network.input_map[dense.embeddings.get(name, name)] = f"{name}.vectors"
    for tensor in dense.inputs:
        _add(made.input, NetworkTensor(tensor.name, tensor.datatype, tuple(tensor.shape)))
        network.input_map[tensor.name] = tensor.name
    for tensor in dense.outputs:
        _add(made.output, NetworkTensor(tensor.name, tensor.datatype, tuple(tensor.shape)))
        network.output_map[tensor.name] = tensor.name
    _write(folder, made, version.version)
    return folder


def network_of(version: ModelVersion) -> tuple[Sequence[NetworkTensor], Sequence[NetworkTensor]]:
    """Return inputs and outputs of ``version``'s network: those of dense.onnx, else of ``model.yaml``."""
    if version.dense is not None:
        network = OnnxModel(version.dense, "cpu")
        return network.inputs, network.outputs
    dense = version.spec.dense
    assert dense is not None
    features = features_of(version.spec, version.embedding_tables())
    return [*fed_tensors(version.name, dense, features).values()], served_tensors(dense)


def vector_types(version: ModelVersion) -> dict[str, NetworkTensor]:
    """Return the type of each feature's vectors: its table's; FP32 if dense.onnx takes float16 as that."""
    spec, dense = version.spec, version.spec.dense
    tables = {table.name: table for table in spec.tables}
    taken = {}
    if dense is not None and version.dense is not None:
        taken = {tensor.name: tensor.datatype for tensor in OnnxModel(version.dense, "cpu").inputs}
    found = {}
    for feature in spec.served_features:
        for name, table_name in feature.vectors.items():
            table = tables[table_name]
            datatype = "FP16" if table.dtype == "float16" else "FP32"
            if dense is not None and datatype == "FP16":
                datatype = taken.get(dense.embeddings.get(name, name), datatype)
            found[name] = NetworkTensor(name, datatype, vectors_of(feature, table.dim))
    return found


def vectors_of(feature: FeatureSpec, dim: int) -> tuple[int, ...]:
    """Return the shape of a feature's vectors, batch first.

    Unpooled rows have a dimension per sample if all samples have the same number of them."""
    if feature.pooling == "none" and feature.hotness is not None:
        return (-1, feature.hotness, dim)
    return (-1, dim)


def _write(folder: Path, config: pb.ModelConfig, version: int, model: str | None = None) -> Path:
    files = folder / str(version)
    files.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    if model is not None:
        shutil.copy(_FILES / model, files / "model.py")
    return files


def _keep_versions(config: pb.ModelConfig, version: ModelVersion) -> None:
    """Let Triton serve all versions in the folder: an ensemble may still ask for the former one."""
    if version.spec.dense is not None:
        config.version_policy.all.SetInParent()


def _add(into: Any, tensor: NetworkTensor) -> None:
    into.add(
        name=tensor.name,
        data_type=pb.DataType.Value(f"TYPE_{tensor.datatype}"),
        # Triton requires a dimension besides the batch; a tensor without one is reshaped.
        dims=tensor.shape[1:] or (1,),
    )
    if not tensor.shape[1:]:
        into[-1].reshape.SetInParent()
