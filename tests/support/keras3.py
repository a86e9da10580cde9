"""The modules `keras` and `hps.keras`, for tests; ``KERAS_BACKEND`` names the backend, by default TensorFlow.

Keras and TensorFlow are installed beside hps, or in the environment of the peer ``keras``; PyTorch as in
`tests.support.pytorch`. A test module that imports this one is skipped where they are missing;
tests/unit/keras/test_requirement.py then fails where ``CI`` is set."""

from __future__ import annotations

import os
import sys
import warnings

import pytest

from benchmarks.peers.environments import FBGEMM, KERAS

BACKEND = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # reports of instruction sets and missing GPUs
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # sums in one order
for peer in (KERAS, FBGEMM)[: 1 if BACKEND == "tensorflow" else 2]:
    if peer.ready() and str(peer.site) not in sys.path:
        sys.path.append(str(peer.site))  # last: what hps needs comes from its own environment
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import keras

        import hps.keras as hps_keras
except ImportError as error:
    pytest.skip(
        f"Keras or its backend is missing ({error}): run `.venv/bin/python -m benchmarks.peers keras`, a "
        "download of 300 MB, or install keras and tensorflow-cpu in .venv",
        allow_module_level=True,
    )
keras.utils.set_random_seed(0)

__all__ = ["BACKEND", "hps_keras", "keras"]
