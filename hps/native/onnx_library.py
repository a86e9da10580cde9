"""The library of operators for ONNX Runtime, which is in the compiled core only (`hps.native.COMPILED`)."""

from __future__ import annotations

from hps.native import _core
from hps.native._core import set_onnx_kernels

LIBRARY: str = _core.__file__
"""The path for ``SessionOptions.register_custom_ops_library``."""

__all__ = ["LIBRARY", "set_onnx_kernels"]
