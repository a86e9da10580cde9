"""Models of a Triton repository, as their configurations have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from hps.config.model_schema import ModelSpec
from hps.dense.base import NetworkTensor
from hps.errors import ModelError
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.triton.export import MODEL_FILES, export_dense, export_ensemble, export_lookup

SPEC = {
    "name": "m",
    "tables": [
        {"name": "users", "dim": 4},
        {"name": "words", "dim": 2, "dtype": "float16"},
    ],
    "features": [
        {"name": "user", "table": "users", "hotness": 1},
        {"name": "title", "table": "words", "hotness": 3, "pooling": "none"},
    ],
    "dense": {
        "embeddings": {"title": "words"},
        "inputs": [{"name": "age", "shape": [-1]}],
        "outputs": [{"name": "score", "shape": [-1, 1]}],
    },
    "max_batch_size": 32,
}


@pytest.fixture
def version(tmp_path):
    tables = {
        name: (np.arange(2), np.zeros((2, dim), np.float32))
        for name, dim in (("users", 4), ("words", 2))
    }
    spec = ModelSpec.model_validate(SPEC)
    written = write_version(tmp_path / "models", spec, 1, tables, dense=b"none")
    (written / "dense.onnx").unlink()  # Triton has the network in another format
    return Repository(tmp_path / "models").open("m")


def config_of(folder):
    return text_format.Parse((folder / "config.pbtxt").read_text(), pb.ModelConfig())


def shapes(tensors):
    found = {}
    for tensor in tensors:
        reshaped = list(tensor.reshape.shape) if tensor.HasField("reshape") else None
        found[tensor.name] = (pb.DataType.Name(tensor.data_type), list(tensor.dims), reshaped)
    return found


NETWORK = {
    "user": ("TYPE_FP32", [4], None),
    "words": ("TYPE_FP16", [3, 2], None),
    "age": ("TYPE_FP32", [1], []),
}


@pytest.mark.parametrize("kind", ["pytorch", "tensorrt", "tensorflow"])
def test_networks_in_other_formats(version, tmp_path, kind):
    folder = export_dense(version, tmp_path / "triton", kind)
    config = config_of(folder)
    assert (config.backend, config.max_batch_size) == (kind, 32)
    assert shapes(config.input) == NETWORK
    assert shapes(config.output) == {"score": ("TYPE_FP32", [1], None)}
    assert (config.platform == "tensorflow_savedmodel") is (kind == "tensorflow")
    assert [*(folder / "1").iterdir()] == []
    assert MODEL_FILES[kind] != MODEL_FILES["python"]


@pytest.mark.parametrize("kind", ["onnxruntime", "python"])
def test_formats_that_need_dense_onnx(version, tmp_path, kind):
    with pytest.raises(ModelError, match=r"m/1 has no dense.onnx"):
        export_dense(version, tmp_path / "triton", kind)


def test_ensemble_groups_unpooled_rows_by_sample(version, tmp_path):
    config = config_of(export_lookup(version, tmp_path, Path("/etc/hps.yaml")))
    assert shapes(config.output)["title"] == ("TYPE_FP16", [3, 2], None)
    assert config.instance_group[0].kind == pb.ModelInstanceGroup.KIND_CPU
    ensemble = config_of(export_ensemble(version, tmp_path))
    lookup, network = ensemble.ensemble_scheduling.step
    assert network.input_map["words"] == lookup.output_map["title"]


def test_keys_of_several_tables_are_one_input_and_an_output_each(version, tmp_path):
    data = SPEC | {
        "features": [{"name": "user", "table": ["users", "words"]}],
        "dense": {**SPEC["dense"], "embeddings": {"user.words": "words"}},
    }
    version = replace(version, spec=ModelSpec.model_validate(data))
    config = config_of(export_lookup(version, tmp_path, Path("/etc/hps.yaml")))
    assert [t.name for t in config.input] == ["KEYS", "NUMKEYS", "user"]
    assert [t.name for t in config.output] == ["OUTPUT0", "user.users", "user.words"]
    ensemble = config_of(export_ensemble(version, tmp_path))
    assert [t.name for t in ensemble.input] == ["user", "age"]
    lookup, network = ensemble.ensemble_scheduling.step
    assert dict(lookup.input_map) == {"user": "user"}
    assert network.input_map["user.users"] == lookup.output_map["user.users"]
    assert network.input_map["words"] == lookup.output_map["user.words"]


def test_instances_on_gpus(version, tmp_path):
    config = config_of(export_lookup(version, tmp_path, Path("/etc/hps.yaml"), 2, (0, 3)))
    (group,) = config.instance_group
    assert (group.kind, group.count, [*group.gpus]) == (pb.ModelInstanceGroup.KIND_GPU, 2, [0, 3])
    assert config.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value == "no"


def test_ensemble_rejects_unpooled_features_without_hotness(version, tmp_path):
    version.spec.features[1].__dict__["hotness"] = None
    with pytest.raises(ModelError, match="has no hotness"):
        export_ensemble(version, tmp_path)


@pytest.mark.parametrize("taken", ["FP16", "FP32"])
def test_float16_vectors_have_the_type_of_the_network(version, tmp_path, monkeypatch, taken):
    inputs = (NetworkTensor("user", "FP32", (-1, 4)), NetworkTensor("words", taken, (-1, 3, 2)))
    network = SimpleNamespace(inputs=inputs, outputs=())
    monkeypatch.setattr("hps.triton.export.OnnxModel", lambda path, provider: network)
    version = replace(version, dense=tmp_path / "dense.onnx")
    outputs = shapes(config_of(export_lookup(version, tmp_path, Path("/etc/hps.yaml"))).output)
    assert outputs["title"] == (f"TYPE_{taken}", [3, 2], None)
    assert outputs["user"][0] == outputs["OUTPUT0"][0] == "TYPE_FP32"
