"""Models of a Triton repository: a folder with ``config.pbtxt`` and numbered versions.

Format: Triton's ``model_config.proto``, in protobuf's text form.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

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
    files = folder / str(version.version)
    files.mkdir(parents=True, exist_ok=True)
    config = _config(
        folder.name, kind, version.spec.max_batch_size, network.inputs, network.outputs
    )
    if kind == "onnxruntime":
        shutil.copy(version.dense, files / "model.onnx")
    else:
        shutil.copy(version.dense, files / "dense.onnx")
        shutil.copy(_FILES / "dense_model.py", files / "model.py")
    config.dynamic_batching.SetInParent()
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    return folder


def _config(
    name: str,
    backend: str,
    max_batch: int,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
) -> pb.ModelConfig:
    config = pb.ModelConfig(name=name, backend=backend, max_batch_size=max_batch)
    for tensors, into in ((inputs, config.input), (outputs, config.output)):
        for tensor in tensors:
            into.add(
                name=tensor.name,
                data_type=pb.DataType.Value(f"TYPE_{tensor.datatype}"),
                # Triton wants a dimension beside the batch; a network without one is given it back.
                dims=tensor.shape[1:] or (1,),
            )
            if not tensor.shape[1:]:
                into[-1].reshape.SetInParent()
    return config
