from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from hps.cli.model_options import check_wiring, features
from hps.config import ModelSpec
from hps.errors import ConfigError, ModelError
from tests.support.onnx_networks import network

SPEC = ModelSpec.model_validate(
    {
        "name": "m",
        "tables": [{"name": "t", "dim": 300}],
        "dense": {"outputs": [{"name": "score", "shape": [-1, 1]}]},
    }
)


def matmul() -> onnx.ModelProto:
    weights = numpy_helper.from_array(np.ones((300, 1), np.float32), "weights")
    node = helper.make_node("MatMul", ["t", "weights"], ["score"])
    return onnx.load_from_string(network([node], {"t": 300}, {"score": 1}, [weights]))


def test_network_with_external_weights_is_rejected(tmp_path):
    """torch.onnx.export writes external data by default; the version would miss its weights."""
    path = tmp_path / "dense.onnx"
    onnx.save_model(matmul(), path, save_as_external_data=True, location="dense.onnx.data")
    assert (tmp_path / "dense.onnx.data").exists()
    with pytest.raises(ModelError, match=r"dense\.onnx keeps its weights.*external_data=False"):
        check_wiring(SPEC, path)
    onnx.save_model(onnx.load(path), path)  # the remedy that the error names
    check_wiring(SPEC, path)


def test_damaged_network_is_named_by_its_path(tmp_path):
    path = tmp_path / "dense.onnx"
    path.write_bytes(b"no network")
    with pytest.raises(ModelError) as error:
        check_wiring(SPEC, path)
    assert str(path) in str(error.value)


def test_feature_option_takes_several_tables():
    deep_and_wide, plain = features(["ad=deep,wide+100:mean", "user=users"])
    assert deep_and_wide.vectors == {"ad.deep": "deep", "ad.wide": "wide"}
    assert (deep_and_wide.key_offset, deep_and_wide.pooling) == (100, "mean")
    assert [f.pooling for f in features(["a=users:sqrtn", "b=users:none"])] == ["sqrtn", "none"]
    assert plain.vectors == {"user": "users"}


@pytest.mark.parametrize("value", ["ad=deep,", "ad=,deep", "ad=deep,deep", "ad=deep,offsets"])
def test_feature_option_rejects_unusable_table_lists(value):
    with pytest.raises(ConfigError, match="--feature ad"):
        features([value])
