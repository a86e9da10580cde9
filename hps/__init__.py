"""hps: an inference parameter server. ``hps.open(config)`` serves models without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hps.build import open

__all__ = ["__version__", "open"]


def __getattr__(name: str) -> Any:
    # Nothing is imported until it is asked for: `import hps` costs no ONNX Runtime and no RocksDB.
    if name == "open":
        from hps.build import open

        return open
    if name == "__version__":
        from importlib.metadata import version

        return version("hps-server")
    raise AttributeError(f"module 'hps' has no attribute {name!r}")
