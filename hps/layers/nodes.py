"""Registry of the nodes that layers, exported programs and ONNX files name. Thread-safe.

Graphs and saved models hold constants, not objects: they hold a node's name. One registry serves the layers
of all frameworks."""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING

from hps.errors import BadRequest, NotFound
from hps.suggestions import hint_for

if TYPE_CHECKING:
    from hps.node.served_models import OpenModels

_nodes: dict[str, OpenModels] = {}
_lock = threading.Lock()
_numbers = count(1)


def register_node(name: str, node: OpenModels) -> None:
    """Let layers and exported programs find ``node`` by ``name``; replaces the node of that name.

    ``node`` is the result of ``hps.open``, ``hps.attach`` or ``hps.connect``. The registry refers to it
    until `unregister_node`, and does not close it. Raises ``BadRequest`` for anything else."""
    _require_node(node)
    with _lock:
        _nodes[name] = node


def unregister_node(name: str) -> None:
    """Remove a node from the registry; layers that name it then raise ``NotFound``. Idempotent."""
    with _lock:
        _nodes.pop(name, None)


def find_node(name: str) -> OpenModels:
    """Return the node registered as ``name``. Raises ``NotFound``."""
    node = _nodes.get(name)
    if node is None:
        raise NotFound(
            f"no node is registered as {name!r} in this process{hint_for(name, [*_nodes], 'known are')}; "
            f"call register_node({name!r}, node) first"
        )
    return node


def node_name(node: OpenModels | str) -> str:
    """Return the name of a registered node; register another one as ``node-1``, ``node-2``, ….

    Raises ``NotFound`` for a name that is not registered, ``BadRequest`` for what is not a node."""
    if isinstance(node, str):
        find_node(node)
        return node
    _require_node(node)
    with _lock:
        name = next((name for name, known in _nodes.items() if known is node), None)
        if name is None:
            name = next(name for number in _numbers if (name := f"node-{number}") not in _nodes)
            _nodes[name] = node
        return name


def _require_node(node: object) -> None:
    if not all(hasattr(node, name) for name in ("lookup", "table", "model", "models")):
        raise BadRequest(
            f"{type(node).__name__} is not a node; pass the result of hps.open, hps.attach or "
            "hps.connect, or the name of a registered node"
        )
