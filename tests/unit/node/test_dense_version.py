"""Versions with another network: one that does not fit the model is neither published nor served."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import hps
from hps.config.model_schema import ModelSpec
from hps.errors import ModelError
from hps.models.derived_version import derive_dense_version
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.node.dense_version import check_network_file, write_dense_version
from tests.support.onnx_networks import network, summing_network

SPEC = ModelSpec.model_validate(
    {
        "name": "clicks",
        "tables": [{"name": "user", "dim": 4}, {"name": "item", "dim": 2}],
        "dense": {
            "inputs": [{"name": "price", "shape": [-1, 1]}],
            "outputs": [{"name": "ctr", "shape": [-1, 1]}],
        },
    }
)
WIDTHS = {"user": 4, "item": 2, "price": 1}
UNFIT = {
    "input missing": (
        summing_network({"user": 4, "price": 1}, "ctr"),
        r"model.yaml names input 'item', the network has user, price",
    ),
    "input unknown": (
        summing_network({**WIDTHS, "age": 1}, "ctr"),
        r"model.yaml feeds nothing to network input 'age'",
    ),
    "width": (
        summing_network({**WIDTHS, "item": 3}, "ctr"),
        r"'item' has shape \[-1, 2\] in model.yaml, \[-1, 3\] in the network",
    ),
    "output missing": (
        summing_network(WIDTHS, "cvr"),
        r"model.yaml names output 'ctr', the network has cvr",
    ),
    "no network": (b"no network", r"ONNX Runtime cannot load it"),
}
unfit = pytest.mark.parametrize(("net", "message"), UNFIT.values(), ids=UNFIT)


def negated():
    """A network of the same shape with other answers."""
    nodes = [
        helper.make_node("Concat", list(WIDTHS), ["all"], axis=1),
        helper.make_node("ReduceSum", ["all", "axes"], ["sum"], keepdims=1),
        helper.make_node("Neg", ["sum"], ["ctr"]),
    ]
    return network(nodes, WIDTHS, {"ctr": 1}, [numpy_helper.from_array(np.array([1]), "axes")])


@pytest.fixture
def models(tmp_path):
    keys = np.arange(10)
    tables = {t.name: (keys, np.ones((10, t.dim), np.float32)) for t in SPEC.tables}
    folder = tmp_path / "models"
    write_version(folder, SPEC, 1, tables, dense=summing_network(WIDTHS, "ctr"))
    return folder


@pytest.fixture
def node(models, tmp_path):
    tiers = {"rocksdb": {"path": str(tmp_path / "db")}}
    with hps.open({"models": {"repository": str(models)}, "tiers": tiers}) as opened:
        yield opened


def score(node):
    result = node.predict("clicks", {"user": [1], "item": [2]}, {"price": [[5.0]]})
    return result.outputs["ctr"].item()


@unfit
def test_version_whose_network_does_not_fit_is_not_loaded(node, models, net, message):
    derive_dense_version(models, "clicks", net)
    assert score(node) == 11
    with pytest.raises(ModelError, match=message):
        node.load("clicks", 2)
    assert score(node) == 11
    assert [each.version for each in node.models.of("clicks")] == [1]
    write_dense_version(models, "clicks", negated())
    assert node.load("clicks") == 3
    assert score(node) == -11


@unfit
def test_network_that_does_not_fit_is_not_written(models, tmp_path, net, message):
    path = tmp_path / "new.onnx"
    path.write_bytes(net)
    for dense in (net, path):
        with pytest.raises(ModelError, match=message):
            write_dense_version(models, "clicks", dense)
    assert sorted(each.name for each in (models / "clicks").iterdir()) == ["1", "model.yaml"]


def test_network_that_fits_is_written(models, tmp_path):
    path = tmp_path / "new.onnx"
    path.write_bytes(negated())
    for version, dense in ((2, path), (3, negated())):
        assert write_dense_version(models, "clicks", dense) == models / "clicks" / str(version)
        opened = Repository(models).open("clicks", version)
        assert opened.dense.read_bytes() == path.read_bytes()


def test_missing_file_and_model_are_errors(models, tmp_path):
    with pytest.raises(ModelError, match=r"none\.onnx: No such file"):
        write_dense_version(models, "clicks", tmp_path / "none.onnx")
    with pytest.raises(ModelError, match="has no model 'views'"):
        write_dense_version(models, "views", negated())


def matmul():
    weights = numpy_helper.from_array(np.ones((300, 1), np.float32), "weights")
    node = helper.make_node("MatMul", ["t", "weights"], ["score"])
    return onnx.load_from_string(network([node], {"t": 300}, {"score": 1}, [weights]))


def test_network_with_external_weights_is_rejected(tmp_path):
    """torch.onnx.export writes external data by default; the version would miss its weights."""
    spec = ModelSpec.model_validate(
        {
            "name": "m",
            "tables": [{"name": "t", "dim": 300}],
            "dense": {"outputs": [{"name": "score", "shape": [-1, 1]}]},
        }
    )
    path = tmp_path / "dense.onnx"
    onnx.save_model(matmul(), path, save_as_external_data=True, location="dense.onnx.data")
    assert (tmp_path / "dense.onnx.data").exists()
    with pytest.raises(ModelError, match=r"dense\.onnx keeps its weights.*external_data=False"):
        check_network_file(spec, path)
    onnx.save_model(onnx.load(path), path)  # the remedy that the error names
    check_network_file(spec, path)


def test_damaged_network_is_named_by_its_path(tmp_path):
    path = tmp_path / "dense.onnx"
    path.write_bytes(b"no network")
    with pytest.raises(ModelError) as error:
        check_network_file(SPEC, path)
    assert str(path) in str(error.value)
