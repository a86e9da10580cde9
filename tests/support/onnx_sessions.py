"""ONNX models with operators of hps, and their sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime
from onnx import TensorProto, helper

import hps.onnx


def lookup_model(
    nodes: Sequence[Any], inputs: Mapping[str, Any], outputs: Sequence[str], weights: Any = ()
) -> bytes:
    """An ONNX model; ``inputs``: a type of ``TensorProto`` and a shape each; ``outputs`` are floats."""
    described = [helper.make_tensor_value_info(name, *of) for name, of in inputs.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(list(nodes), "ranker", described, results, list(weights))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("hps", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def lookup_node(
    operator: str, inputs: Sequence[str], output: str, table: str, **attributes: Any
) -> Any:
    """A node of the domain ``hps``, on a table of the model ``m`` of the node ``rows``."""
    names = {"node": "rows", "model": "m", "table": table, **attributes}
    named = {name: value for name, value in names.items() if value is not None}
    return helper.make_node(operator, list(inputs), [output], domain="hps", **named)


def open_session(model: bytes, **settings: Any) -> Any:
    """A session on the CPU; ``settings``: attributes of ``SessionOptions``."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # failures are raised
    for name, value in settings.items():
        setattr(options, name, value)
    hps.onnx.register_operators(options)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def keys_input(*shape: Any) -> tuple[int, Sequence[Any]]:
    """The description of an input of keys; by default ``(batch,)``."""
    return TensorProto.INT64, list(shape or ["batch"])
