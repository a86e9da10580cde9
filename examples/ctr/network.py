"""The network, in JAX: a DeepFM over one embedding row per feature and the three numbers.

    logit = bias + linear(x) + Σ_f row_f[0] + FM(row_f[1:]) + MLP([rows, x])

``row_f[0]`` is a key's own weight, the rest its vector; FM sums the products of all pairs of vectors;
``x`` are the numbers, encoded. ``export.py`` writes the same arithmetic as an ONNX graph.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from examples.ctr.data import FEATURES, INPUTS

LEVELS = (1.0, 2.0, 3.0)
"""The values of depth and position."""
ENCODED = 2 * len(LEVELS) + 2

Params = dict[str, Any]


def encode(inputs: dict[str, NDArray[np.float32]]) -> Array:
    """depth, position, impression, each ``(n, 1)``, as ``(n, ENCODED)``: which depth, which
    position, how far down, and the logarithm of the impressions."""
    depth, position, impression = (jnp.asarray(inputs[name]) for name in INPUTS)
    levels = jnp.asarray(LEVELS, jnp.float32)
    return jnp.concatenate(
        [
            (depth == levels).astype(jnp.float32),
            (position == levels).astype(jnp.float32),
            position / jnp.maximum(depth, 1.0),
            jnp.log(jnp.maximum(impression, 1.0)),
        ],
        axis=1,
    )


def scaled(net: Params, encoded: Array) -> Array:
    result: Array = (encoded - net["mean"]) * net["scale"]
    return result


def scaling(encoded: Array) -> Params:
    """Scale and shift that standardize the encoded numbers of the training samples."""
    return {"mean": encoded.mean(0), "scale": 1 / jnp.maximum(encoded.std(0), 1e-6)}


def init(dim: int, size: int, clicked: NDArray[np.float32], key: Array) -> Params:
    """The parameters to be learned: rows of ``dim`` in, a hidden layer of ``size``."""
    width = len(FEATURES) * dim + ENCODED
    rate = float(clicked.mean())
    return {
        "bias": jnp.full(1, np.log(rate / (1 - rate)), jnp.float32),
        "linear": jnp.zeros(ENCODED),
        "hidden": jax.random.normal(key, (width, size)) * np.sqrt(2 / width),
        "hidden_bias": jnp.zeros(size),
        "out": jnp.zeros(size),
    }


def logits(
    net: Params, rows: Array, x: Array, dropout: float = 0.0, key: Array | None = None
) -> Array:
    """``rows (n, features, dim)``, scaled ``x (n, ENCODED)`` → ``(n,)``; with ``key``, dropout acts."""
    vectors = rows[:, :, 1:]
    pairs = 0.5 * (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(1)
    flat = jnp.concatenate([rows.reshape(len(rows), -1), x], axis=1)
    hidden = jax.nn.relu(flat @ net["hidden"] + net["hidden_bias"])
    if key is not None:
        hidden *= jax.random.bernoulli(key, 1 - dropout, hidden.shape) / (1 - dropout)
    wide = rows[:, :, 0].sum(1) + x @ net["linear"] + net["bias"]
    result: Array = wide + pairs + hidden @ net["out"]
    return result
