"""Backends: where a table's memory is, and what changes it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hps import native
from hps.errors import ConfigError, Unsupported
from hps.native import twin_scored
from hps.table.memory import DeviceMemory, HostMemory, Memory
from hps.types import IndexArray, KeyArray

Mask = NDArray[np.bool_]
Scores = NDArray[np.uint64]


class Backend(Protocol):
    """A table of buckets with ``SLOTS`` slots each; `twin_scored.ScoredTable` describes the methods.

    Arguments are checked, contiguous arrays in the backend's memory (`memory_of`), and so are results. A
    backend need not give rows their slot's number: numbers are from 0 to less than
    ``len(rows)``, and may change with any write. Nor need it keep a bucket's 128 slots: it keeps a new key if
    any of the slots that the key may take is free, and otherwise evicts the lowest score among them. The
    slots' order in `export` is its own.
    """

    @property
    def buckets(self) -> int: ...
    @property
    def max_buckets(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def rows(self) -> NDArray[Any]: ...
    def find(self, keys: KeyArray, rows: NDArray[Any] | None, scores: Scores | None) -> Mask: ...
    def find_rows(self, keys: KeyArray) -> IndexArray: ...
    def write(
        self,
        operation: int,
        keys: KeyArray,
        rows: NDArray[Any] | None,
        accumulate: Mask | None,
        rule: int,
        base: int,
        scores: Scores | None,
        with_evicted: bool,
    ) -> tuple[Mask, tuple[KeyArray, NDArray[Any], Scores] | None]: ...
    def erase(self, keys: KeyArray, scores: Scores | None) -> Mask: ...
    def export(
        self, first: int, slots: int, with_rows: bool
    ) -> tuple[KeyArray, Scores, NDArray[Any] | None]: ...
    def clear(self) -> None: ...
    def set_max_buckets(self, max_buckets: int) -> None: ...
    def reserve(self, buckets: int) -> None: ...


_ON_HOST: dict[str, Any] = {"cpu": native.ScoredTable, "twin": twin_scored.ScoredTable}
BACKENDS = (*_ON_HOST, "cuda")
SLOTS = twin_scored.SLOTS


def backend_class(name: str) -> Any:
    """Return the class of backend ``name``. Raises ConfigError."""
    if name not in BACKENDS:
        raise ConfigError(f"backend is {name!r}, but must be one of {', '.join(BACKENDS)}")
    if name in _ON_HOST:
        return _ON_HOST[name]
    from hps.table.device_table import ScoredTable

    return ScoredTable


def backend_options(name: str, device_share: float) -> dict[str, Any]:
    """Return the class's options for ``device_share`` of the rows on a device. Raises ConfigError."""
    eighths = 8 * device_share
    if not 0 <= eighths <= 8 or eighths != int(eighths):
        raise ConfigError(
            f"device_share is {device_share}, but must be a multiple of 1/8 from 0 to 1"
        )
    if name not in _ON_HOST:
        return {"device_slots": int(eighths) * SLOTS // 8}
    if eighths < 8:
        raise ConfigError(
            f"device_share is {device_share}, but backend {name} has all rows in host memory"
        )
    return {}


def memory_of(name: str) -> Memory:
    """Return the memory of backend ``name``, a device's current one. Raises ConfigError."""
    try:
        return HostMemory() if name in _ON_HOST else DeviceMemory()
    except Unsupported as error:
        raise ConfigError(f"backend is {name!r}, but {error}") from None
