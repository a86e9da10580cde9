"""Keras 3 layers whose rows are in a node's tables instead of the model: for inference.

    import hps, hps.keras, keras

    with hps.open("hps.yaml") as node:
        users = hps.keras.Embedding(node, "ctr", "user")
        users(keras.ops.array([[17, 42]], "int64"))  # (1, 2, dim)

Keras's backend is TensorFlow or PyTorch. docs/keras.md describes the layers. Importing this package without
Keras raises `hps.errors.PackageMissing`, which is also an ``ImportError``."""

from __future__ import annotations

from hps.keras.layers import Embedding, EmbedReduce
from hps.layers.nodes import register_node, unregister_node

__all__ = ["EmbedReduce", "Embedding", "register_node", "unregister_node"]
