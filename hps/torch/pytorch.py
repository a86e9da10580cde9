"""The module `torch`, which the rest of this package imports from here.

PyTorch is not a dependency of hps: its builds differ by platform and CUDA version, and users choose one."""

from __future__ import annotations

from hps.errors import PackageMissing

_REMEDY = "install PyTorch 2.4 or newer: pip install torch"

try:
    import torch
except ImportError as error:
    raise PackageMissing(f"hps.torch needs PyTorch ({error}); {_REMEDY}") from error
if not hasattr(torch.library, "register_autograd"):
    raise PackageMissing(f"hps.torch does not work with PyTorch {torch.__version__}; {_REMEDY}")

__all__ = ["torch"]
