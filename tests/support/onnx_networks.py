"""Small ONNX networks, as the bytes of a model's `dense.onnx`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnx import TensorProto, helper

Tensor = int | tuple[int, Sequence[Any]]
"""The width of a FLOAT tensor of (batch, width), or a type of ``TensorProto`` and a shape."""

OPSET = 17


def network(
    nodes: Iterable[Any],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    weights: Iterable[Any] = (),
) -> bytes:
    """The network of ``nodes``, each made by ``helper.make_node``; ``weights`` are its initializers."""
    graph = helper.make_graph(
        list(nodes), "network", _described(inputs), _described(outputs), list(weights)
    )
    opset = helper.make_opsetid("", OPSET)
    return bytes(helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString())


def summing_network(
    inputs: Mapping[str, int], output: str, more: Iterable[Any] = (), **others: int
) -> bytes:
    """``output`` (batch, 1): the sum over all ``inputs``; ``more`` nodes make ``others`` of it."""
    nodes = [
        helper.make_node("Concat", list(inputs), ["all"], axis=1),
        helper.make_node("ReduceSum", ["all", "axes"], [output], keepdims=1),
    ]
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    return network([*nodes, *more], inputs, {output: 1, **others}, [axes])


def _described(tensors: Mapping[str, Tensor]) -> list[Any]:
    full = {
        name: (TensorProto.FLOAT, ["batch", tensor]) if isinstance(tensor, int) else tensor
        for name, tensor in tensors.items()
    }
    return [helper.make_tensor_value_info(name, *tensor) for name, tensor in full.items()]
