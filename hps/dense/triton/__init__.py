"""Networks that a Triton server runs."""

from hps.dense.triton.model import TritonModel

__all__ = ["TritonModel"]
