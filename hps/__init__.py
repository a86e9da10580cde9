"""hps: an inference parameter server. ``hps.open(config)`` serves models without a server.

    import hps

    with hps.open("hps.yaml") as node:
        node.lookup("ctr", {"user": [17, 42]}).vectors["user"]  # (2, dim)
        node.predict("ctr", {"user": [17], "ad": [4]}, {"depth": [[2.0]]}).outputs

docs/python.md describes the API; ``hps.client`` sends requests to a server."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hps.config import Settings
    from hps.errors import HpsError
    from hps.node.attached import Attached, attach
    from hps.node.build import open
    from hps.node.connected import Connected, connect
    from hps.node.node import Node
    from hps.types import (
        JaggedKeys,
        LookupRequest,
        LookupResult,
        PredictRequest,
        PredictResult,
        Source,
    )

    __version__: str

__all__ = [
    "Attached",
    "Connected",
    "HpsError",
    "JaggedKeys",
    "LookupRequest",
    "LookupResult",
    "Node",
    "PredictRequest",
    "PredictResult",
    "Settings",
    "Source",
    "__version__",
    "attach",
    "connect",
    "open",
]

# Names are imported on first access: `import hps` loads neither ONNX Runtime nor RocksDB.
_HOMES = {
    "open": "hps.node.build",
    "attach": "hps.node.attached",
    "Attached": "hps.node.attached",
    "connect": "hps.node.connected",
    "Connected": "hps.node.connected",
    "Node": "hps.node.node",
    "Settings": "hps.config",
    "HpsError": "hps.errors",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hps-server")
    if name not in __all__:
        raise AttributeError(f"module 'hps' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "hps.types")), name)


def __dir__() -> list[str]:
    return __all__
