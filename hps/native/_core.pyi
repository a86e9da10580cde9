import numpy as np
from numpy.typing import NDArray

def partition_hash(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The HPS partition hash of each key: (n,) uint64."""

def dedup(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct keys in order of first appearance (u,), and each key's position among them (n,)."""
