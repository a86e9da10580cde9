"""A repository of two small models: one that ranks, one of lookups alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import helper, numpy_helper

from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from tests.support import onnx_networks

RANKING = {
    "name": "clicks",
    "tables": [
        {"name": "users", "dim": 4, "default": 0.5},
        {"name": "items", "dim": 2, "default": [1.0, 2.0]},
    ],
    "features": [
        {"name": "user", "table": "users", "hotness": 1, "context": True},
        {"name": "item", "table": "items", "hotness": 1},
        {"name": "history", "table": "items", "pooling": "mean"},
    ],
    "dense": {
        "inputs": [{"name": "dense", "shape": [-1, 3]}],
        "outputs": [{"name": "score", "shape": [-1, 1]}, {"name": "logit", "shape": [-1, 1]}],
    },
    "max_batch_size": 64,
}
LOOKUP = {
    "name": "words",
    "tables": [{"name": "words", "dim": 8}],
    "features": [{"name": "word", "table": "words", "pooling": "none", "max_length": 8}],
}


def network(first: float = -1.0) -> bytes:
    """``score = sigmoid(logit)``, ``logit`` a sum of all inputs, weighted from ``first`` to its opposite."""
    widths = {"user": 4, "item": 2, "history": 2, "dense": 3}
    weights = np.linspace(first, -first, sum(widths.values()), dtype=np.float32)[:, None]
    nodes = [
        helper.make_node("Concat", list(widths), ["all"], axis=1),
        helper.make_node("MatMul", ["all", "weights"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["score"]),
    ]
    named = numpy_helper.from_array(weights, "weights")
    return onnx_networks.network(nodes, widths, {"score": 1, "logit": 1}, [named])


def write_models(root: Path) -> None:
    """``clicks``: users 0…99 and items -50…49; ``words``: words 0…999. Row ``k`` begins with ``k``."""

    def table(first: int, last: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
        keys = np.arange(first, last)
        return keys, keys[:, None] + np.arange(dim, dtype=np.float32) / 8

    ranking = {"users": table(0, 100, 4), "items": table(-50, 50, 2)}
    write_version(root, ModelSpec.model_validate(RANKING), 1, ranking, dense=network())
    write_version(root, ModelSpec.model_validate(LOOKUP), 1, {"words": table(0, 1000, 8)})
