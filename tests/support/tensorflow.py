"""The module `tensorflow`, for tests of Keras's backend TensorFlow: skipped on another backend."""

from __future__ import annotations

import pytest

from tests.support.keras3 import BACKEND

if BACKEND != "tensorflow":
    pytest.skip("Keras's backend is not TensorFlow", allow_module_level=True)

import tensorflow as tf

__all__ = ["tf"]
