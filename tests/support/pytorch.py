"""The modules `torch` and `hps.torch`, for tests.

PyTorch is installed beside hps, or in the environment of the FBGEMM peer. A test module that imports this one
is skipped where PyTorch is missing; tests/unit/torch/test_requirement.py then fails where ``CI`` is set."""

from __future__ import annotations

import os
import sys
import warnings

import pytest

from benchmarks.peers.environments import FBGEMM

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes that compile
if FBGEMM.ready():
    sys.path.append(str(FBGEMM.site))  # last: what hps needs comes from its own environment
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        import hps.torch as hps_torch
except ImportError as error:
    pytest.skip(
        f"PyTorch is missing ({error}): run `.venv/bin/python -m benchmarks.peers fbgemm`, a download of "
        "2 GB, or install torch in .venv",
        allow_module_level=True,
    )
torch.manual_seed(0)

__all__ = ["hps_torch", "torch"]
