"""Lookups of Keras layers on PyTorch: by the operators of `hps.torch`, which graphs may contain."""

from __future__ import annotations

from typing import Any

from hps.errors import BadRequest
from hps.layers.table_lookup import TableReference
from hps.torch import operators
from hps.torch.pytorch import torch
from hps.types import Pooling

SUPPORTS_JIT = True


def look_up_rows(keys: torch.Tensor, table: TableReference, max_norm: float | None) -> torch.Tensor:
    """Look up ``(*keys.shape, dim)``, on the device of ``keys``."""
    _check_dense(keys)
    return operators.embedding(keys, max_norm, *table)


def look_up_bags(
    keys: torch.Tensor,
    weights: torch.Tensor | None,
    combiner: Pooling,
    table: TableReference,
    max_norm: float | None,
) -> torch.Tensor:
    """Look up and pool ``keys (batch, n)`` to ``(batch, dim)``, on the device of ``keys``."""
    _check_dense(keys)
    return operators.embedding_bag(keys, None, weights, False, combiner, max_norm, *table)


def cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.to(getattr(torch, dtype))


def _check_dense(keys: Any) -> None:
    if keys.layout != torch.strided:
        raise BadRequest(
            f"keys must be dense on PyTorch, got {keys.layout}; pad them, with weights 0"
        )
