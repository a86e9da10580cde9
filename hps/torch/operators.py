"""The operators ``torch.ops.hps.embedding`` and ``torch.ops.hps.embedding_bag``.

They are opaque to ``torch.compile`` and ``torch.export``: a graph holds the names of node, model, table and
version ("" is the current one), ``dim`` and ``dtype``; the shapes of outputs follow from these. Thread-safe.

Host keys and rows are not copied: a lookup reads the tensor's memory, and its array becomes the output.
Only rows from remote nodes are copied once, because their array is read-only."""

from __future__ import annotations

from typing import Any

import numpy as np

from hps.errors import BadRequest, Unsupported
from hps.layers.nodes import find_node
from hps.layers.table_lookup import TableReference, check_vectors, look_up_bags, look_up_rows
from hps.torch.pytorch import torch
from hps.types import JaggedKeys, Pooling

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16}
"""PyTorch's dtypes by NumPy's names, of the vectors that tables may have."""
_KEY_DTYPES = (torch.int64, torch.int32, torch.uint64)
_OFFSET_DTYPES = (torch.int64, torch.int32)
_TABLE = "float? max_norm, str node, str model, str table, str version, int dim, str dtype"


def _embedding(keys: torch.Tensor, max_norm: float | None, *names: Any) -> torch.Tensor:
    table = TableReference(*names)
    return _rows(keys, table, max_norm).reshape(*keys.shape, table.dim)


def _fake_embedding(keys: torch.Tensor, _max_norm: float | None, *names: Any) -> torch.Tensor:
    table = TableReference(*names)
    _check_keys(keys)
    return keys.new_empty((*keys.shape, table.dim), dtype=TORCH_DTYPES[table.dtype])


def _embedding_bag(
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    include_last_offset: bool,
    mode: Pooling,
    max_norm: float | None,
    *names: Any,
) -> torch.Tensor:
    table = TableReference(*names)
    _count_bags(keys, offsets, weights, include_last_offset)
    if keys.device.type != "cpu":
        rows = _rows(keys, table, max_norm)
        return _device_bags(rows, keys, offsets, weights, include_last_offset, mode)
    bags = _jagged_keys(keys, offsets, weights, include_last_offset)
    return torch.from_numpy(look_up_bags(bags, mode, table, max_norm))


def _fake_embedding_bag(
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    include_last_offset: bool,
    _mode: str,
    _max_norm: float | None,
    *names: Any,
) -> torch.Tensor:
    table = TableReference(*names)
    bags = _count_bags(keys, offsets, weights, include_last_offset)
    return keys.new_empty((bags, table.dim), dtype=TORCH_DTYPES[table.dtype])


def _refuse_backward(_context: Any, _gradient: Any) -> None:
    raise Unsupported(
        "layers on a node's tables are for inference: they have no gradient for weights "
        "(per_sample_weights); detach these, or run the model under torch.no_grad() or torch.inference_mode()"
    )


# -- rows ------------------------------------------------------------------------------------------


def _rows(keys: torch.Tensor, table: TableReference, max_norm: float | None) -> torch.Tensor:
    """Look up one row per key: ``(n, dim)`` on the device of ``keys``."""
    _check_keys(keys)
    flat = keys.reshape(-1)
    if keys.device.type == "cpu":
        return torch.from_numpy(look_up_rows(flat.numpy(), table, max_norm))
    rows = _device_rows(flat, table)
    return rows if max_norm is None else _scale_to_norm(rows, max_norm)


def _device_rows(keys: torch.Tensor, table: TableReference) -> torch.Tensor:
    """Look up rows that stay on the GPU, copied to memory of PyTorch.

    PyTorch frees a tensor before the kernels that read it have run, and reuses only memory of its allocator
    in their order: an array of CuPy must not be its memory."""
    node = find_node(table.node)
    lookup = getattr(node, "lookup_on_device", None)
    if keys.device.type != "cuda" or lookup is None:
        raise BadRequest(
            f"keys are on {keys.device}, but lookups of {type(node).__name__} answer on the host; pass "
            "keys.cpu(), or open a node with a GPU cache in this process (hps.open, tiers.gpu.use)"
        )
    stream = torch.cuda.current_stream(keys.device)
    stream.synchronize()  # a lookup waits for CuPy's current stream only
    found = lookup(
        table.model, {table.table: keys}, version=table.version or None, by_table=True
    ).vectors[table.table]
    check_vectors(found, table)
    rows = torch.from_dlpack(found).to(keys.device, copy=True)
    stream.synchronize()
    return rows


def _scale_to_norm(rows: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Scale rows longer than ``max_norm`` down to it, on their device; see `hps.lookup.max_norm`."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float32)
    scaled = (rows.float() * max_norm / norms).to(rows.dtype)
    return torch.where(norms > max_norm, scaled, rows)


# -- bags ------------------------------------------------------------------------------------------


def _device_bags(
    rows: torch.Tensor,
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    include_last_offset: bool,
    mode: Pooling,
) -> torch.Tensor:
    """Pool ``rows``, those of ``keys``, on their device: ``(bags, dim)``."""
    positions = torch.arange(keys.numel(), device=keys.device).reshape(keys.shape)
    starts = None if offsets is None else offsets.to(torch.int64)

    def summed(values: torch.Tensor, factors: torch.Tensor | None, mode: str) -> torch.Tensor:
        return torch.nn.functional.embedding_bag(
            positions,
            values,
            starts,
            mode=mode,
            per_sample_weights=None if factors is None else factors.to(values.dtype),
            include_last_offset=include_last_offset and starts is not None,
        )

    if mode == "sum" or (mode == "mean" and weights is None):
        return summed(rows, weights, mode)
    ones = torch.ones((keys.numel(), 1), device=keys.device)
    factors = None if weights is None else weights.float()
    if mode == "sqrtn" and factors is not None:
        factors = factors * factors
    divisors = summed(ones, factors, "sum")
    if mode == "sqrtn":
        divisors = divisors.sqrt()
    quotients = summed(rows, weights, "sum").float() / divisors
    return torch.where(divisors == 0, 0.0, quotients).to(rows.dtype)


def _jagged_keys(
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    include_last_offset: bool,
) -> JaggedKeys:
    """Convert the operator's arguments on the host; offsets get their last one."""
    flat = keys.reshape(-1).numpy()
    factors = None if weights is None else weights.detach().float().reshape(-1).numpy()
    if offsets is None:
        return JaggedKeys(flat, len(keys), None, factors)
    bounds = offsets.numpy()
    if not include_last_offset:
        bounds = np.append(bounds, len(flat))
    return JaggedKeys(flat, len(bounds) - 1, bounds, factors)


# -- checks, of shapes and dtypes alone --------------------------------------------------------------


def _check_keys(keys: torch.Tensor) -> None:
    if keys.dtype not in _KEY_DTYPES:
        raise BadRequest(
            f"keys must be int64, int32 or uint64, got {keys.dtype}; convert: keys.long()"
        )


def _count_bags(
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    include_last_offset: bool,
) -> Any:
    """Check arguments as ``torch.nn.functional.embedding_bag`` does; return the number of bags."""
    _check_keys(keys)
    if weights is not None:
        if weights.shape != keys.shape:
            raise BadRequest(
                f"weights have shape {list(weights.shape)}, input has {list(keys.shape)}"
            )
        if not weights.dtype.is_floating_point:
            raise BadRequest(f"weights must be floating point, got {weights.dtype}")
    if keys.dim() == 2:
        if offsets is not None:
            raise BadRequest("a 2-D input has bags of one length and takes no offsets")
        return keys.shape[0]
    if keys.dim() != 1:
        raise BadRequest(f"input must be 1-D or 2-D, got {keys.dim()}-D")
    if offsets is None or offsets.dim() != 1:
        raise BadRequest("a 1-D input needs offsets, 1-D: the position of each bag's first key")
    if offsets.dtype not in _OFFSET_DTYPES:
        raise BadRequest(f"offsets must be int64 or int32, got {offsets.dtype}")
    return offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]


_BAGS = (
    "Tensor input, Tensor? offsets, Tensor? per_sample_weights, bool include_last_offset, str mode"
)
# Not by custom_op: its first call imports the compiler, which takes seconds, and each call takes 9 us more.
torch.library.define("hps::embedding", f"(Tensor input, {_TABLE}) -> Tensor")
torch.library.impl("hps::embedding", "default", _embedding)
torch.library.register_fake("hps::embedding", _fake_embedding)
torch.library.define("hps::embedding_bag", f"({_BAGS}, {_TABLE}) -> Tensor")
torch.library.impl("hps::embedding_bag", "default", _embedding_bag)
torch.library.register_fake("hps::embedding_bag", _fake_embedding_bag)
torch.library.register_autograd("hps::embedding_bag", _refuse_backward)

embedding = torch.ops.hps.embedding.default
embedding_bag = torch.ops.hps.embedding_bag.default
