"""Writes a trained model into a model repository: tables, ``dense.onnx``, ``model.yaml``, manifest.

``publish`` is all a trainer of yours would call; the rest shows where each part comes from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper

from examples.ctr.data import FEATURES, INPUTS, Samples
from examples.ctr.network import LEVELS
from examples.ctr.training import Trained
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version

MODEL = "ctr"
OUTPUTS = ("click", "logit")
# What one request of the search engine shares: its ads are the candidates.
CONTEXT = ("user", "query", "depth")
OPSET, IR_VERSION = 17, 8
REQUESTS_FILE = "requests.json"


def publish(
    trained: Trained,
    repository: Path,
    version: int = 1,
    metadata: Mapping[str, Any] | None = None,
    *,
    watermark: Mapping[str, Mapping[str, int]] | None = None,
    replace: bool = False,
) -> Path:
    """Write one version; returns its folder. ``watermark``: see `hps.updates.Producer.watermark`.
    Raises ModelError, for one when it exists already."""
    return write_version(
        repository,
        specification(trained),
        version,
        tables(trained),
        dense=network(trained).SerializeToString(),
        metadata=metadata,
        watermark=watermark,
        replace=replace,
        replace_spec=replace,
    )


def tables(trained: Trained) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Keys and rows by table, the hottest first: caches are filled from the start of the files."""
    places = {name: trained.vocabulary.of_feature(i) for i, name in enumerate(FEATURES)}
    return {
        name: (trained.vocabulary.keys[where], trained.rows[where])
        for name, where in places.items()
    }


def defaults(trained: Trained) -> dict[str, NDArray[np.float32]]:
    """The learned default row of each table."""
    return dict(zip(FEATURES, trained.rows[trained.vocabulary.first], strict=True))


def specification(trained: Trained) -> ModelSpec:
    """``model.yaml``: one table and one feature per column of keys."""
    dim = trained.options.dim
    return ModelSpec.model_validate(
        {
            "name": MODEL,
            "tables": [
                # The shortest text of a float32 reads back as the same float32.
                {"name": name, "dim": dim, "default": [float(str(v)) for v in row]}
                for name, row in defaults(trained).items()
            ],
            "features": [
                {"name": name, "table": name, "hotness": 1, "context": name in CONTEXT}
                for name in FEATURES
            ],
            "dense": {
                "inputs": [
                    {"name": name, "shape": [-1, 1], "context": name in CONTEXT} for name in INPUTS
                ],
                "outputs": [{"name": name, "shape": [-1, 1]} for name in OUTPUTS],
                "ranking_output": "click",
            },
        }
    )


def network(trained: Trained) -> ModelProto:
    """``network.py``'s arithmetic as an ONNX graph: one input per feature and per number."""
    net, dim = trained.network, trained.options.dim
    g = _Graph()
    x = _encoded(g, net)
    flat = g.add("Concat", *FEATURES, axis=1)
    rows = g.add("Reshape", flat, g.constant(np.array([0, len(FEATURES), dim])))
    own = g.add("Slice", rows, *(g.constant(np.array([n])) for n in (0, 1, 2)))
    vectors = g.add("Slice", rows, *(g.constant(np.array([n])) for n in (1, dim, 2)))
    over_features, over_dim = g.constant(np.array([1])), g.constant(np.array([1]))
    total = g.add("ReduceSum", vectors, over_features, keepdims=0)
    squares = g.add("ReduceSum", g.add("Mul", vectors, vectors), over_features, keepdims=0)
    twice_pairs = g.add("ReduceSum", g.add("Sub", g.add("Mul", total, total), squares), over_dim)
    linear = g.add("Gemm", x, g.constant(net["linear"][:, None]), g.constant(net["bias"]))
    every = g.add("Concat", flat, x, axis=1)
    hidden = g.add("Gemm", every, g.constant(net["hidden"]), g.constant(net["hidden_bias"]))
    terms = (
        g.add("ReduceSum", own, over_features, keepdims=0),
        linear,
        g.add("Mul", twice_pairs, g.constant(np.array(0.5, np.float32))),
        g.add("MatMul", g.add("Relu", hidden), g.constant(net["out"][:, None])),
    )
    logit = g.add("Sum", *terms, output="logit")
    g.add("Sigmoid", logit, output="click")
    return g.model(dict.fromkeys(FEATURES, dim) | dict.fromkeys(INPUTS, 1))


def _encoded(g: _Graph, net: Mapping[str, NDArray[np.float32]]) -> str:
    """``network.encode`` and ``network.scaled``."""
    depth, position, impression = INPUTS
    levels = g.constant(np.array(LEVELS, np.float32))
    one = g.constant(np.array(1.0, np.float32))
    parts = (
        g.add("Cast", g.add("Equal", depth, levels), to=TensorProto.FLOAT),
        g.add("Cast", g.add("Equal", position, levels), to=TensorProto.FLOAT),
        g.add("Div", position, g.add("Max", depth, one)),
        g.add("Log", g.add("Max", impression, one)),
    )
    centred = g.add("Sub", g.add("Concat", *parts, axis=1), g.constant(net["mean"]))
    return g.add("Mul", centred, g.constant(net["scale"]))


class _Graph:
    """Collects nodes and constants; every node's output gets a name of its own."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def add(self, operator: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        name = output or f"{operator}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def constant(self, value: NDArray[Any]) -> str:
        name = f"constant_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(value, name))
        return name

    def model(self, inputs: Mapping[str, int]) -> ModelProto:
        """``inputs``: width of each; all tensors are float32 ``(batch, width)``."""

        def tensor(name: str, width: int) -> Any:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])

        graph = helper.make_graph(
            self._nodes,
            MODEL,
            [tensor(name, width) for name, width in inputs.items()],
            [tensor(name, 1) for name in OUTPUTS],
            self._constants,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
        )
        checker.check_model(model, full_check=True)
        return model


def made_up_samples(trained: Trained, count: int, seed: int = 7) -> Samples:
    """Requests to try a model with: each feature's key is drawn from its table on its own, popular
    ones more often, so that no row of the training data comes out."""
    rng = np.random.default_rng(seed)
    keys = {}
    for number, name in enumerate(FEATURES):
        where = trained.vocabulary.of_feature(number)
        counts = trained.vocabulary.counts[where]
        keys[name] = rng.choice(trained.vocabulary.keys[where], count, p=counts / counts.sum())
    depth = rng.integers(1, 4, count)
    inputs = {
        "depth": depth,
        "position": rng.integers(1, depth + 1),
        "impression": rng.geometric(0.7, count),
    }
    numbers = {name: value.astype(np.float32)[:, None] for name, value in inputs.items()}
    return Samples(keys, numbers, np.zeros(count, np.float32))


def write_requests(trained: Trained, repository: Path, count: int = 256) -> Path:
    """``requests.json`` beside the model: made-up requests and the trainer's own scores for them, in
    the form ``hps demo --model`` takes."""
    samples = made_up_samples(trained, count)
    content = {
        "model": MODEL,
        "features": {
            name: keys.view(np.uint64)[:, None].tolist() for name, keys in samples.keys.items()
        },
        "dense": {name: values.tolist() for name, values in samples.inputs.items()},
        "scores": {
            name: [float(str(v)) for v in scores] for name, scores in trained.score(samples).items()
        },
    }
    path = repository / REQUESTS_FILE
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    return path
