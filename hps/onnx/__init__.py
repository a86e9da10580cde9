"""Operators of ONNX models whose rows are in a node's tables: for ONNX Runtime in this process.

    import hps, hps.onnx, onnxruntime

    with hps.open("hps.yaml") as node:
        hps.onnx.register_node("rows", node)
        options = onnxruntime.SessionOptions()
        hps.onnx.register_operators(options)
        session = onnxruntime.InferenceSession("ranker.onnx", options)

docs/onnx.md describes the operators of the domain ``hps``."""

from __future__ import annotations

from hps.layers.nodes import register_node, unregister_node
from hps.onnx.operators import register_operators

__all__ = ["register_node", "register_operators", "unregister_node"]
