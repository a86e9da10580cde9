"""What a layer, or an operator in a graph, states of its table: constants, no objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hps.torch.nodes import find_node, node_name
from hps.torch.pytorch import torch

if TYPE_CHECKING:
    from hps.node.served_models import OpenModels

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16}
"""PyTorch's dtypes by NumPy's names, of the vectors that tables may have."""


class TableReference(NamedTuple):
    """A table of a registered node; ``version`` "" is the model's current one.

    The fields are the last arguments of the operators, in their order."""

    node: str
    model: str
    table: str
    version: str
    dim: int
    dtype: torch.dtype

    @staticmethod
    def of(
        node: OpenModels | str, model: str, table: str, version: str | int | None
    ) -> TableReference:
        """Refer to a table of a node, or of the registered node with this name.

        Raises ``NotFound`` for unknown names, ``BadRequest`` for what is not a node."""
        name = node_name(node)
        found = find_node(name).table(model, table, version)
        wanted = "" if version is None else str(version)
        dtype = TORCH_DTYPES[found.dtype.name]
        return TableReference(name, model, table, wanted, found.dim, dtype)
