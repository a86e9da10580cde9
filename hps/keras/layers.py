"""Layers like ``keras.layers.Embedding``, and like ``EmbedReduce`` of Keras's package for recommenders.

Any number of threads may call a layer. A layer holds names and no rows: it has no weights, and its
configuration in a saved model names node, model, table and version."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from hps.errors import BadRequest
from hps.keras.keras3 import keras
from hps.layers.table_lookup import TableReference, check_combiner, check_max_norm

if TYPE_CHECKING:
    from hps.node.served_models import OpenModels

backend: Any = import_module(f"hps.keras.{keras.backend.backend()}_backend")
_KEY_DTYPES = ("int64", "int32", "uint64")


class _TableLayer(keras.layers.Layer):
    """What both layers share: the table, its configuration and the dtype of outputs."""

    def __init__(
        self,
        node: OpenModels | str,
        model: str,
        table: str,
        *,
        version: str | int | None = None,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._table = TableReference.of(node, model, table, version)
        self.max_norm = check_max_norm(max_norm)
        self.output_dim = self._table.dim
        self.supports_jit = backend.SUPPORTS_JIT
        self.autocast = False  # weights stay float32 under a mixed policy

    def get_config(self) -> dict[str, Any]:
        """Return the arguments to make this layer again: names, no rows."""
        table = self._table
        named = {"node": table.node, "model": table.model, "table": table.table}
        options = {"version": table.version or None, "max_norm": self.max_norm}
        return {**super().get_config(), **named, **options}

    def _described(self, shape: tuple[int | None, ...], **kind: bool) -> Any:
        return keras.KerasTensor((*shape, self._table.dim), dtype=self.compute_dtype, **kind)


@keras.saving.register_keras_serializable("hps")
class Embedding(_TableLayer):
    """Rows of a table by key, as ``keras.layers.Embedding`` looks up rows by number. For inference.

    ``node``: the result of ``hps.open``, ``hps.attach`` or ``hps.connect``, or the name of one given to
    `register_node`; it must stay open. ``version``: a served version's number or label; None: the current one
    at each call. ``max_norm``: rows whose l2 norm exceeds it are scaled down to it, in the output only.
    ``options``: those of ``keras.layers.Layer``: ``name``, ``dtype``. Raises ``NotFound`` for unknown names,
    ``BadRequest`` for what is not a node and a ``max_norm`` below 0."""

    def call(self, inputs: Any) -> Any:
        """Look up keys of any shape, int64, int32 or, on TensorFlow, uint64.

        The output is ``(*inputs.shape, dim)`` of the layer's ``compute_dtype``. An absent key gets the
        table's default. Every int64 is a valid key, also 0. On TensorFlow the keys may be ragged; the output
        is ragged then.

        Raises ``BadRequest`` for other dtypes and sparse keys, and for a table whose dim or dtype changed
        since the layer was made; ``NotFound``; ``Unavailable`` once the node is closed; and as
        ``node.lookup``. In a graph of TensorFlow, ``tf.errors.UnknownError`` has their text instead."""
        _check_keys(inputs)
        rows = backend.look_up_rows(inputs, self._table, self.max_norm)
        return backend.cast(rows, self.compute_dtype)

    def compute_output_spec(self, inputs: Any) -> Any:
        """Describe the output for a symbolic input. Raises ``BadRequest`` for keys that are no integers."""
        _check_keys(inputs)
        is_ragged = getattr(inputs, "ragged", False)
        return self._described(tuple(inputs.shape), **({"ragged": True} if is_ragged else {}))


@keras.saving.register_keras_serializable("hps")
class EmbedReduce(_TableLayer):
    """Rows of a table pooled by bag, as TensorFlow's ``embedding_lookup_sparse`` does. For inference.

    ``combiner``: ``"sum"``, ``"mean"``, which divides the sum by the number of keys, or ``"sqrtn"``, which
    divides it by the square root of that number. Other arguments as of `Embedding`. Raises as `Embedding`,
    and ``BadRequest`` for other combiners."""

    def __init__(
        self,
        node: OpenModels | str,
        model: str,
        table: str,
        combiner: Literal["sum", "mean", "sqrtn"] = "mean",
        *,
        version: str | int | None = None,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(node, model, table, version=version, max_norm=max_norm, **options)
        self.combiner = check_combiner(combiner)

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Look up and pool integer keys ``(batch, n)`` as of `Embedding`: a tensor ``(batch, dim)``.

        It has the layer's ``compute_dtype``. On TensorFlow the keys may also be a ``SparseTensor`` in row
        order or a ``RaggedTensor``, 2-D. ``weights``: floats of the same kind and shape; rounded to float32,
        they multiply the rows, ``mean`` divides by their sum, ``sqrtn`` by the square root of the sum of
        their squares. A bag without keys, or whose divisor is 0, gets zeros. Rows are added in the order of
        the keys, in float32. A gradient for ``weights`` raises ``Unsupported``; else raises as
        `Embedding.call`."""
        self._check(inputs, weights)
        pooled = backend.look_up_bags(inputs, weights, self.combiner, self._table, self.max_norm)
        return backend.cast(pooled, self.compute_dtype)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Describe the output for symbolic inputs. Raises ``BadRequest`` as `call`."""
        self._check(inputs, weights)
        return self._described((inputs.shape[0],))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments to make this layer again: names, no rows."""
        return {**super().get_config(), "combiner": self.combiner}

    def _check(self, inputs: Any, weights: Any) -> None:
        _check_keys(inputs)
        if len(inputs.shape) != 2:
            raise BadRequest(
                f"keys must be 2-D, (batch, keys), got {len(inputs.shape)}-D; for one key a sample use "
                "hps.keras.Embedding"
            )
        if weights is not None and not keras.backend.is_float_dtype(_dtype(weights)):
            raise BadRequest(f"weights must be floating point, got {_dtype(weights)}")


def _check_keys(keys: Any) -> None:
    if _dtype(keys) not in _KEY_DTYPES:
        raise BadRequest(
            f"keys must be int64, int32 or uint64, got {_dtype(keys)}; keras.Input takes dtype='int64', "
            "tensors keras.ops.cast(keys, 'int64')"
        )


def _dtype(tensor: Any) -> str:
    return str(keras.backend.standardize_dtype(tensor.dtype))
