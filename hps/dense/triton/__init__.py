"""Networks that a Triton server runs."""

from hps.dense.triton.model import TritonModel, TritonRunOptions

__all__ = ["TritonModel", "TritonRunOptions"]
