"""Replacement of a trained model's embedding modules by layers on a node's tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hps.errors import BadRequest, NotFound
from hps.layers.nodes import node_name
from hps.torch.layers import Embedding, EmbeddingBag
from hps.torch.pytorch import torch

if TYPE_CHECKING:
    from hps.node.served_models import OpenModels


def replace_embeddings(
    module: torch.nn.Module,
    node: OpenModels | str,
    model: str,
    tables: Mapping[str, str],
    *,
    version: str | int | None = None,
) -> None:
    """Replace embedding modules of ``module``, in place, by layers on the tables of a node.

    ``tables``: the table by the path of each module, as in ``named_modules()``, such as
    ``{"emb.0": "user"}``. Load the state_dict first: the new layers have no parameters. A path's
    ``padding_idx`` must be a row of the table, as it was of the weight. Changes nothing if it raises:
    ``NotFound`` for unknown names; ``BadRequest`` for other modules, another dim than the table's, and for
    what a table cannot do: mode ``max``, ``max_norm`` with another ``norm_type`` than 2, and an
    `EmbeddingBag` with ``padding_idx``. ``max_norm`` then changes no stored row."""
    name = node_name(node)
    replaced: dict[str, torch.nn.Module] = {}
    for path, table in tables.items():
        try:
            old = module.get_submodule(path)
        except AttributeError as error:
            raise NotFound(f"the module has no submodule {path!r}: {error}") from None
        replaced[path] = _layer_like(path, old, (name, model, table), version)
    for path, layer in replaced.items():
        parent, _, child = path.rpartition(".")
        setattr(module.get_submodule(parent), child, layer)


def _layer_like(
    path: str, old: Any, table: tuple[str, str, str], version: str | int | None
) -> torch.nn.Module:
    """Make the layer that computes what ``old`` does."""
    is_bag = isinstance(old, torch.nn.EmbeddingBag)
    if not path or not (is_bag or isinstance(old, torch.nn.Embedding)):
        raise BadRequest(
            f"{path!r} is a {type(old).__name__}; only Embedding and EmbeddingBag submodules are replaced"
        )
    if old.max_norm is not None and old.norm_type != 2:
        raise BadRequest(
            f"{path!r} has max_norm with norm_type {old.norm_type}; only 2 is supported"
        )
    if is_bag and old.padding_idx is not None:
        raise BadRequest(
            f"{path!r} has padding_idx, whose keys it skips; leave such keys out of the bags instead"
        )
    layer: torch.nn.Module
    if is_bag:
        layer = EmbeddingBag(
            *table,
            mode=old.mode,
            include_last_offset=old.include_last_offset,
            max_norm=old.max_norm,
            version=version,
        )
    else:
        layer = Embedding(*table, max_norm=old.max_norm, version=version)
    if layer.embedding_dim != old.embedding_dim:
        raise BadRequest(
            f"{path!r} has dim {old.embedding_dim}, table '{table[1]}/{table[2]}' has {layer.embedding_dim}"
        )
    return layer
