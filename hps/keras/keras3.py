"""The module `keras`, which the rest of this package imports from here.

Keras and its backend are no dependencies of hps: users choose the backend."""

from __future__ import annotations

from hps.errors import PackageMissing

_REMEDY = (
    "install Keras 3 and a backend: pip install keras tensorflow-cpu, or pip install keras torch "
    "and set KERAS_BACKEND=torch"
)
BACKENDS = ("tensorflow", "torch")

try:
    import keras
except ImportError as error:
    raise PackageMissing(f"hps.keras needs Keras ({error}); {_REMEDY}") from error
if int(keras.__version__.split(".")[0]) < 3:
    raise PackageMissing(f"hps.keras does not work with Keras {keras.__version__}; {_REMEDY}")
if keras.backend.backend() not in BACKENDS:
    raise PackageMissing(
        f"hps.keras does not work with Keras's backend {keras.backend.backend()}; {_REMEDY}"
    )

__all__ = ["BACKENDS", "keras"]
