"""PyTorch layers whose rows are in a node's tables instead of the module: for inference.

    import hps, hps.torch

    with hps.open("hps.yaml") as node:
        users = hps.torch.Embedding(node, "ctr", "user")
        users(torch.tensor([[17, 42]]))  # (1, 2, dim)

The layers work in eager mode, under ``torch.compile`` without a graph break, and in programs of
``torch.export``. docs/torch.md describes them. Importing this package without PyTorch raises
`hps.errors.PackageMissing`, which is also an ``ImportError``."""

from __future__ import annotations

from hps.layers.nodes import register_node, unregister_node
from hps.torch.layers import Embedding, EmbeddingBag
from hps.torch.replacement import replace_embeddings

__all__ = ["Embedding", "EmbeddingBag", "register_node", "replace_embeddings", "unregister_node"]
