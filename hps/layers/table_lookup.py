"""Lookups in a table that a layer, or an operator in a graph, names: arrays on the host. Thread-safe.

Results may be written: only rows from remote nodes, whose array is read-only, are copied for that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hps.errors import BadRequest
from hps.layers.nodes import find_node, node_name
from hps.lookup.base import Feature
from hps.lookup.checks import check_keys
from hps.lookup.max_norm import scale_to_norm
from hps.lookup.pooling import pool
from hps.types import JaggedKeys, Pooling

if TYPE_CHECKING:
    from hps.node.served_models import OpenModels

COMBINERS = ("sum", "mean", "sqrtn")
"""The ways to pool a bag; see `hps.lookup.pooling`."""


class TableReference(NamedTuple):
    """What a layer states of its table: constants, no objects. ``version`` "" is the model's current one.

    ``dtype``: NumPy's name of the dtype of its vectors, ``"float32"`` or ``"float16"``. The fields are the
    last arguments of PyTorch's operators, in their order."""

    node: str
    model: str
    table: str
    version: str
    dim: int
    dtype: str

    @staticmethod
    def of(
        node: OpenModels | str, model: str, table: str, version: str | int | None
    ) -> TableReference:
        """Refer to a table of a node, or of the registered node with this name.

        Raises ``NotFound`` for unknown names, ``BadRequest`` for what is not a node."""
        name = node_name(node)
        found = find_node(name).table(model, table, version)
        wanted = "" if version is None else str(version)
        return TableReference(name, model, table, wanted, found.dim, found.dtype.name)


def check_combiner(combiner: Any, name: str = "combiner") -> Pooling:
    """Return ``combiner`` if it is one. Raises ``BadRequest``, with the parameter's ``name``."""
    if combiner not in COMBINERS:
        raise BadRequest(f"{name} is {combiner!r}; it must be 'sum', 'mean' or 'sqrtn'")
    return combiner  # type: ignore[no-any-return] # one of COMBINERS


def check_max_norm(max_norm: Any) -> float | None:
    """Return ``max_norm`` as a float, or None. Raises ``BadRequest`` unless it is None, 0 or more."""
    if max_norm is None:
        return None
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise BadRequest(f"max_norm is {max_norm!r}; it must be a number, 0 or more, or None")
    return float(max_norm)


def look_up_rows(keys: Any, table: TableReference, max_norm: float | None = None) -> Any:
    """Look up the rows ``(n, dim)`` of ``keys (n,)``, scaled down to ``max_norm`` if it is given.

    They have the table's dtype. Raises ``BadRequest`` if the table's dim or dtype changed since the
    reference was made, ``NotFound``, and as ``node.lookup``."""
    found = find_node(table.node).lookup(
        table.model, {table.table: keys}, version=table.version or None, by_table=True
    )
    rows = _writeable(found.vectors[table.table], table)
    return rows if max_norm is None else scale_to_norm(rows, max_norm).astype(table.dtype)


def look_up_bags(
    bags: JaggedKeys, combiner: Pooling, table: TableReference, max_norm: float | None = None
) -> Any:
    """Look up and pool ``bags`` to ``(batch, dim)``; rows are scaled down to ``max_norm`` before.

    A bag without keys gets zeros. Raises as `look_up_rows`, and ``BadRequest`` for wrong offsets."""
    node, version = find_node(table.node), table.version or None
    feature = _pooling_feature(node, bags, combiner, table, max_norm)
    if feature is not None:
        found = node.lookup(table.model, {feature: bags}, version=version)
        return _writeable(found.vectors[feature], table)
    embedding_table = node.table(table.model, table.table, version)
    bags = check_keys(Feature(table.table, embedding_table, pooling=combiner), bags)
    rows = look_up_rows(bags.keys, table)
    if max_norm is not None:
        rows = scale_to_norm(rows, max_norm)
    return pool(rows, bags, combiner, dtype=embedding_table.dtype)


def check_vectors(vectors: Any, table: TableReference) -> None:
    """Raise ``BadRequest`` unless ``vectors (n, dim)`` are those that the reference states."""
    dim, dtype = vectors.shape[1], vectors.dtype.name
    if dim != table.dim or dtype != table.dtype:
        raise BadRequest(
            f"table '{table.model}/{table.table}' has rows of {dim} {dtype} now, but the layer was made for "
            f"{table.dim} {table.dtype}; make the layer, or export the program, again"
        )


def _writeable(vectors: Any, table: TableReference) -> Any:
    check_vectors(vectors, table)
    return vectors if vectors.flags.writeable else vectors.copy()


def _pooling_feature(
    node: OpenModels,
    bags: JaggedKeys,
    combiner: Pooling,
    table: TableReference,
    max_norm: float | None,
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
        same = feature.table.name == table.table and feature.pooling == combiner
        if same and is_free and not feature.key_offset and feature.max_norm == max_norm:
            return name
    return None
