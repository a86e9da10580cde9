"""Lookups of Keras layers on TensorFlow: of arrays when eager, by ``tf.numpy_function`` in a graph.

A graph holds a call of this process's Python: it runs here, on the host, and under the GIL. XLA cannot
compile it, and a SavedModel with it runs in no other process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hps.errors import BadRequest, PackageMissing, Unsupported
from hps.layers import table_lookup
from hps.layers.table_lookup import TableReference
from hps.types import JaggedKeys, Pooling

try:
    import tensorflow as tf
except ImportError as error:
    raise PackageMissing(f"Keras's backend is tensorflow, which does not load: {error}") from error

SUPPORTS_JIT = False


def look_up_rows(keys: Any, table: TableReference, max_norm: float | None) -> Any:
    """Look up ``(*keys.shape, dim)``; ragged keys give ragged rows. Raises ``BadRequest`` for sparse ones."""
    if isinstance(keys, tf.RaggedTensor):
        return keys.with_flat_values(look_up_rows(keys.flat_values, table, max_norm))
    if isinstance(keys, tf.SparseTensor):
        raise BadRequest(
            "keys are sparse; pass tf.sparse.to_dense(keys), or pool them: EmbedReduce"
        )
    look_up = partial(_rows, table, max_norm)
    return _call(look_up, [keys], [*keys.shape, table.dim], table.dtype)


def look_up_bags(
    keys: Any,
    weights: Any,
    combiner: Pooling,
    table: TableReference,
    max_norm: float | None,
) -> Any:
    """Look up and pool dense, sparse or ragged ``keys (batch, n)`` to ``(batch, dim)``."""
    make_bags, inputs = _components(keys)
    look_up = partial(_pooled, table, max_norm, combiner, make_bags)
    shape = [keys.shape[0], table.dim]
    if weights is None:
        return _call(look_up, inputs, shape, table.dtype)
    make_other, (factors, *structure) = _components(weights)
    if make_other is not make_bags:
        raise BadRequest(
            f"weights are {type(weights).__name__}, keys {type(keys).__name__}: not alike"
        )

    @tf.custom_gradient  # type: ignore[untyped-decorator] # TensorFlow has no types
    def weighted(factors: Any) -> Any:
        pooled = _call(look_up, [*inputs, factors, *structure], shape, table.dtype)
        return pooled, _refuse_gradient

    return weighted(tf.cast(factors, tf.float32))


def cast(tensor: Any, dtype: str) -> Any:
    """Convert ``tensor`` to another dtype."""
    return tf.cast(tensor, dtype)


def _call(function: Callable[..., Any], inputs: Sequence[Any], shape: Any, dtype: str) -> Any:
    """Call ``function`` with the inputs' arrays, now or whenever the graph runs. ``shape``: of its array."""
    if tf.executing_eagerly():
        return tf.convert_to_tensor(function(*(each.numpy() for each in inputs)))
    # Stateful: rows change, so two calls with equal keys are two lookups.
    result = tf.numpy_function(function, inputs, dtype, stateful=True)
    result.set_shape(shape)
    return result


def _refuse_gradient(*_gradient: Any) -> Any:
    raise Unsupported(
        "layers on a node's tables are for inference: they have no gradient for weights; stop it with "
        "tf.stop_gradient(weights)"
    )


def _components(tensor: Any) -> tuple[Callable[..., JaggedKeys], list[Any]]:
    """Return what makes bags of the arrays of a tensor's components, and these, its values first."""
    if isinstance(tensor, tf.SparseTensor):
        return _sparse_bags, [tensor.values, tensor.indices, tensor.dense_shape]
    if isinstance(tensor, tf.RaggedTensor):
        return _ragged_bags, [tensor.flat_values, tensor.row_splits]
    return _dense_bags, [tensor]


# -- on arrays ---------------------------------------------------------------------------------------


def _rows(table: TableReference, max_norm: float | None, keys: Any) -> Any:
    rows = table_lookup.look_up_rows(keys.reshape(-1), table, max_norm)
    return rows.reshape(*keys.shape, table.dim)


def _pooled(
    table: TableReference,
    max_norm: float | None,
    combiner: Pooling,
    make_bags: Callable[..., JaggedKeys],
    *arrays: Any,
) -> Any:
    return table_lookup.look_up_bags(make_bags(*arrays), combiner, table, max_norm)


def _dense_bags(keys: Any, weights: Any = None) -> JaggedKeys:
    if weights is None:
        return JaggedKeys(keys.reshape(-1), len(keys))
    if weights.shape != keys.shape:
        raise BadRequest(f"weights have shape {list(weights.shape)}, keys {list(keys.shape)}")
    return JaggedKeys(keys.reshape(-1), len(keys), None, weights.reshape(-1))


def _ragged_bags(keys: Any, splits: Any, weights: Any = None, other: Any = None) -> JaggedKeys:
    if keys.ndim != 1:
        raise BadRequest("ragged keys must have their bags in the second dimension")
    if weights is not None and not np.array_equal(splits, other):
        raise BadRequest("ragged keys and weights must have equal row_splits")
    return JaggedKeys(keys, len(splits) - 1, splits, weights)


def _sparse_bags(
    keys: Any, indices: Any, shape: Any, weights: Any = None, other: Any = None, _shape: Any = None
) -> JaggedKeys:
    if weights is not None and not np.array_equal(indices, other):
        raise BadRequest("sparse keys and weights must have equal indices")
    samples = indices[:, 0]
    if np.any(samples[1:] < samples[:-1]):
        raise BadRequest("sparse keys are not in row order; pass tf.sparse.reorder(keys)")
    offsets = np.searchsorted(samples, np.arange(shape[0] + 1))
    return JaggedKeys(keys, int(shape[0]), offsets, weights)
