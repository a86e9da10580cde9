"""Layers with the interface of ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag``.

Any number of threads may call a layer. A layer holds names and no rows: it has neither parameters nor
buffers, and copying or pickling it copies neither node nor rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from hps.errors import Unsupported
from hps.layers.table_lookup import TableReference, check_combiner, check_max_norm
from hps.torch import operators
from hps.torch.pytorch import torch

if TYPE_CHECKING:
    from hps.node.served_models import OpenModels


class NoWeight(Unsupported, AttributeError):
    """A layer was asked for its weight, but the rows are in a node's table."""


class _TableLayer(torch.nn.Module):
    """What both layers share: the table, and clear errors for uses that only training has.

    ``embedding_dim`` and ``dtype`` are those of its vectors."""

    def __init__(
        self,
        node: OpenModels | str,
        model: str,
        table: str,
        *,
        max_norm: float | None = None,
        version: str | int | None = None,
    ) -> None:
        super().__init__()
        reference = TableReference.of(node, model, table, version)
        self._table: tuple[Any, ...] = tuple(reference)
        self.embedding_dim = reference.dim
        self.max_norm = check_max_norm(max_norm)
        self.dtype = operators.TORCH_DTYPES[reference.dtype]

    def extra_repr(self) -> str:
        table = TableReference(*self._table)
        norm = "" if self.max_norm is None else f", max_norm={self.max_norm}"
        version = f", version={table.version}" if table.version else ""
        return f"{table.model}/{table.table}, dim={table.dim}, node={table.node}{norm}{version}"

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raise ``Unsupported`` unless ``requires_grad`` is False."""
        if requires_grad:
            raise Unsupported(
                f"{type(self).__name__} is for inference: its rows are in the table of a node and have no "
                "gradient; train a torch.nn layer, and import its weight (hps model import)"
            )
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise NoWeight(
                f"{type(self).__name__} has no weight: its rows are in the table of a node; read some by "
                "node.lookup(model, {table: keys}, by_table=True), change them by node.write"
            )
        return super().__getattr__(name)


class Embedding(_TableLayer):
    """Rows of a table by key, as ``torch.nn.Embedding`` looks up rows by number. For inference.

    ``node``: the result of ``hps.open``, ``hps.attach`` or ``hps.connect``, or the name of one given to
    `register_node`; it must stay open. ``max_norm``: rows whose l2 norm exceeds it are scaled down to it, in
    the output only. ``version``: a served version's number or label; None: the current one at each call.
    Raises ``NotFound`` for unknown names, ``BadRequest`` for what is not a node or a ``max_norm`` below 0."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up keys int64, int32 or uint64 of any shape: a new tensor ``(*input.shape, dim)``.

        It has the table's dtype (float32 or float16), is on the device of ``input`` and requires no
        gradient. An absent key gets the table's default. Every int64 is a valid key; none is out of range.
        Raises ``BadRequest`` for other dtypes, for a table whose dim or dtype changed since the layer was
        made, and for keys on a GPU without a GPU cache; ``NotFound``; ``Unavailable`` once the node is
        closed; and as ``node.lookup``."""
        return operators.embedding(input, self.max_norm, *self._table)


class EmbeddingBag(_TableLayer):
    """Rows of a table pooled by bag, as ``torch.nn.EmbeddingBag`` does. For inference.

    ``mode``: ``"sum"``, ``"mean"`` or ``"sqrtn"``, TensorFlow's combiner: the sum divided by the square root
    of the number of keys. ``include_last_offset``: the last offset is the number of keys. ``node``,
    ``max_norm`` and ``version``: as of `Embedding`. Raises as `Embedding`, and ``BadRequest`` for other
    modes."""

    def __init__(
        self,
        node: OpenModels | str,
        model: str,
        table: str,
        mode: Literal["sum", "mean", "sqrtn"] = "mean",
        *,
        include_last_offset: bool = False,
        max_norm: float | None = None,
        version: str | int | None = None,
    ) -> None:
        super().__init__(node, model, table, max_norm=max_norm, version=version)
        self.mode = check_combiner(mode, "mode")
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look up and pool keys int64, int32 or uint64: a new tensor ``(bags, dim)`` of the table's dtype.

        ``input`` ``(bags, n)``, or ``(n,)`` with ``offsets (bags,)`` int64 or int32, the position of each
        bag's first key (``(bags + 1,)`` with ``include_last_offset``). ``per_sample_weights``: floating
        point, of the shape of ``input``, rounded to float32; ``mean`` then divides by their sum, ``sqrtn``
        by the square root of the sum of their squares. A bag without keys gets zeros, an absent key the
        table's default. Rows are added in the order of the keys, in float32.

        The output requires a gradient only if ``per_sample_weights`` do, and raises ``Unsupported`` in
        ``backward``. Raises ``BadRequest`` also for offsets that do not start with 0, that fall or exceed
        the number of keys; else as `Embedding.forward`."""
        return operators.embedding_bag(
            input,
            offsets,
            per_sample_weights,
            self.include_last_offset,
            self.mode,
            self.max_norm,
            *self._table,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode}"
