"""Owners of the keys of a table that is split over several GPUs. Twin of partition.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hps.cuda.layout import mix
from hps.cuda.loader import cupy
from hps.errors import GpuUnavailable
from hps.types import IndexArray, KeyArray

MOST_OWNERS = 16
"""As many GPUs as a host has at most."""
_ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled
_DEVIATIONS = 6
"""Standard deviations of a share's size that `rows_per_owner` adds: exceeded once in 10⁹ tables."""


def owner_of(keys: KeyArray, owners: int) -> NDArray[np.uint8]:
    """Return the owner of each of ``keys (n,)``, ``(n,)``, below ``owners`` (1 … `MOST_OWNERS`).

    The hash is mixed once more: its own bits choose the bucket, and an owner's keys must fill all of them."""
    high = mix(mix(keys).view(np.int64)) >> np.uint64(32)
    return (high * np.uint64(owners) >> np.uint64(32)).astype(np.uint8)


def partition(keys: KeyArray, owners: int, left_out: int | None = None) -> list[IndexArray]:
    """Return the ascending positions in ``keys (n,)`` of each owner's keys; none for ``left_out``."""
    owner = owner_of(keys, owners)
    return [np.flatnonzero(owner == each) if each != left_out else _NONE for each in range(owners)]


def rows_per_owner(rows: int, owners: int) -> int:
    """Return a capacity in which each owner's share of ``rows`` keys finds room."""
    share = rows / owners
    spread = math.sqrt(share * (1 - 1 / owners))
    return min(rows, math.ceil(share + _DEVIATIONS * spread))


def enable_peer_access(devices: Sequence[int]) -> None:
    """Let kernels of each of ``devices`` read and write the memory of the others. Thread-safe.

    Raises GpuUnavailable, before it changes anything, if two of them have no connection for that."""
    pairs = [(one, other) for one in devices for other in devices if one != other]
    if not pairs:
        return
    cp = cupy()
    runtime = cp.cuda.runtime
    for one, other in pairs:
        if not runtime.deviceCanAccessPeer(one, other):
            raise GpuUnavailable(
                f"GPU {one} can't read the memory of GPU {other}, so a table can't be split over them: they "
                "need NVLink, or PCI Express that lets them access each other (nvidia-smi topo -p2p r). "
                "Keep a copy of the table on each instead"
            )
    for one, other in pairs:
        with cp.cuda.Device(one):
            try:
                runtime.deviceEnablePeerAccess(other)
            except runtime.CUDARuntimeError as error:
                if error.status != _ALREADY_ENABLED:
                    raise


_NONE = np.empty(0, np.int64)
