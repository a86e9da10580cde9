"""The operators ``torch.ops.hps.embedding`` and ``torch.ops.hps.embedding_bag``.

They are opaque to ``torch.compile`` and ``torch.export``: a graph holds the names of node, model, table and
version ("" is the current one), ``dim`` and ``dtype``; the shapes of outputs follow from these. Thread-safe.

Host keys and rows are not copied: a lookup reads the tensor's memory, and its array becomes the output.
Only rows from remote nodes are copied once, because their array is read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hps.errors import BadRequest, Unsupported
from hps.lookup.base import Feature
from hps.lookup.checks import check_keys
from hps.lookup.pooling import pool
from hps.torch.nodes import find_node
from hps.torch.pytorch import torch
from hps.torch.table_reference import TORCH_DTYPES, TableReference
from hps.types import JaggedKeys, Pooling

if TYPE_CHECKING:
    from hps.node.served_models import OpenModels

_KEY_DTYPES = (torch.int64, torch.int32, torch.uint64)
_OFFSET_DTYPES = (torch.int64, torch.int32)
_TABLE = "str node, str model, str table, str version, int dim, ScalarType dtype"


def _embedding(keys: torch.Tensor, *names: Any) -> torch.Tensor:
    table = TableReference(*names)
    return _rows(keys, table).reshape(*keys.shape, table.dim)


def _fake_embedding(keys: torch.Tensor, *names: Any) -> torch.Tensor:
    table = TableReference(*names)
    _check_keys(keys)
    return keys.new_empty((*keys.shape, table.dim), dtype=table.dtype)


def _embedding_bag(
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    include_last_offset: bool,
    mode: Pooling,
    *names: Any,
) -> torch.Tensor:
    table = TableReference(*names)
    _count_bags(keys, offsets, weights, include_last_offset, mode)
    if keys.device.type != "cpu":
        return _device_bags(keys, offsets, weights, include_last_offset, mode, table)
    bags = _jagged_keys(keys, offsets, weights, include_last_offset)
    return torch.from_numpy(_host_bags(bags, mode, table))


def _fake_embedding_bag(
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    include_last_offset: bool,
    mode: str,
    *names: Any,
) -> torch.Tensor:
    table = TableReference(*names)
    bags = _count_bags(keys, offsets, weights, include_last_offset, mode)
    return keys.new_empty((bags, table.dim), dtype=table.dtype)


def _refuse_backward(_context: Any, _gradient: Any) -> None:
    raise Unsupported(
        "hps.torch layers are for inference: they have no gradient for per_sample_weights; detach these, "
        "or run the model under torch.no_grad() or torch.inference_mode()"
    )


# -- rows ------------------------------------------------------------------------------------------


def _rows(keys: torch.Tensor, table: TableReference) -> torch.Tensor:
    """Look up one row per key: ``(n, dim)`` on the device of ``keys``."""
    _check_keys(keys)
    if keys.device.type == "cpu":
        return torch.from_numpy(_host_rows(keys.reshape(-1).numpy(), table))
    return _device_rows(keys.reshape(-1), table)


def _host_rows(keys: Any, table: TableReference) -> Any:
    """Look up rows ``(n, dim)`` of ``keys (n,)``: an array that may be written."""
    found = find_node(table.node).lookup(
        table.model, {table.table: keys}, version=table.version or None, by_table=True
    )
    return _writeable(found.vectors[table.table], table)


def _writeable(vectors: Any, table: TableReference) -> Any:
    """Check vectors on the host; copy them if they are read-only, which a tensor cannot be."""
    _check_vectors(vectors, table)
    return vectors if vectors.flags.writeable else vectors.copy()


def _check_vectors(vectors: Any, table: TableReference) -> None:
    dim, dtype = vectors.shape[1], TORCH_DTYPES[vectors.dtype.name]
    if dim != table.dim or dtype != table.dtype:
        raise BadRequest(
            f"table '{table.model}/{table.table}' has rows of {dim} {dtype} now, but the layer was made for "
            f"{table.dim} {table.dtype}; make the layer, or export the program, again"
        )


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
    _check_vectors(found, table)
    rows = torch.from_dlpack(found).to(keys.device, copy=True)
    stream.synchronize()
    return rows


# -- bags ------------------------------------------------------------------------------------------


def _host_bags(bags: JaggedKeys, mode: Pooling, table: TableReference) -> Any:
    """Look up and pool on the host: ``(batch, dim)``, an array that may be written."""
    node, version = find_node(table.node), table.version or None
    feature = _pooling_feature(node, bags, mode, table)
    if feature is not None:
        found = node.lookup(table.model, {feature: bags}, version=version)
        return _writeable(found.vectors[feature], table)
    embedding_table = node.table(table.model, table.table, version)
    bags = check_keys(Feature(table.table, embedding_table, pooling=mode), bags)
    return pool(_host_rows(bags.keys, table), bags, mode)


def _pooling_feature(
    node: OpenModels, bags: JaggedKeys, mode: Pooling, table: TableReference
) -> str | None:
    """Return the name of a feature that pools the table's keys just so; None if the model has none.

    A lookup by feature pools in the cache, without an array of all rows."""
    if table.model in node.models.splits:
        return None  # the traffic rule chooses a version, whose features may differ
    served = node.model(table.model, table.version or None)
    if bags.batch > served.spec.max_batch_size:
        return None
    for name, feature in served.engine.features.items():
        is_free = feature.hotness is None and feature.max_hotness is None
        same = feature.table.name == table.table and feature.pooling == mode
        if same and is_free and not feature.key_offset:
            return name
    return None


def _device_bags(
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    include_last_offset: bool,
    mode: str,
    table: TableReference,
) -> torch.Tensor:
    rows = _rows(keys, table)
    positions = torch.arange(keys.numel(), device=keys.device).reshape(keys.shape)
    return torch.nn.functional.embedding_bag(
        positions,
        rows,
        None if offsets is None else offsets.to(torch.int64),
        mode=mode,
        per_sample_weights=None if weights is None else weights.to(rows.dtype),
        include_last_offset=include_last_offset,
    )


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
    mode: str,
) -> Any:
    """Check arguments as ``torch.nn.functional.embedding_bag`` does; return the number of bags."""
    _check_keys(keys)
    if weights is not None:
        if mode != "sum":
            raise BadRequest(f"per_sample_weights need mode 'sum', this layer has {mode!r}")
        if weights.shape != keys.shape:
            raise BadRequest(
                f"per_sample_weights have shape {list(weights.shape)}, input has {list(keys.shape)}"
            )
        if not weights.dtype.is_floating_point:
            raise BadRequest(f"per_sample_weights must be floating point, got {weights.dtype}")
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
