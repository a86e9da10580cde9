"""Networks of the model `clicks` (`tests.support.small_models`) that are slow, fail, or score differently."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests.support import onnx_networks

WIDTHS = {"user": 4, "item": 2, "history": 2, "dense": 3}


def variant(kind: str) -> bytes:
    """``same``, ``slow`` (some 20 ms more), ``failing`` (for batches of three) or ``shifted``.

    Scores are ``sigmoid(w * x)`` with small weights, so that they are spread over (0, 1)."""
    weights = np.linspace(-0.02, 0.02, sum(WIDTHS.values()), dtype=np.float32)[:, None]
    constants = [numpy_helper.from_array(weights, "weights")]
    nodes = [
        helper.make_node("Concat", list(WIDTHS), ["all"], axis=1),
        helper.make_node("MatMul", ["all", "weights"], ["sum"]),
    ]
    if kind == "slow":
        constants += _constants(side=[512, 512], zero=0.0, axes=[0, 1])
        # Products of matrices that depend on the input, so that nothing is computed in advance.
        nodes += [
            helper.make_node("ReduceSum", ["sum", "axes"], ["one"], keepdims=0),
            helper.make_node("Expand", ["one", "side"], ["m0"]),
            *(helper.make_node("MatMul", [f"m{i}", f"m{i}"], [f"m{i + 1}"]) for i in range(12)),
            helper.make_node("ReduceMax", ["m12"], ["most"], keepdims=0),
            helper.make_node("Min", ["most", "zero"], ["capped"]),
            helper.make_node("Max", ["capped", "zero"], ["nothing"]),
            helper.make_node("Add", ["sum", "nothing"], ["logit"]),
        ]
    elif kind == "failing":
        constants += _constants(first=0, three=3, beyond=9, zeros=[0.0, 0.0])
        nodes += [
            helper.make_node("Shape", ["all"], ["shape"]),
            helper.make_node("Gather", ["shape", "first"], ["batch"]),
            helper.make_node("Equal", ["batch", "three"], ["is_three"]),
            helper.make_node("Cast", ["is_three"], ["one"], to=TensorProto.INT64),
            helper.make_node("Mul", ["one", "beyond"], ["index"]),
            helper.make_node("Gather", ["zeros", "index"], ["nothing"]),  # no such index
            helper.make_node("Add", ["sum", "nothing"], ["logit"]),
        ]
    else:
        constants += _constants(shift=1.5 if kind == "shifted" else 0.0)
        nodes.append(helper.make_node("Add", ["sum", "shift"], ["logit"]))
    nodes.append(helper.make_node("Sigmoid", ["logit"], ["score"]))
    return onnx_networks.network(nodes, WIDTHS, {"score": 1, "logit": 1}, constants)


def _constants(**values: Any) -> Iterable[Any]:
    for name, value in values.items():
        first = value[0] if isinstance(value, list) else value
        dtype = np.float32 if isinstance(first, float) else np.int64
        yield numpy_helper.from_array(np.array(value, dtype), name)
