"""A synthetic model: tables of random rows, and a small network over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hps.config.model_schema import ModelSpec
from hps.errors import ConfigError
from hps.models.version_writer import write_version
from hps.types import KeyArray, VectorArray

_CHUNK_ROWS = 1 << 16
_HIDDEN = 64


def model_spec(
    name: str, tables: int, dim: int, hotness: int | None, dense: int, batch: int
) -> ModelSpec:
    """Describe ``tables`` tables ``t0`` … of ``dim`` values with a feature ``f0`` … each.

    ``hotness``: keys per sample; None: any number. ``dense``: further inputs of a network with one score;
    without them (0) there is no network."""
    return ModelSpec.model_validate(
        {
            "name": name,
            "tables": [{"name": f"t{i}", "dim": dim} for i in range(tables)],
            "features": [
                {"name": f"f{i}", "table": f"t{i}", "hotness": hotness} for i in range(tables)
            ],
            "dense": {
                "inputs": [{"name": "dense", "shape": [-1, dense]}],
                "outputs": [{"name": "score", "shape": [-1, 1]}],
            }
            if dense
            else None,
            "max_batch_size": batch,
        }
    )


def write_model(
    root: Path, spec: ModelSpec, rows: int, seed: int, progress: Callable[[int], None]
) -> Path:
    """Write version 1 and return its folder. Raises ConfigError, ModelError.

    Each table has ``rows`` rows, keys 0 … ``rows`` - 1, values uniform between -1 and 1, as from HPS's
    generator."""

    def chunks(table: int, dim: int) -> Iterator[tuple[KeyArray, VectorArray]]:
        random = np.random.default_rng([seed, table])
        for start in range(0, rows, _CHUNK_ROWS):
            keys = np.arange(start, min(start + _CHUNK_ROWS, rows))
            values = random.random((len(keys), dim), dtype=np.float32)
            yield keys, 2 * values - 1

    tables = {table.name: chunks(i, table.dim) for i, table in enumerate(spec.tables)}
    network = None if spec.dense is None else _network(spec, seed)
    return write_version(root, spec, 1, tables, dense=network, progress=progress)


def _network(spec: ModelSpec, seed: int) -> bytes:
    """Two layers over all inputs and a sigmoid, as ONNX."""
    try:
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        raise ConfigError(
            "a network is written with the package onnx: pip install onnx, or leave it out: --dense 0"
        ) from None
    assert spec.dense is not None
    widths = {feature.name: spec.tables[i].dim for i, feature in enumerate(spec.features)}
    widths |= {tensor.name: tensor.shape[1] for tensor in spec.dense.inputs}
    random = np.random.default_rng(seed)
    total = sum(widths.values())
    first = (random.standard_normal((total, _HIDDEN)) / total**0.5).astype(np.float32)
    second = (random.standard_normal((_HIDDEN, 1)) / _HIDDEN**0.5).astype(np.float32)

    def tensor(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])

    graph = helper.make_graph(
        [
            helper.make_node("Concat", list(widths), ["all"], axis=1),
            helper.make_node("MatMul", ["all", "first"], ["hidden"]),
            helper.make_node("Relu", ["hidden"], ["positive"]),
            helper.make_node("MatMul", ["positive", "second"], ["logit"]),
            helper.make_node("Sigmoid", ["logit"], ["score"]),
        ],
        spec.name,
        [tensor(name, width) for name, width in widths.items()],
        [tensor("score", 1)],
        [numpy_helper.from_array(first, "first"), numpy_helper.from_array(second, "second")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())
