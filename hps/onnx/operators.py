"""The operators ``hps.Embedding`` and ``hps.EmbeddingBag`` of ONNX models.

Their library is the compiled core (`hps/native/bindings_onnx.cpp`), which calls the kernels that are made
here. A kernel holds names and no state: any number of threads may run a session. Keys and result are copied
once each, and the GIL is held except in the lookup's native parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from hps.errors import BadRequest, Unsupported
from hps.layers.table_lookup import (
    TableReference,
    check_combiner,
    check_max_norm,
    look_up_bags,
    look_up_rows,
)
from hps.native import COMPILED
from hps.types import JaggedKeys, Pooling

_NAMES = ("node", "model", "table")


def register_operators(options: Any) -> None:
    """Let sessions that are opened with ``options``, ``onnxruntime.SessionOptions``, run the operators.

    Opening a session raises ONNX Runtime's ``RuntimeException`` for unknown names and attributes that do not
    fit, running one its ``Fail`` for what ``node.lookup`` refuses; the text is that of the `HpsError`. Raises
    ``Unsupported`` without the compiled core."""
    if not COMPILED:
        raise Unsupported(
            "operators for ONNX Runtime are in hps's compiled core, which this process does not use; "
            "install a C++ compiler and hps again, and unset HPS_NATIVE (hps doctor reports both)"
        )
    from hps.native.onnx_library import LIBRARY, set_onnx_kernels

    set_onnx_kernels(make_kernel)
    options.register_custom_ops_library(LIBRARY)


def make_kernel(operator: str, attributes: Mapping[str, Any]) -> Callable[..., Any]:
    """Make the function of a node's inputs, arrays, to its output, float32.

    ``attributes``: strings ``node``, ``model`` and ``table``, and optionally ``version``, ``mode`` and the
    float ``max_norm``. Raises ``BadRequest`` for missing and wrong ones, ``NotFound`` for unknown names."""
    missing = [name for name in _NAMES if not attributes.get(name)]
    if missing:
        raise BadRequest(
            f"a node hps.{operator} needs the string attributes node, model and table; missing: "
            f"{', '.join(missing)}"
        )
    node, model, name = (attributes[name] for name in _NAMES)
    table = TableReference.of(node, model, name, attributes.get("version") or None)
    max_norm = check_max_norm(attributes.get("max_norm"))
    if operator == "Embedding":
        return partial(_embedding, table, max_norm)
    mode = check_combiner(attributes.get("mode", "mean"), "mode")
    return partial(_embedding_bag, table, max_norm, mode)


def _embedding(table: TableReference, max_norm: float | None, keys: Any) -> Any:
    rows = look_up_rows(keys.reshape(-1), table, max_norm)
    return np.ascontiguousarray(rows.reshape(*keys.shape, table.dim), np.float32)


def _embedding_bag(
    table: TableReference,
    max_norm: float | None,
    mode: Pooling,
    keys: Any,
    offsets: Any = None,
    weights: Any = None,
) -> Any:
    pooled = look_up_bags(_bags(keys, offsets, weights), mode, table, max_norm)
    return np.ascontiguousarray(pooled, np.float32)


def _bags(keys: Any, offsets: Any, weights: Any) -> JaggedKeys:
    """Check the inputs' shapes. ``offsets (bags,)``: the position of each bag's first key."""
    if weights is not None and weights.shape != keys.shape:
        raise BadRequest(f"weights have shape {list(weights.shape)}, keys {list(keys.shape)}")
    flat = None if weights is None else weights.reshape(-1)
    if keys.ndim == 2 and offsets is None:
        return JaggedKeys(keys.reshape(-1), len(keys), None, flat)
    if keys.ndim != 1 or offsets is None or offsets.ndim != 1:
        raise BadRequest(
            "keys must be 2-D, (bags, keys), without offsets, or 1-D with 1-D offsets; got "
            f"{keys.ndim}-D {'without' if offsets is None else 'with'} offsets"
        )
    return JaggedKeys(keys, len(offsets), np.append(offsets, len(keys)), flat)
